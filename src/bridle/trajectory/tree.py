"""A conversation as lines for people: who spoke, how many tokens, what trains and why not.

Pure: lines are `(depth, text)`; the command line prints them. A chain of turns stays at one depth;
where a conversation branches, its longest branch does too and the others go one deeper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from bridle.capture.records import Exchange, SessionCapture
from bridle.errors import StoreError
from bridle.trajectory.graph import ExchangeNode, Graph, first_difference, first_ids, grow, order_of
from bridle.trajectory.masks import mark
from bridle.trajectory.sample import MaskReason
from bridle.trajectory.transcript import Transcript
from bridle.types import Ids, Kind

EXCERPT = 60
"""Characters of a reply that a line shows."""

AROUND = 8
"""Ids shown before and after the position at which two prompts part."""


def draw(capture: SessionCapture, train: Collection[Kind]) -> list[tuple[int, str]]:
    """Return the conversation of a session as `(depth, text)` lines.

    Each root begins with a line of its own; then one line per exchange: its id and kind, who spoke
    in what is new, tokens in and out, the use of the sampled tokens, the beginning of the
    reply.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    marks = mark(graph, capture.exchanges, capture.deliveries, train)
    transcript = Transcript(capture.exchanges, capture.bodies)
    lines: list[tuple[int, str]] = []
    for depth, node in branches(graph):
        exchange = node.exchange
        if node.parent is None:
            lines.append((depth, _root_line(exchange)))
        reason = marks.by_exchange[exchange.exchange_id]
        lines.append((depth + 1, _exchange_line(node, reason, transcript)))
    lines += [
        (0, f"{exchange.exchange_id}: left out: {why}, {len(exchange.output_ids)} sampled")
        for exchange, why in graph.lost
    ]
    return lines


def branches(graph: Graph) -> list[tuple[int, ExchangeNode]]:
    """Nodes depth first. Where a conversation branches, the branch with the most exchanges stays
    at its depth and comes last, so that a long session with many retries stays narrow.
    """
    sizes: dict[str, int] = {}
    for name, node in reversed(graph.nodes.items()):
        sizes[name] = 1 + sum(sizes[child.exchange.exchange_id] for child in node.children)

    def rank(node: ExchangeNode) -> tuple[int, tuple[float, str]]:
        return sizes[node.exchange.exchange_id], _by_time(node)

    found: list[tuple[int, ExchangeNode]] = []
    stack = [(0, root) for root in sorted(graph.roots, key=_by_time)][::-1]
    while stack:
        depth, node = stack.pop()
        found.append((depth, node))
        main = max(node.children, key=rank, default=None)
        if main is not None:
            stack.append((depth, main))
        beside = [child for child in node.children if child is not main]
        stack += [(depth + 1, child) for child in sorted(beside, key=_by_time)][::-1]
    return found


def _by_time(node: ExchangeNode) -> tuple[float, str]:
    return order_of(node.exchange)


def _root_line(exchange: Exchange) -> str:
    reason = exchange.root_reason or "root"
    after = f", continues {exchange.continues}" if exchange.continues else ""
    return f"root: {reason}{after}"


def _exchange_line(node: ExchangeNode, reason: MaskReason, transcript: Transcript) -> str:
    exchange = node.exchange
    fate = "trains" if reason is MaskReason.TRAINED else f"masked: {reason.key}"
    new = node.prompt_length - node.kept
    parts = [
        f"{exchange.exchange_id} {exchange.kind}",
        f"{speakers(exchange, transcript)} -> assistant",
        f"{node.kept}+{new} ids -> {len(exchange.output_ids)} sampled ({exchange.finish_reason})",
        fate,
    ]
    if drift := exchange.extra.get("drift"):
        parts.append(f"drift: {drift}")
    if said := excerpt(exchange, transcript):
        parts.append(said)
    return " | ".join(parts)


def speakers(exchange: Exchange, transcript: Transcript) -> str:
    """Roles of the messages that are new with a request, e.g. `tool x2, user`."""
    try:
        roles = [str(message.role) for message in transcript.added(exchange)]
    except StoreError:
        return "?"
    runs = [(role, len(list(run))) for role, run in itertools.groupby(roles)]
    return ", ".join(role if count == 1 else f"{role} x{count}" for role, count in runs) or "-"


def excerpt(exchange: Exchange, transcript: Transcript, length: int = EXCERPT) -> str:
    """Return the first `length` characters of what was said, calls as `name(arguments)`."""
    try:
        messages = transcript.reply(exchange)
    except StoreError:
        return ""
    said: list[str] = []
    for message in messages:
        said.append(message.text)
        said += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    text = " ".join(" ".join(said).split())
    return text if len(text) <= length else text[: length - 3] + "..."


def explain_fork(
    capture: SessionCapture,
    one: str,
    two: str,
    decode: Callable[[Ids], str] | None = None,
) -> list[str]:
    """List the reasons why exchange `two` does not extend exchange `one`, as lines of text.

    Says what capture recorded, and the first position at which `two`'s prompt parts from all that
    `one` knew and said, with the ids around it and, given `decode`, their texts. Raises
    `StoreError` for an exchange that the session does not have or whose ids cannot be put together.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    before, after = _node(graph, one), _node(graph, two)
    old = first_ids(before, before.length)
    new = first_ids(after, after.exchange.prompt_length)
    sampled, record = len(before.exchange.output_ids), after.exchange
    links = f"parent {record.parent_id}, continues {record.continues}"
    lines = [
        f"{one}: {len(old) - sampled} prompt ids + {sampled} sampled",
        f"{two}: {len(new)} prompt ids",
        f"{two} was recorded with {links}, root reason {record.root_reason}",
    ]
    position = first_difference(old, new)
    if position == len(old):
        return [*lines, f"{two} extends {one}: its prompt begins with all {len(old)} ids of it"]
    part = "prompt" if position < before.exchange.prompt_length else "sampled ids"
    if position == len(new):
        return [*lines, f"{two}'s prompt ends at position {position}, inside {one}'s {part}"]
    lines.append(f"they part at position {position}, in {one}'s {part}")
    for name, side in ((one, old), (two, new)):
        shown = side[max(0, position - AROUND) : position + AROUND]
        text = f" {decode(shown)!r}" if decode is not None else ""
        lines.append(f"{name} around it: {shown.tolist()}{text}")
    return lines


def _node(graph: Graph, exchange_id: str) -> ExchangeNode:
    node = graph.nodes.get(exchange_id)
    if node is None:
        lost = {exchange.exchange_id: why for exchange, why in graph.lost}
        why = lost.get(exchange_id)
        message = (
            f"exchange {exchange_id!r} has no place in the conversation: {why}"
            if why
            else f"the session has no exchange {exchange_id!r}; it has {', '.join(graph.nodes)}"
        )
        raise StoreError(message)
    return node
