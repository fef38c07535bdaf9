"""What messages with images come to on a vLLM, asked before they are sampled under.

`/v1/chat/completions/render` (served with `--enable-scale-out`) tells the ids with all placeholders
expanded and where each image's stands; `/tokenize`, which every vLLM has, tells the ids alone.
Source: vLLM 0.33.0, `entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bridle.engines.base import Seen
from bridle.engines.http import Call, EngineClient
from bridle.errors import EngineError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids

RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"

MISSING = frozenset({404, 405, 501})
"""Statuses of a server that does not have a route."""

BLIND = ("is not a multimodal model", "At most 0 image")
"""Words of the refusals by which vLLM says that a model takes no images."""


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_placeholders: dict[str, list[_Place]] = {}


class _Rendered(msgspec.Struct):
    """What both routes answer; they name the ids differently."""

    token_ids: list[int] | None = None
    tokens: list[int] | None = None
    features: _Features | None = None


async def see(
    client: EngineClient,
    model: str,
    messages: Sequence[JSON],
    tools: Sequence[JSON] | None,
    arguments: JSON,
) -> Seen | None:
    """See `bridle.engines.base.Seeing.see`."""
    body: JSON = {"model": model, "messages": messages, "chat_template_kwargs": arguments}
    if tools:
        body["tools"] = tools
    try:
        try:
            asked = {**body, "tool_choice": "none", "mm_payload": "none"}
            return await _rendered(client, RENDER, asked)
        except EngineError as error:
            if error.status not in MISSING:
                raise
        return await _rendered(client, TOKENIZE, body)
    except EngineError as error:
        if error.status == 400 and any(words in str(error) for words in BLIND):
            return None
        raise


async def _rendered(client: EngineClient, path: str, body: JSON) -> Seen:
    text = await client.post(path, msgspec.json.encode(body), Call(), prompt_tokens=0)
    try:
        told = msgspec.json.decode(text, type=_Rendered)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{client.base_url}{path} cannot be read: {error}") from None
    listed = told.tokens if told.token_ids is None else told.token_ids
    if not listed:
        raise EngineError(f"{client.base_url}{path} tells no ids")
    ids: Ids = np.array(listed, dtype=np.int32)
    places = () if told.features is None else told.features.mm_placeholders.get("image", ())
    return Seen(ids, tuple({"start": one.offset, "length": one.length} for one in places))
