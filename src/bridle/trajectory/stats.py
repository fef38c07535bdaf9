"""The law numbers of a trajectory: `metadata["stats"]`, as promised in the design.

All token counts are of sampled tokens. Law 2 is asserted here:
`tokens_captured == tokens_trained + sum(tokens_excluded.values())`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from bridle.capture.records import Exchange
from bridle.trajectory.graph import Graph
from bridle.trajectory.masks import Marks
from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import JSON


def measure(
    graph: Graph,
    marks: Marks,
    exchanges: Sequence[Exchange],
    traces: Sequence[Trace],
    truncated: int,
) -> JSON:
    """The law numbers. `truncated` = tokens that would have trained but for a length limit."""
    captured = sum(len(exchange.output_ids) for exchange in exchanges)
    trained = sum(int(np.count_nonzero(trace.loss_mask)) for trace in traces)
    excluded = _excluded(graph, marks)
    if truncated:
        excluded[MaskReason.TRUNCATED.key] += truncated
    assert captured == trained + excluded.total(), (captured, trained, excluded)
    extended = sum(exchange.parent_id is not None for exchange in exchanges)
    continuing = [exchange for exchange in exchanges if exchange.continues is not None]
    roots = sum(1 for _ in graph.roots)
    leaves = sum(node.is_leaf for node in graph.nodes.values())
    return {
        "exchanges": len(exchanges),
        "roots": roots,
        "branches": leaves - roots,
        "traces": len(traces),
        "tokens_captured": captured,
        "tokens_trained": trained,
        "tokens_excluded": dict(sorted(excluded.items())),
        "merge_ratio": extended / len(continuing) if continuing else 1.0,
        "drift": dict(sorted(_drift(continuing).items())),
        "breaks": [
            {"exchange": b.exchange, "position": b.position, "reason": b.reason}
            for b in graph.breaks
        ],
    }


def _excluded(graph: Graph, marks: Marks) -> Counter[str]:
    """Sampled tokens that train nowhere, by reason; reasons without tokens are left out."""
    counts: Counter[str] = Counter()
    if marks.by_token:
        found = np.bincount(np.concatenate(list(marks.by_token.values())))
        counts.update({MaskReason(r).key: n for r, n in enumerate(found.tolist()) if n and r})
    broken = sum(len(exchange.output_ids) for exchange, _ in graph.lost)
    if broken:
        counts[MaskReason.BROKEN.key] += broken
    return counts


def _drift(continuing: Iterable[Exchange]) -> Counter[str]:
    """How the harness's copy of the turn it continues differs from what was sampled."""
    return Counter(str(exchange.extra.get("drift") or "exact") for exchange in continuing)
