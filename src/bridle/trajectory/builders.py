"""Builders choose the paths of the conversation that become traces; masks say which tokens train.

A builder is a function `(graph, marks) -> plans`; it looks at the forest only, in time linear in
its exchanges. `assemble` then puts each plan's arrays together, once. Law 2 holds by how plans are
made: every sampled token that may train lies in exactly one plan's `train` range.

- `per_request`: one trace per exchange, its whole prompt and its own output.
- `prefix_merging`: the paths from a root to each last exchange that trains. A sampled token that
  lies on several paths trains on the one with the most sampled tokens that may train (ties by the
  digest of its ids; never on one that ends in a rejected reply) and is masked context in the
  others. What follows a path's last such token is not part of the trace, and a path on which
  nothing would train gives none.
- `tree`: the same paths, for a trainer that packs them with `bridle.trajectory.packing.pack`.

`mark` gives the builders one reason per exchange, then one per sampled token, that it trains or
not. The record of a delivery and later requests that show the reply decide (law 4); nothing is
guessed:

- a reply that a later request shows was delivered, whatever its record says;
- a reply that its record calls `superseded` was lost in transit: its client asked for it again. A
  reply that was read and asked for again is a sample like any other;
- a reply without a record and without such a request is `unresolved`;
- a harness that rejects a reply (a malformed call, a lost vote) asks the same question again. All
  replies are samples of the policy. One that was delivered whole and is shown by no later request
  is `rejected` if the question was asked once more or a later request continues another reply. The
  last reply is not, unless a request that began later continues another one; nor is a reply that
  its length or Bridle cut.

Captures without a recorded question (of older versions) are compared by their prompts alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bridle.capture.records import Delivery, Exchange
from bridle.experts import Experts, merge_rows, unpack
from bridle.trajectory.graph import ExchangeNode, Graph, Piece, order_of, pieces
from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import DeliveryState, FinishReason, Ids, Kind, LogprobMode

LARGEST_LOGPROB = 1e-3
"""Rounding may lift a logprob a little over 0; what is larger is not a logprob."""


# An enum's member costs ten times a name of this module.
_TRAINED, _PROMPT = MaskReason.TRAINED, MaskReason.PROMPT
_ABORTED = MaskReason.ABORTED
_CUT = DeliveryState.CUT
_ABORT = FinishReason.ABORT
_NONE, _PROCESSED = LogprobMode.NONE, LogprobMode.PROCESSED


@dataclass(frozen=True, slots=True)
class Marks:
    """Mask reason of each sampled token of a session, before any builder runs."""

    by_exchange: Mapping[str, MaskReason]
    """For every node of the graph; `TRAINED` = it trains, but for tokens without a logprob."""
    by_token: Mapping[str, npt.NDArray[np.uint8]]
    """`MaskReason` of each output id of every node, shape (output length,), uint8. Read-only."""
    trained: Mapping[str, int]
    """Number of output ids of every node that may train."""
    by_reason: Mapping[MaskReason, int]
    """Number of output ids of all nodes with each reason, `TRAINED` too."""
    shown: frozenset[str]
    """Exchanges whose whole reply a later request shows."""
    joins: int
    """Number of requests that joined a call instead of being sampled."""
    rejected: frozenset[str]
    """Exchanges whose reply the harness read and did not continue from (see `rejected`)."""


def mark(
    graph: Graph,
    exchanges: Iterable[Exchange],
    deliveries: Mapping[str, Delivery],
    train: Collection[Kind],
    *,
    mask_rejected: bool = False,
) -> Marks:
    """Return, for every exchange of a session, whether its sampled tokens train, or why not.

    `exchanges` are all of the session, also those outside `graph`: they still show what was
    delivered. `mask_rejected` = replies that the harness discarded and asked for again do not
    train.
    """
    records = list(exchanges)
    shown = shown_whole(records)
    passed_over = frozenset(rejected(records, deliveries, shown))
    by_exchange: dict[str, MaskReason] = {}
    for exchange_id, node in graph.nodes.items():
        exchange = node.exchange
        reason = MaskReason.BROKEN if not node.sound else _of_sampling(exchange, train)
        delivery = deliveries.get(exchange_id)
        if reason is _TRAINED and exchange_id not in shown:
            reason = MaskReason.UNRESOLVED if delivery is None else _BY_STATE[delivery.state]
        if mask_rejected and reason is _TRAINED and exchange_id in passed_over:
            reason = MaskReason.REJECTED
        if reason is _ABORTED and delivery is not None and delivery.state is _CUT:
            reason = MaskReason.CUT  # it was aborted, but a part of it had left
        by_exchange[exchange_id] = reason
    by_token, trained, by_reason = _of_tokens(graph, by_exchange)
    joins = sum(len(delivery.joined_by) for delivery in deliveries.values())
    return Marks(by_exchange, by_token, trained, by_reason, shown, joins, passed_over)


_ELSEWHERE = {"other_model": MaskReason.OTHER_MODEL, "replayed": MaskReason.REPLAYED}
"""By what `Exchange.extra` names: who sampled a reply that is not this session's sample."""


def _of_sampling(exchange: Exchange, train: Collection[Kind]) -> MaskReason:
    """Return the mask reason that the call itself determines."""
    if elsewhere := [name for name in _ELSEWHERE if exchange.extra.get(name)]:
        return _ELSEWHERE[elsewhere[0]]
    if exchange.kind not in train:
        return MaskReason.KIND
    if exchange.finish_reason is _ABORT:
        return MaskReason.ABORTED
    if exchange.logprob_mode is _NONE:
        return MaskReason.UNPAIRED
    if exchange.constrained and exchange.logprob_mode is not _PROCESSED:
        return MaskReason.CONSTRAINED
    return _TRAINED


_BY_STATE = {
    DeliveryState.DELIVERED: MaskReason.TRAINED,
    DeliveryState.CUT: MaskReason.CUT,
    DeliveryState.ABANDONED: MaskReason.ABANDONED,
    DeliveryState.SUPERSEDED: MaskReason.SUPERSEDED,
}
"""Of a reply that no later request contains, by its delivery record."""


def _of_tokens(
    graph: Graph, by_exchange: Mapping[str, MaskReason]
) -> tuple[dict[str, npt.NDArray[np.uint8]], dict[str, int], dict[MaskReason, int]]:
    """Return the exchange's reason for each token, how many train, and how many have each reason.

    A token without a usable logprob has its own reason. All arrays are views of one.
    """
    exchanges = [node.exchange for node in graph.nodes.values()]
    if not exchanges:
        return {}, {}, {}
    sizes = [len(exchange.output_ids) for exchange in exchanges]
    starts = [0, *itertools.accumulate(sizes)]
    reasons = np.repeat(np.fromiter(by_exchange.values(), np.uint8, len(sizes)), sizes)
    logprobs = np.concatenate(
        [
            exchange.logprobs if len(exchange.logprobs) == size else np.full(size, np.nan)
            for exchange, size in zip(exchanges, sizes, strict=True)
        ]
    )
    # NaN fails both comparisons.
    usable = (logprobs <= LARGEST_LOGPROB) & (logprobs > -np.inf)
    unpaired = np.flatnonzero((reasons == _TRAINED) & ~usable)
    reasons[unpaired] = MaskReason.UNPAIRED
    lost = Counter((np.searchsorted(starts, unpaired, side="right") - 1).tolist())
    by_token: dict[str, npt.NDArray[np.uint8]] = {}
    trained: dict[str, int] = {}
    by_reason: Counter[MaskReason] = Counter({MaskReason.UNPAIRED: len(unpaired)})
    for number, (exchange_id, reason) in enumerate(by_exchange.items()):
        by_token[exchange_id] = reasons[starts[number] : starts[number + 1]]
        left = sizes[number] - lost[number]
        trained[exchange_id] = left if reason is _TRAINED else 0
        by_reason[reason] += left
    return by_token, trained, +by_reason


def shown_whole(exchanges: Sequence[Exchange]) -> frozenset[str]:
    """Return the ids of exchanges whose whole reply a later request contains."""
    lengths = {e.exchange_id: e.prompt_length + len(e.output_ids) for e in exchanges}
    shown = set()
    for exchange in exchanges:
        before = exchange.parent_id
        if before is not None and exchange.kept >= lengths.get(before, exchange.kept + 1):
            shown.add(before)
        partial = "partial" in (exchange.root_reason, exchange.extra.get("drift"))
        if exchange.continues is not None and not partial:
            shown.add(exchange.continues)
    return frozenset(shown)


def rejected(
    exchanges: Sequence[Exchange],
    deliveries: Mapping[str, Delivery],
    shown: Collection[str],
) -> dict[str, str]:
    """Map each rejected exchange to its sibling that stands: the reply to the same question that
    the harness went on with (the newest such, else the newest).

    Rejected replies ended by themselves and were delivered, but no later request shows them.
    """
    groups = _siblings(exchanges, deliveries, shown)
    continued_at = _continued_at(exchanges) if groups else {}
    found = {}
    for group in groups:
        last = group[-1]
        continued = [one for one in group if one.exchange_id in shown]
        stands = (continued or [last])[-1]
        passed_over = any(
            continued_at.get(one.exchange_id, order_of(last)) > order_of(last) for one in continued
        )
        for one in group:
            whole = one.finish_reason is FinishReason.STOP and one.exchange_id not in shown
            if whole and (one is not last or passed_over):
                found[one.exchange_id] = stands.exchange_id
    return found


def _siblings(
    exchanges: Iterable[Exchange], deliveries: Mapping[str, Delivery], shown: Collection[str]
) -> list[list[Exchange]]:
    """Return the delivered answers of each question that has several, oldest first."""
    groups: defaultdict[tuple[str, str], list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        delivery = deliveries.get(exchange.exchange_id)
        read = delivery is not None and delivery.state is DeliveryState.DELIVERED
        if read or exchange.exchange_id in shown:
            question = exchange.extra.get("question") or exchange.prompt_digest.hex()
            groups[exchange.dialect, question].append(exchange)
    return [sorted(group, key=order_of) for group in groups.values() if len(group) > 1]


def _continued_at(exchanges: Iterable[Exchange]) -> dict[str, tuple[float, str]]:
    """Return for each exchange the place in time of the last request that continues it."""
    found: dict[str, tuple[float, str]] = {}
    for exchange in exchanges:
        at = order_of(exchange)
        for before in {exchange.continues, exchange.parent_id} - {None}:
            found[str(before)] = max(at, found.get(str(before), at))
    return found


BUILDERS: Mapping[str, str] = {
    "per_request": "bridle.trajectory.builders:per_request",
    "prefix_merging": "bridle.trajectory.builders:prefix_merging",
    "tree": "bridle.trajectory.builders:tree",
}
"""Short name -> builder; `package.module:function` works too."""


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
    """Return one planned trace per exchange that has a token to train on."""
    return [
        Plan(node, {exchange_id: (0, len(node.exchange.output_ids))}, whole_prompt=True)
        for exchange_id, node in graph.nodes.items()
        if marks.trained[exchange_id]
    ]


def prefix_merging(graph: Graph, marks: Marks) -> list[Plan]:
    """Return one planned trace per path of the forest whose last exchange trains.

    A token that several paths share trains in one of them.
    """
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
    """Return the same planned traces as builder `prefix_merging`: a tree is a packing of its
    traces.
    """
    return prefix_merging(graph, marks)


def _trained(marks: Marks, exchange_id: str, stop: int, start: int = 0) -> int:
    """Count the output ids of an exchange in a range that may train."""
    own = marks.by_token[exchange_id]
    if start == 0 and stop == len(own):
        return marks.trained[exchange_id]
    return int(np.count_nonzero(own[start:stop] == _TRAINED))


def _ends(graph: Graph, marks: Marks) -> list[ExchangeNode]:
    """Return the nodes that train and are not wholly on the path to another node that trains.

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
    """Count the sampled tokens that may train on the path to the end of each node."""
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
    """Return the trace that `plan` describes: aligned arrays of ids, mask, reasons and logprobs.

    It has no messages, tools and reward yet.
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
    """Return the first position of a path that an exchange's own prompt has as the path has it.

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
    """Return the trace cut after the last whole turn within `max_tokens` ids (prompt and response).

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
