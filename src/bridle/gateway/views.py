"""Captured exchanges as JSON: the whole prompt ids of each, put together from what was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import orjson

from bridle.capture.records import Delivery, Exchange
from bridle.types import JSON, DeliveryState

if TYPE_CHECKING:
    from bridle.types import Ids


def encode(value: object) -> bytes:
    """JSON of plain data, dataclasses and numpy arrays."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def exchanges_json(exchanges: Sequence[Exchange], deliveries: Mapping[str, Delivery]) -> list[JSON]:
    """One object per exchange, in commit order; `encode` turns it into bytes.

    `prompt_ids` are `None` where an exchange that they stand on could not be read.
    """
    whole: dict[str, Ids] = {}
    shown = []
    for exchange in exchanges:
        prompt_ids: Ids | None = exchange.suffix_ids
        if exchange.parent_id is not None:
            before = whole.get(exchange.parent_id)
            prompt_ids = (
                None
                if before is None
                else np.concatenate((before[: exchange.kept], exchange.suffix_ids))
            )
        if prompt_ids is not None:
            whole[exchange.exchange_id] = np.concatenate((prompt_ids, exchange.output_ids))
        delivery = deliveries.get(exchange.exchange_id)
        shown.append(_exchange_json(exchange, prompt_ids, delivery))
    return shown


def _exchange_json(exchange: Exchange, prompt_ids: Ids | None, delivery: Delivery | None) -> JSON:
    state = None if delivery is None else delivery.state
    return {
        "exchange_id": exchange.exchange_id,
        "index": exchange.index,
        "parent_id": exchange.parent_id,
        "continues": exchange.continues,
        "root_reason": exchange.root_reason,
        "dialect": exchange.dialect.value,
        "kind": exchange.kind.value,
        "prompt_ids": prompt_ids,
        "output_ids": exchange.output_ids,
        "logprobs": exchange.logprobs,
        "logprob_mode": exchange.logprob_mode.value,
        "versions": exchange.versions,
        "finish_reason": exchange.finish_reason.value,
        "delivered": state is DeliveryState.DELIVERED,
        "delivery": None if state is None else state.value,
        "joined_by": [] if delivery is None else delivery.joined_by,
        "sampling": exchange.sampling,
        "constrained": exchange.constrained,
        "reply": orjson.Fragment(exchange.reply),
        "started_at": exchange.started_at,
        "first_token_s": exchange.first_token_s,
        "duration_s": exchange.duration_s,
        "extra": exchange.extra,
    }
