"""Samples of one question in a session, and those that the harness did not go on from.

A harness that rejects a reply (a malformed call, a lost vote) asks the same question again. All
answers are samples of the policy. One that was delivered whole and is shown by no later request is
`rejected` if the harness went on after it: the question was asked once more, or a later request
continues another answer. The last answer stands, unless a request that began later continues
another one. A reply that was cut by its length or by us is never rejected.

Captures of before the question was recorded are compared by their prompts alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from bridle.capture.records import Delivery, Exchange
from bridle.trajectory.graph import order_of
from bridle.types import DeliveryState, FinishReason


def shown_whole(exchanges: Sequence[Exchange]) -> frozenset[str]:
    """Exchanges whose whole reply a later request shows."""
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
    """The delivered answers of each question that has several, oldest first."""
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
