"""Reason that a sampled token trains or not: one reason per exchange, then one per token.

The record of a delivery and later requests that show the reply decide (law 4); nothing is guessed:

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

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bridle.capture.records import Delivery, Exchange
from bridle.trajectory.graph import Graph, order_of
from bridle.trajectory.sample import MaskReason
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode

LARGEST_LOGPROB = 1e-3
"""Rounding may lift a logprob a little over 0; what is larger is not a logprob."""


# An enum's member costs ten times a name of this module.
_TRAINED = MaskReason.TRAINED
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
    """Exchanges whose reply the harness read and did not continue from (`siblings.rejected`)."""


def mark(
    graph: Graph,
    exchanges: Iterable[Exchange],
    deliveries: Mapping[str, Delivery],
    train: Collection[Kind],
    *,
    mask_rejected: bool = False,
) -> Marks:
    """Decide for every exchange of `graph`. `exchanges` are all of the session, lost ones too:
    they still show what was delivered. `mask_rejected` = rejected replies do not train.
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
    """Return exchanges whose whole reply a later request shows."""
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
    """Rejected exchange -> the sibling that stands: the newest that is shown, else the newest."""
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
    """Exchange -> place in time of the last request that continues it."""
    found: dict[str, tuple[float, str]] = {}
    for exchange in exchanges:
        at = order_of(exchange)
        for before in {exchange.continues, exchange.parent_id} - {None}:
            found[str(before)] = max(at, found.get(str(before), at))
    return found
