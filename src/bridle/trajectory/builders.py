"""Builders: which paths of the conversation become traces, and which tokens train in each.

A builder is a function `(graph, marks) -> plans`; it looks at the forest only, in time linear in
its exchanges. `assemble` then puts each plan's arrays together, once. Law 2 holds by how plans are
made: every sampled token that may train lies in exactly one plan's `train` range.

- `per_request`: one trace per exchange, its whole prompt and its own output.
- `prefix_merging`: the paths from a root to each last exchange that trains. A sampled token that
  lies on several paths trains on the one with the most sampled tokens that may train (ties by the
  digest of its ids; never on one that ends in a rejected reply) and is masked context in the
  others. What follows a path's last such token is
  not part of the trace, and a path on which nothing would train gives none.
- `tree`: the same paths, for a trainer that packs them with `bridle.trajectory.packing.pack`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bridle.experts import Experts, merge_rows, unpack
from bridle.trajectory.graph import ExchangeNode, Graph, Piece, order_of, pieces
from bridle.trajectory.masks import Marks
from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import FinishReason, Ids

BUILDERS: Mapping[str, str] = {
    "per_request": "bridle.trajectory.builders:per_request",
    "prefix_merging": "bridle.trajectory.builders:prefix_merging",
    "tree": "bridle.trajectory.builders:tree",
}
"""Short name -> builder; `package.module:function` works too."""


_TRAINED, _PROMPT = MaskReason.TRAINED, MaskReason.PROMPT


@dataclass(frozen=True, slots=True)
class Plan:
    """One trace to be: the path to `leaf`, to the end of its output."""

    leaf: ExchangeNode
    train: Mapping[str, tuple[int, int]]
    """Exchange id -> range of its output ids that train here, those marked `TRAINED` in it."""
    whole_prompt: bool = False
    """The prompt is all that the leaf was sampled under; else it ends at the first sampled id."""


Builder: TypeAlias = Callable[[Graph, Marks], list[Plan]]


def per_request(graph: Graph, marks: Marks) -> list[Plan]:
    """Return one plan per exchange of which something trains."""
    return [
        Plan(node, {exchange_id: (0, len(node.exchange.output_ids))}, whole_prompt=True)
        for exchange_id, node in graph.nodes.items()
        if marks.trained[exchange_id]
    ]


def prefix_merging(graph: Graph, marks: Marks) -> list[Plan]:
    """Return one plan per path to a last exchange that trains; each token trains in one of them."""
    ends = _ends(graph, marks)
    totals = _path_totals(graph, marks)

    def rank(node: ExchangeNode) -> tuple[bool, int, bytes, tuple[float, str]]:
        exchange_id = node.exchange.exchange_id
        last = exchange_id in marks.rejected
        return last, -totals[exchange_id], node.path_digest, order_of(node.exchange)

    ends.sort(key=rank)
    plans = []
    # Exchange id -> how many of its first output ids lie on a path that was planned.
    done: dict[str, int] = {}
    for end in ends:
        train = _claim(end, marks, done)
        if train:
            plans.append(Plan(end, train))
    return plans


def tree(graph: Graph, marks: Marks) -> list[Plan]:
    """Return the plans of `prefix_merging`: a tree is a packing of its traces."""
    return prefix_merging(graph, marks)


def _trained(marks: Marks, exchange_id: str, stop: int, start: int = 0) -> int:
    """Count the output ids of an exchange in a range that may train."""
    own = marks.by_token[exchange_id]
    if start == 0 and stop == len(own):
        return marks.trained[exchange_id]
    return int(np.count_nonzero(own[start:stop] == _TRAINED))


def _ends(graph: Graph, marks: Marks) -> list[ExchangeNode]:
    """Nodes that train and are not wholly on the path to another node that trains.

    A rejected reply is an end of its own and nothing but it: what was said before it ends another
    path, so that its trace has only its own tokens to train.
    """
    counts, trains_below = marks.trained, dict[str, bool]()
    found = []
    for exchange_id, node in reversed(graph.nodes.items()):
        below = [child for child in node.children if trains_below[child.exchange.exchange_id]]
        is_rejected = exchange_id in marks.rejected
        trains_below[exchange_id] = bool(below) or (counts[exchange_id] > 0 and not is_rejected)
        if counts[exchange_id] > 0 and all(child.kept < node.length for child in below):
            found.append(node)
    return found


def _path_totals(graph: Graph, marks: Marks) -> dict[str, int]:
    """Sampled tokens that may train on the path to the end of each node."""
    before: dict[str, int] = {}
    totals: dict[str, int] = {}
    for exchange_id, node in graph.nodes.items():
        parent = node.parent
        above = 0
        if parent is not None:
            parent_id = parent.exchange.exchange_id
            above = totals[parent_id]
            if node.kept < parent.length:
                above = before[parent_id] + _trained(marks, parent_id, parent.sampled(node.kept))
        before[exchange_id] = above
        totals[exchange_id] = above + marks.trained[exchange_id]
    return totals


def _claim(end: ExchangeNode, marks: Marks, done: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return the ranges on the path to `end` that no path before it had; they are done then.

    Walks up only as far as something is left: a path that has a token has all above it.
    """
    train: dict[str, tuple[int, int]] = {}
    at: ExchangeNode | None = end
    take = end.length
    while at is not None:
        exchange_id = at.exchange.exchange_id
        start, stop = done.get(exchange_id, 0), at.sampled(take)
        if 0 < stop <= start:
            break
        if stop > start:
            done[exchange_id] = stop
            if _trained(marks, exchange_id, stop, start):
                train[exchange_id] = (start, stop)
        take, at = at.kept, at.parent
    return train


def assemble(plan: Plan, marks: Marks, trace_id: str) -> Trace:
    """Return a plan's aligned arrays.

    Messages, tools and reward are added by `bridle.trajectory`.
    """
    leaf = plan.leaf
    path = pieces(leaf, leaf.length)
    runs = [piece.ids for piece in path]
    ids: Ids = np.concatenate(runs)
    split = leaf.prompt_length
    if not plan.whole_prompt:
        given = itertools.takewhile(lambda piece: not piece.is_output, path)
        split = sum(len(piece.ids) for piece in given)
    size = len(ids) - split
    reasons = np.full(size, _PROMPT, dtype=np.uint8)
    logprobs = np.zeros(size, dtype=np.float32)
    versions = np.full(size, -1, dtype=np.int32)
    exchange_ids: list[str] = []
    turn_ends: list[int] = []
    modes: set[str] = set()
    at = -split
    for node, is_output, own in path:
        start, at = at, at + len(own)
        if start < 0 or not is_output:
            continue
        exchange = node.exchange
        exchange_id = exchange.exchange_id
        exchange_ids.append(exchange_id)
        turn_ends.append(at)
        for span in exchange.versions:
            versions[start + max(span.start, 0) : min(start + max(span.end, 0), at)] = span.version
        part = plan.train.get(exchange_id)
        marked = reasons[start:at] = _reasons_here(marks.by_token[exchange_id][: len(own)], part)
        if part is not None:
            logprobs[start:at] = exchange.logprobs[: len(own)]
            all_train = marks.trained[exchange_id] == len(exchange.output_ids)
            if not all_train or part != (0, len(own)):
                logprobs[start:at][marked != _TRAINED] = 0.0
            modes.add(exchange.logprob_mode)
    return Trace(
        trace_id=trace_id,
        prompt_ids=ids[:split],
        response_ids=ids[split:],
        loss_mask=(reasons == _TRAINED).view(np.uint8),
        response_logprobs=logprobs,
        versions=versions,
        reasons=reasons,
        exchange_ids=tuple(exchange_ids),
        turn_ends=tuple(turn_ends),
        finish_reason=leaf.exchange.finish_reason,
        logprob_mode=modes.pop() if len(modes) == 1 else "mixed",
        routed_experts=_experts(path, ids),
    )


def _experts(path: Sequence[Piece], ids: Ids) -> npt.NDArray[np.int16] | None:
    """Return rows of experts of a path; a token has those of the first exchange that reported them.

    That is the one that brought it, or, for the last token of a reply, the one after it.
    """
    nodes = [*dict.fromkeys(piece.node for piece in path)]
    parts: list[Experts] = []
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        if node.exchange.experts is None:
            continue
        with suppress(ValueError):  # damaged: not known
            experts = unpack(node.exchange.experts)
            moved = node.prompt_length - node.exchange.prompt_length
            at = experts.start + moved
            first = max(at, _seen_from(node, moved, ids))
            end = len(ids) if after is None else after.kept
            rows = experts.rows[first - at : max(0, end - at)]
            parts.append(Experts(first, rows))
    return merge_rows(parts, len(ids))


def _seen_from(node: ExchangeNode, moved: int, ids: Ids) -> int:
    """Return first position of a path that an exchange's own prompt has as the path has it.

    Where drift joined it, what it saw in place of the turn before is no part of the path.
    """
    if node.parent is None or node.exchange.kept:
        return 0
    last = node.kept - 1 - moved
    same = last >= 0 and node.exchange.suffix_ids[last] == ids[node.kept - 1]
    return node.kept - int(same)


def _reasons_here(
    reasons: npt.NDArray[np.uint8], part: tuple[int, int] | None
) -> npt.NDArray[np.uint8]:
    """Return an exchange's reasons in a trace that trains only `part` of it (`None` = nothing)."""
    start, stop = part or (0, 0)
    if stop - start == len(reasons):
        return reasons
    elsewhere = reasons == _TRAINED
    elsewhere[start:stop] = False
    return np.where(elsewhere, np.uint8(MaskReason.CONTEXT), reasons)


def shorten(trace: Trace, max_tokens: int) -> Trace | None:
    """Return the trace up to the last whole turn with which it has at most `max_tokens` ids.

    The trace itself if it is short enough; `None` if no turn that trains is left.
    """
    if trace.size <= max_tokens:
        return trace
    room = max_tokens - len(trace.prompt_ids)
    starts = (0, *trace.turn_ends)
    for turn in reversed(range(len(trace.turn_ends))):
        start, end = starts[turn], trace.turn_ends[turn]
        if end <= room and trace.loss_mask[start:end].any():
            return dataclasses.replace(
                trace.cut(end),
                exchange_ids=trace.exchange_ids[: turn + 1],
                turn_ends=trace.turn_ends[: turn + 1],
                finish_reason=FinishReason.LENGTH,
            )
    return None


def mask_all(trace: Trace, reason: MaskReason) -> Trace:
    """Return the trace with nothing left to train: its trained tokens get `reason`."""
    reasons = trace.reasons.copy()
    reasons[reasons == MaskReason.TRAINED] = reason
    return dataclasses.replace(
        trace,
        reasons=reasons,
        loss_mask=np.zeros_like(trace.loss_mask),
        response_logprobs=np.zeros_like(trace.response_logprobs),
    )
