"""The messages of a trace in the form of OpenAI Chat, whatever dialect its harness spoke.

A request is stored as digests of raw spans against an earlier request (`RequestRecord`). It is put
together again and read by the dialect that read it when it came, so what a trace shows is what the
model was shown. A trace's messages are those of its first request, then, turn by turn, the reply as
it was given and what the harness added to it. The harness's own copy of a reply is left out: what
was sampled is the fact.

Who trains needs ids, not messages: `Messages` reads them when somebody looks.

`script_of` makes a script of the scripted engine (`bridle show SESSION --as-script`). A harness
that meets this script samples the same ids again, so a session is replayed without its model.
Replay needs the tokenizer of the run. `tests/cli/test_show.py` replays one.

`draw` shows a conversation as lines for people: who spoke, how many tokens, what trains and why
not. Lines are `(depth, text)`; the command line prints them. A chain of turns stays at one depth;
where a conversation branches, its longest branch does too and the others go one deeper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict, TypeVar, overload

from bridle.capture.records import Exchange, SessionCapture
from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.dialects.media import shown_block
from bridle.dialects.openai_chat_write import chat_messages, chat_tools
from bridle.errors import RequestError, StoreError, boundary
from bridle.trajectory.builders import mark
from bridle.trajectory.graph import ExchangeNode, Graph, by_time, first_ids, grow
from bridle.trajectory.sample import MaskReason
from bridle.types import (
    JSON,
    Ids,
    Kind,
    MediaPart,
    Message,
    ModelRequest,
    Role,
    first_difference,
)


class Transcript:
    """Reads the messages of one session's exchanges; every span is decoded once.

    What cannot be read (a body that the store lacks, a request that its dialect refuses) raises
    `StoreError` with the exchange's id.
    """

    def __init__(self, exchanges: Iterable[Exchange], bodies: Mapping[bytes, bytes]) -> None:
        self._exchanges = {exchange.exchange_id: exchange for exchange in exchanges}
        self._bodies = bodies
        self._memo: dict[bytes, tuple[Message, ...]] = {}
        self._requests: dict[str, ModelRequest] = {}
        self._replies: dict[str, tuple[Message, ...]] = {}

    def request(self, exchange: Exchange) -> ModelRequest:
        known = self._requests.get(exchange.exchange_id)
        if known is None:
            body = self.body(exchange)
            with _reading(exchange, "request"):
                route = Route(exchange.dialect, RouteKind.GENERATE, model="policy")
                known = DIALECTS[exchange.dialect].parse(route, body, self._memo)
            self._requests[exchange.exchange_id] = known
        return known

    def body(self, exchange: Exchange) -> bytes:
        """Return the JSON of an exchange's request, as the harness sent its parts."""
        with _reading(exchange, "request"):
            tools = exchange.request.tools
            return DIALECTS[exchange.dialect].body(
                exchange.request.head,
                [self._bodies[digest] for digest in self._spans(exchange)],
                None if tools is None else self._bodies[tools],
            )

    def reply(self, exchange: Exchange) -> tuple[Message, ...]:
        """Return the assistant messages of an exchange's reply; none where no reply was kept."""
        known = self._replies.get(exchange.exchange_id)
        if known is None:
            with _reading(exchange, "reply"):
                wire = DIALECTS[exchange.dialect]
                known = wire.reply_messages(exchange.reply) if exchange.reply else ()
            self._replies[exchange.exchange_id] = known
        return known

    def trace(self, path: Sequence[Exchange]) -> TraceTexts:
        """Return the messages of a path of exchanges before its first reply, those after, and its
        tools.
        """
        root = path[0]
        sent = root.request.tools is not None
        return {
            "prompt_messages": Messages(lambda: self.prompt_messages(root)),
            "response_messages": Messages(lambda: self.response_messages(path)),
            "turn_messages": ReadLater(lambda: self.turn_messages(path)),
            "tools": Messages(lambda: self.tools(root) or []) if sent else None,
        }

    def media(self, path: Sequence[Exchange]) -> list[JSON]:
        """Return digest and type of the images and files in the last request of a path, in order.

        A block of unknown type that is shown as text is none of them.
        """
        return [
            {"digest": part.digest, "media_type": part.media_type}
            for message in self.request(path[-1]).messages
            for part in message.content
            if isinstance(part, MediaPart) and shown_block(part) is None
        ]

    def prompt_messages(self, exchange: Exchange) -> list[JSON]:
        """Return all messages of a request as OpenAI Chat has them."""
        return chat_messages(self.request(exchange).messages)

    def response_messages(self, path: Sequence[Exchange]) -> list[JSON]:
        """Return the messages after the first request on a path, in the form of OpenAI Chat."""
        return chat_messages([message for part in self._response(path) for message in part])

    def turn_messages(self, path: Sequence[Exchange]) -> list[int]:
        """Return, for each exchange of a path, the index of its reply in
        `response_messages(path)`.
        """
        # Each is one message there. Replies and what was added to them take turns.
        ends = itertools.accumulate(map(len, self._response(path)), initial=0)
        return [*itertools.islice(ends, 0, 2 * len(path), 2)]

    def _response(self, path: Sequence[Exchange]) -> list[Sequence[Message]]:
        """Return the first reply on a path, then what the harness added, the next reply, ..."""
        parts: list[Sequence[Message]] = [self.reply(path[0])]
        if len(path) > 1:
            last = self.request(path[-1])
            ends = _ends_of_spans(last)
            for before, exchange in itertools.pairwise(path):
                start, end = (
                    ends[min(span_count(each), len(ends) - 1)] for each in (before, exchange)
                )
                parts += [self._added(before, last.messages[start:end]), self.reply(exchange)]
        return parts

    def added(self, exchange: Exchange) -> tuple[Message, ...]:
        """Return the messages that are new with a request, without the policy's own reply before
        them.

        In a first request, all are new.
        """
        request = self.request(exchange)
        base = self._exchanges.get(exchange.request.base or "")
        if base is None:
            return request.messages
        ends = _ends_of_spans(request)
        new = request.messages[ends[min(exchange.request.kept_spans, len(ends) - 1)] :]
        return self._added(base, new)

    def tools(self, exchange: Exchange) -> list[JSON] | None:
        """Return the tool list of a request as OpenAI Chat has it; `None` if it sent none."""
        tools = self.request(exchange).tools
        return chat_tools(tools) if tools else None

    def _added(self, before: Exchange, new: Sequence[Message]) -> tuple[Message, ...]:
        """Return the new messages after an exchange without the harness's copy of its reply."""
        echo = len(self.reply(before))
        own = itertools.takewhile(lambda message: message.role is Role.ASSISTANT, new[:echo])
        return tuple(new[sum(1 for _ in own) :])

    def _spans(self, exchange: Exchange) -> list[bytes]:
        """Return the digests of all spans of a request, in order. `KeyError` = no such base."""
        runs: list[Sequence[bytes]] = []
        take = span_count(exchange)
        at = exchange
        seen: set[str] = set()
        while True:
            request = at.request
            runs.append(request.spans[: max(0, take - request.kept_spans)])
            take = min(take, request.kept_spans)
            if take == 0 or request.base is None or at.exchange_id in seen:
                return [digest for run in reversed(runs) for digest in run]
            seen.add(at.exchange_id)
            at = self._exchanges[request.base]


T = TypeVar("T")


class ReadLater(Sequence[T]):
    """Values that are read when the first of them is asked for.

    Equal to any list of the same values. Empty where they cannot be read; `missing` says why.
    """

    def __init__(self, read: Callable[[], list[T]]) -> None:
        self._read: Callable[[], list[T]] | None = read
        self._values: list[T] = []
        self._missing: str | None = None

    @property
    def missing(self) -> str | None:
        """Reason why the values cannot be read; `None` = they can."""
        self.whole()
        return self._missing

    def whole(self) -> list[T]:
        """Return all values, read now if they were not yet; empty where they cannot be read."""
        if self._read is not None:
            try:
                self._values = self._read()
            except StoreError as error:
                self._missing = str(error)
            self._read = None
        return self._values

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.whole()[index]

    def __len__(self) -> int:
        return len(self.whole())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.whole() == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.whole())

    def __reduce__(self) -> tuple[type[list[T]], tuple[list[T]]]:
        return list, (self.whole(),)


class Messages(ReadLater[JSON]):
    """Messages or tools in the form of OpenAI Chat."""


class TraceTexts(TypedDict):
    """The texts of a trace, by the names of its fields."""

    prompt_messages: Messages
    response_messages: Messages
    turn_messages: ReadLater[int]
    tools: Messages | None


@contextmanager
def _reading(exchange: Exchange, what: str) -> Iterator[None]:
    doing = f"exchange {exchange.exchange_id}: cannot read its {what}"
    try:
        with boundary(StoreError, doing):
            yield
    except RequestError as error:
        raise StoreError(f"{doing}: {error}") from error


def span_count(exchange: Exchange) -> int:
    """Return how many messages (as spans of JSON) an exchange's request has."""
    return exchange.request.kept_spans + len(exchange.request.spans)


def _ends_of_spans(request: ModelRequest) -> list[int]:
    """Return the indices into `messages` after the head and the first 0, 1, 2... spans."""
    lengths = request.span_lengths
    return list(itertools.accumulate(lengths, initial=request.head_messages))


def script_of(capture: SessionCapture) -> JSON:
    """Convert a session to a script for the scripted engine, with the sampled ids.

    It has a conversation per leaf, longest first. Conversations are recognised by the system and
    first user text of their root, so that of several branches of a root the longest is replayed.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    transcript = Transcript(capture.exchanges, capture.bodies)
    paths = [_path(node) for node in graph.nodes.values() if node.is_leaf]
    paths.sort(key=len, reverse=True)
    return {"conversations": [_conversation(path, transcript) for path in paths]}


def _path(leaf: ExchangeNode) -> list[Exchange]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return [node.exchange for node in reversed(path)]


def _conversation(path: list[Exchange], transcript: Transcript) -> JSON:
    messages = transcript.request(path[0]).messages
    texts = {role: [m.text for m in messages if m.role is role] for role in Role}
    when = {"system_contains": texts[Role.SYSTEM][:1], "user_contains": texts[Role.USER][:1]}
    return {
        "when": {name: found for name, found in when.items() if any(found)},
        "skip": len(texts[Role.ASSISTANT]),
        "turns": [_turn(exchange, transcript) for exchange in path],
    }


def _turn(exchange: Exchange, transcript: Transcript) -> JSON:
    """Return a turn with its ids; the text is for readers of the script only."""
    turn: JSON = {"token_ids": exchange.output_ids.tolist()}
    if text := " ".join(message.text for message in transcript.reply(exchange)):
        turn["content"] = text
    if exchange.finish_reason == "length":
        turn["finish"] = "length"
    return turn


# ---- a conversation for people


EXCERPT = 60
"""Characters of a reply that a line shows."""

AROUND = 8
"""Ids shown before and after the position at which two prompts part."""


def draw(capture: SessionCapture, train: Collection[Kind]) -> list[tuple[int, str]]:
    """Return the forest of a session's exchanges as `(depth, text)` lines to print.

    Each root begins with a line of its own; then one line per exchange: its id and kind, the roles
    of its new messages, tokens in and out, the use of the sampled tokens, the beginning of the
    reply.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    marks = mark(graph, capture.exchanges, capture.deliveries, train)
    transcript = Transcript(capture.exchanges, capture.bodies)
    lines: list[tuple[int, str]] = []
    for depth, node in branches(graph):
        exchange = node.exchange
        if node.parent is None:
            after = f", continues {exchange.continues}" if exchange.continues else ""
            lines.append((depth, f"root: {exchange.root_reason or 'root'}{after}"))
        reason = marks.by_exchange[exchange.exchange_id]
        lines.append((depth + 1, _exchange_line(node, reason, transcript)))
    lines += [
        (0, f"{exchange.exchange_id}: left out: {why}, {len(exchange.output_ids)} sampled")
        for exchange, why in graph.lost
    ]
    return lines


def branches(graph: Graph) -> list[tuple[int, ExchangeNode]]:
    """Return the nodes depth first, each with its depth.

    Where a conversation branches, the branch with the most exchanges stays at its depth and comes
    last, so that a long session with many retries stays narrow.
    """
    sizes: dict[str, int] = {}
    for name, node in reversed(graph.nodes.items()):
        sizes[name] = 1 + sum(sizes[child.exchange.exchange_id] for child in node.children)

    def rank(node: ExchangeNode) -> tuple[int, tuple[float, str]]:
        return sizes[node.exchange.exchange_id], by_time(node)

    found: list[tuple[int, ExchangeNode]] = []
    stack = [(0, root) for root in sorted(graph.roots, key=by_time)][::-1]
    while stack:
        depth, node = stack.pop()
        found.append((depth, node))
        main = max(node.children, key=rank, default=None)
        if main is not None:
            stack.append((depth, main))
        beside = [child for child in node.children if child is not main]
        stack += [(depth + 1, child) for child in sorted(beside, key=by_time)][::-1]
    return found


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
    """Return the roles of the messages that are new with a request, as `tool x2, user`."""
    try:
        roles = [str(message.role) for message in transcript.added(exchange)]
    except StoreError:
        return "?"
    runs = [(role, len(list(run))) for role, run in itertools.groupby(roles)]
    return ", ".join(role if count == 1 else f"{role} x{count}" for role, count in runs) or "-"


def excerpt(exchange: Exchange, transcript: Transcript, length: int = EXCERPT) -> str:
    """Return the first `length` characters of an exchange's reply, calls as `name(arguments)`."""
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

    They are the recorded reasons, and the first position at which the prompt of `two` differs from
    the prompt and reply of `one`, with the ids around it and, given `decode`, their texts. Raises
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
