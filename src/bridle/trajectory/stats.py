"""The law numbers of a trajectory: `metadata["stats"]`, as promised in the design.

All token counts are of sampled tokens. Law 2 is asserted here:
`tokens_captured == tokens_trained + sum(tokens_excluded.values())`.

Drift is a turn that an engine's chat template wrote anew before the next one was sampled. Where an
engine takes messages only, each prompt is rendered from text again (root reasons `engine_prompt`,
`image`, `template`), so its ids may not begin with those that were sampled. Each such exchange gets
a class, against the exchange whose messages it continues:

- `exact`: its prompt begins with all that stood there, or with all but a last sampled token that
  the template writes in its own way (harmony samples `<|return|>` where its history has `<|end|>`;
  Llama and GLM have such pairs too); a reply that was cut by a stop string or its length has no
  close token, and the template adds one;
- `retokenized`: the same text, cut into other tokens;
- `rewritten`: anything else. The prompt before the turn changed, the harness changed the turn, or
  nothing shows where the turn ends.

Exchanges whose prompt holds every id before it extend it, whatever wrote them: law 1 holds. All
else forks. With `splice` the other `exact` and the `retokenized` ones are joined too: the sampled
tokens stay, and what the next turn was sampled under in their place is left out. Each such span is
flagged in its trace and counted; it is the one exception to law 1.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from bridle.capture.records import Damaged, Exchange
from bridle.trajectory.builders import Marks
from bridle.trajectory.graph import (
    Break,
    ExchangeNode,
    Graph,
    by_time,
    first_ids,
)
from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import JSON, FinishReason, Ids, Kind, first_difference

TEMPLATE_ROOTS = frozenset({"engine_prompt", "image", "template"})
"""Root reasons of prompts that an engine's chat template made."""


class DriftClass(StrEnum):
    """Kinds of difference between a sampled turn and its copy in the next prompt."""

    EXACT = "exact"
    RETOKENIZED = "retokenized"
    REWRITTEN = "rewritten"


@dataclass(frozen=True, slots=True)
class Splice:
    """A span that later turns of its path saw as other tokens."""

    exchange: str
    """The first exchange that did."""
    tokens: int
    """Length of the span; it ends where the exchange's own prompt begins."""
    kind: DriftClass


@dataclass(frozen=True, slots=True)
class Joined:
    """A forest after drift was looked at."""

    graph: Graph
    classes: dict[str, DriftClass] = field(default_factory=dict)
    """For every exchange that a template's prompt was sampled under and that continues another."""
    splices: dict[str, Splice] = field(default_factory=dict)
    """By exchange id."""
    extended: frozenset[str] = frozenset()
    """Exchanges that were joined to the one they continue, spliced ones too."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Difference between an exchange and the one it continues."""

    kind: DriftClass
    differ: int = 0
    """Last ids of the earlier path that its prompt shows as others."""
    rest: int = 0
    """Position in its prompt after the turn."""


_REWRITTEN = _Found(DriftClass.REWRITTEN)


def join(graph: Graph, *, splice: bool, close_token_ids: Collection[int] = ()) -> Joined:
    """Join exchanges whose prompt a chat template re-tokenised to those that they continue.

    Classifies how the tokens differ, and changes the nodes of `graph`. Differing ones are joined
    only with `splice`. `close_token_ids` end a turn, as sampled or in the template. The last token
    of a reply that ended by itself is one in any case.
    """
    classes: dict[str, DriftClass] = {}
    splices: dict[str, Splice] = {}
    extended: set[str] = set()
    drifted = [node for node in graph.nodes.values() if _from_template(node)]
    # What the engine was given, before any node is changed.
    looked_at = [*drifted, *(graph.nodes.get(n.exchange.continues or "") for n in drifted)]
    prompts = {
        n.exchange.exchange_id: first_ids(n, n.prompt_length) for n in looked_at if n is not None
    }
    for node in sorted(drifted, key=by_time):
        before = graph.nodes.get(node.exchange.continues or "")
        if before is None:
            continue
        name, prompt = node.exchange.exchange_id, prompts[node.exchange.exchange_id]
        given = prompts[before.exchange.exchange_id]
        found = _look(before.exchange, given, node.exchange, prompt, set(close_token_ids))
        classes[name] = found.kind
        if found.kind is DriftClass.REWRITTEN or (found.differ and not splice):
            continue
        if _attach(node, before, prompt[found.rest :]):
            extended.add(name)
            if found.differ:
                splices[name] = Splice(name, found.differ, found.kind)
    if extended:
        whole = extended - splices.keys()
        breaks = tuple(b for b in graph.breaks if b.exchange not in whole)
        graph = dataclasses.replace(graph, nodes=_parents_first(graph), breaks=breaks)
    return Joined(graph, classes, splices, frozenset(extended))


def _from_template(node: ExchangeNode) -> bool:
    exchange = node.exchange
    return (
        node.parent is None
        and node.sound
        and exchange.continues is not None
        and exchange.root_reason in TEMPLATE_ROOTS
    )


def _look(
    earlier: Exchange, given: Ids, exchange: Exchange, prompt: Ids, closes: set[int]
) -> _Found:
    """Compare a prompt with what was given and sampled before it."""
    old = np.concatenate([given, earlier.output_ids])
    at = first_difference(old, prompt)
    if at == len(old):
        return _Found(DriftClass.EXACT, 0, at)
    if at < len(given) or at == len(prompt) or exchange.extra.get("drift"):
        return _REWRITTEN
    differ, last = len(old) - at, int(old[-1])
    stopped = earlier.finish_reason is FinishReason.STOP
    if differ == 1 and (last in closes or (stopped and not closes)):
        same_place = not closes or int(prompt[at]) in closes
        return _Found(DriftClass.EXACT, 1, at + 1 if same_place else at)
    ends = np.flatnonzero(np.isin(prompt[at:], [*closes, *([last] if stopped else [])]))
    if not len(ends):
        return _REWRITTEN
    close = at + int(ends[0])
    closed = last in closes or (stopped and int(prompt[close]) == last)
    return _Found(DriftClass.RETOKENIZED, differ, close + 1 if closed else close)


def _attach(node: ExchangeNode, before: ExchangeNode, suffix: Ids) -> bool:
    """Make a root the child of `before`; return whether that could be done.

    Not where it is above `before` already, nor where a child keeps a part of its prompt only: that
    part has no place in the longer path.
    """
    at: ExchangeNode | None = before
    while at is not None:
        if at is node:
            return False
        at = at.parent
    if any(child.kept < node.prompt_length for child in node.children):
        return False
    longer = before.length + len(suffix) - node.prompt_length
    node.parent, node.kept, node.suffix = before, before.length, suffix
    node.prompt_length += longer
    before.children.append(node)
    below = [*node.children]
    while below and longer:
        child = below.pop()
        child.kept += longer
        child.prompt_length += longer
        below += child.children
    return True


def _parents_first(graph: Graph) -> dict[str, ExchangeNode]:
    """Return the nodes in an order in which parents come before children."""
    found: dict[str, ExchangeNode] = {}
    rank = sorted((n for n in graph.nodes.values() if n.parent is None), key=by_time)
    while rank:
        found |= {node.exchange.exchange_id: node for node in rank}
        rank = [child for node in rank for child in sorted(node.children, key=by_time)]
    return found


VERSION: Final = 2
"""`stats_version`: 1 (without the key) counted lineage per exchange, not per turn shown."""

TURNS: Final = {
    "turns_verbatim": "verbatim",
    "turns_rerendered": "rerendered",
    "turns_foreign": "foreign",
    "turns_given": "given",
    "tokens_rerendered": "tokens_rerendered",
}
"""Key of the statistics -> key of an exchange's `turns`."""


@dataclass(frozen=True, slots=True)
class Built:
    """Traces that a builder made of a session, with counts."""

    traces: Sequence[Trace]
    truncated: int = 0
    """Tokens that would have trained but for a length limit."""
    overlong: int = 0
    """Traces over the length limit."""
    cut: str | None = None
    """Reason why the session counts as truncated; `None` = it does not."""


def measure(
    joined: Joined,
    marks: Marks,
    exchanges: Sequence[Exchange],
    built: Built,
    *,
    damaged: Sequence[Damaged] = (),
) -> JSON:
    """Return a session's build statistics: tokens captured, trained and excluded by reason, and
    breaks.
    """
    graph = joined.graph
    unread = sum(row.sampled for row in damaged)
    captured = sum(len(exchange.output_ids) for exchange in exchanges) + unread
    trained = sum(int(np.count_nonzero(trace.loss_mask)) for trace in built.traces)
    broken = unread + sum(len(exchange.output_ids) for exchange, _ in graph.lost)
    lost = Counter({MaskReason.BROKEN.key: broken, MaskReason.TRUNCATED.key: built.truncated})
    masked = {r.key: n for r, n in marks.by_reason.items() if r is not MaskReason.TRAINED}
    excluded = lost + Counter(masked)  # without reasons that have no tokens
    assert captured == trained + excluded.total(), (captured, trained, excluded)
    continuing = [exchange for exchange in exchanges if exchange.continues is not None]
    rejected = [len(one.output_ids) for one in exchanges if one.exchange_id in marks.rejected]
    roots = sum(1 for _ in graph.roots)
    leaves = sum(node.is_leaf for node in graph.nodes.values())
    return {
        "exchanges": len(exchanges) + len(damaged),
        "roots": roots,
        "branches": leaves - roots,
        "traces": len(built.traces),
        "tokens_captured": captured,
        "tokens_trained": trained,
        "tokens_excluded": dict(sorted(excluded.items())),
        "stats_version": VERSION,
        **_lineage(exchanges, joined),
        "joins": marks.joins,
        "rejected": {"exchanges": len(rejected), "tokens": sum(rejected)},
        "malformed_calls": sum(one.extra.get("malformed_calls", 0) for one in exchanges),
        "drift": dict(sorted(_drift(continuing, joined).items())),
        "habits": dict(Counter(e.extra["habit"] for e in exchanges if "habit" in e.extra)),
        "ties": dict(Counter(e.extra["tie"] for e in exchanges if "tie" in e.extra)),
        "breaks": [_break(found) for found in graph.breaks]
        + [
            {"exchange": row.exchange_id, "position": 0, "reason": "damaged_row"} for row in damaged
        ],
        "spliced": {
            "spans": len(joined.splices),
            "tokens": sum(splice.tokens for splice in joined.splices.values()),
        },
        "unpaired": sum(exchange.extra.get("unpaired", 0) for exchange in exchanges),
        "unknown": dict(sorted(_named(exchanges, "unknown").items())),
        "unenforced": dict(sorted(_named(exchanges, "unenforced").items())),
        "overlong": built.overlong,
        "truncated": built.cut,
    }


def _lineage(exchanges: Sequence[Exchange], joined: Joined) -> JSON:
    """Sum the lineage of the assistant turns that requests show; `None` = not captured.

    Capture files of older versions do not have it. `merging` has the two numbers of the ratio.
    """
    counts = [exchange.extra.get("turns") for exchange in exchanges]
    known = None not in counts
    sums = {
        name: sum(found[key] for found in counts if found) if known else None
        for name, key in TURNS.items()
    }
    shown = [sums[f"turns_{kind}"] for kind in ("verbatim", "rerendered", "foreign")]
    agent = [exchange for exchange in exchanges if exchange.kind is Kind.AGENT]
    counted = all("turns" in exchange.extra for exchange in agent)
    ours = ("verbatim", "rerendered")
    showing = [e for e in agent if counted and any(e.extra["turns"][name] for name in ours)]
    extending = sum(e.parent_id is not None or e.exchange_id in joined.extended for e in showing)
    return {
        "turns_shown": sum(shown) if known else None,
        **sums,
        "merge_ratio": extending / len(showing) if showing else None,
        "merging": {"extending": extending, "showing": len(showing)} if counted else None,
    }


def with_texts(stats: JSON, decode: Callable[[Ids], str]) -> JSON:
    """Return build statistics with the text of each break added beside its token ids."""
    breaks = [
        found | {"texts": [decode(np.array(side, dtype=np.int32)) for side in found["ids"]]}
        if "ids" in found
        else found
        for found in stats["breaks"]
    ]
    return stats | {"breaks": breaks}


def _break(found: Break) -> JSON:
    """Return a break, with the ids on both sides where they are known."""
    sides = {} if found.around is None else {"ids": [list(side) for side in found.around]}
    return {
        "exchange": found.exchange,
        "position": found.position,
        "reason": found.reason,
        **sides,
    }


def _named(exchanges: Iterable[Exchange], key: str) -> Counter[str]:
    """Add up the names that each exchange's `extra` has under `key`: a list, or counts."""
    counts: Counter[str] = Counter()
    for exchange in exchanges:
        if named := exchange.extra.get(key):
            counts.update(named)
    return counts


def _drift(continuing: Iterable[Exchange], joined: Joined) -> Counter[str]:
    """Count how sampled turns differ in the next prompt: by ids where a template rendered them,
    else by the harness's copy of the message.
    """
    return Counter(
        str(joined.classes.get(exchange.exchange_id) or exchange.extra.get("drift") or "exact")
        for exchange in continuing
    )
