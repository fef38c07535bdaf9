"""The law numbers of a trajectory: `metadata["stats"]`, as promised in the design.

All token counts are of sampled tokens. Law 2 is asserted here:
`tokens_captured == tokens_trained + sum(tokens_excluded.values())`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bridle.capture.records import Damaged, Exchange
from bridle.trajectory.drift import Joined
from bridle.trajectory.graph import Break, Graph
from bridle.trajectory.masks import Marks
from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import JSON, Ids, Kind

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
    """Count the law numbers."""
    graph = joined.graph
    captured = sum(len(exchange.output_ids) for exchange in exchanges)
    captured += sum(row.sampled for row in damaged)
    trained = sum(int(np.count_nonzero(trace.loss_mask)) for trace in built.traces)
    excluded = _excluded(graph, marks)
    if broken := sum(row.sampled for row in damaged):
        excluded[MaskReason.BROKEN.key] += broken
    if built.truncated:
        excluded[MaskReason.TRUNCATED.key] += built.truncated
    assert captured == trained + excluded.total(), (captured, trained, excluded)
    continuing = [exchange for exchange in exchanges if exchange.continues is not None]
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
        "rejected": _rejected(exchanges, marks),
        "malformed_calls": sum(one.extra.get("malformed_calls", 0) for one in exchanges),
        "drift": dict(sorted(_drift(continuing, joined).items())),
        "habits": dict(Counter(e.extra["habit"] for e in exchanges if "habit" in e.extra)),
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
    showing = [e for e in agent if counted and _ours(e.extra["turns"])]
    extending = sum(e.parent_id is not None or e.exchange_id in joined.extended for e in showing)
    return {
        "turns_shown": sum(shown) if known else None,
        **sums,
        "merge_ratio": extending / len(showing) if showing else None,
        "merging": {"extending": extending, "showing": len(showing)} if counted else None,
    }


def _ours(turns: JSON) -> int:
    found: int = turns["verbatim"] + turns["rerendered"]
    return found


def _rejected(exchanges: Iterable[Exchange], marks: Marks) -> JSON:
    """Rejected replies and their sampled tokens, whether they train or not."""
    sizes = [len(one.output_ids) for one in exchanges if one.exchange_id in marks.rejected]
    return {"exchanges": len(sizes), "tokens": sum(sizes)}


def with_texts(stats: JSON, decode: Callable[[Ids], str]) -> JSON:
    """Return the numbers, with the texts of its breaks beside their ids."""
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


def _excluded(graph: Graph, marks: Marks) -> Counter[str]:
    """Sampled tokens that train nowhere, by reason; reasons without tokens are left out."""
    counts = Counter({r.key: n for r, n in marks.by_reason.items() if r is not MaskReason.TRAINED})
    broken = sum(len(exchange.output_ids) for exchange, _ in graph.lost)
    if broken:
        counts[MaskReason.BROKEN.key] += broken
    return counts


def _named(exchanges: Iterable[Exchange], key: str) -> Counter[str]:
    """Add up the names that each exchange's `extra` has under `key`: a list, or counts."""
    counts: Counter[str] = Counter()
    for exchange in exchanges:
        counts.update(exchange.extra.get(key, ()))
    return counts


def _drift(continuing: Iterable[Exchange], joined: Joined) -> Counter[str]:
    """Count how sampled turns differ in the next prompt: by ids where a template rendered them,
    else by the harness's copy of the message.
    """
    return Counter(
        str(joined.classes.get(exchange.exchange_id) or exchange.extra.get("drift") or "exact")
        for exchange in continuing
    )
