"""Token ids and image features of messages, requested from a vLLM before sampling.

`/v1/chat/completions/render` (served with `--enable-scale-out`) returns the ids with all
placeholders expanded and the position of each image's placeholder; `/tokenize`, which every vLLM
has, returns the ids alone. The processor's metadata of an image (`image_grid_thw`, the number of
patches) comes only together with its pixels. So it is requested once per image, in a message of
that image alone, and cached by vLLM's hash of the image. Source: vLLM 0.33.0,
`entrypoints/scale_out/token_in_token_out/protocol.py` and `mm_serde.py`.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from bridle.engines.adapter import ids_from
from bridle.engines.base import Picture, Seen
from bridle.engines.http import EngineClient, HttpCall
from bridle.engines.probe import Finding
from bridle.errors import EngineError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids

T = TypeVar("T")

RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"

MISSING = frozenset({404, 405, 501})
"""Statuses of a server without the route."""

BLIND = ("is not a multimodal model", "At most 0 image")
"""Texts of vLLM's refusals by a model that takes no images."""


def fold_images(ids: Ids, pictures: Sequence[Picture]) -> Ids:
    """Reduce each image to one placeholder, as `/inference/v1/generate` requires.

    vLLM's processor expands it as before; it reports the ids that it used, and those are compared
    with `ids` as for any reply. The placeholder is assumed to be the most frequent token of an
    image's ids; the probe detects a model for which that is wrong (`image_finding`).
    """
    pieces, at = [], 0
    for one in pictures:
        place = ids[one.start : one.start + one.length]
        values, counts = np.unique(place, return_counts=True)
        pieces += [ids[at : one.start], values[counts.argmax()][None]]
        at = one.start + one.length
    return np.concatenate([*pieces, ids[at:]])


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_placeholders: dict[str, list[_Place]] = {}
    mm_hashes: dict[str, list[str]] = {}
    mm_metadata: dict[str, list[str | None]] | None = None
    """Base64 of msgpack: metadata of each item beside its pixels."""


class _Rendered(msgspec.Struct):
    """Answer of both routes, which name the ids differently."""

    token_ids: list[int] | None = None
    tokens: list[int] | None = None
    features: _Features | None = None


SAMPLE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAT0lEQVR42u3PQQkAAAgEsEty/aMYywi+hcEKLNO+"
    "FgEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQGBywLKp0DxvxLbjwAAAABJRU5E"
    "rkJggg=="
)
"""A red square of 64 pixels, for the probe."""

SIZES_KEPT = 4096
"""Images whose sizes are cached; the least recently used are dropped first."""


class ImageRenderer:
    """Renders chat bodies by one server, with images or without."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._known: OrderedDict[str, JSON] = OrderedDict()
        """Hash of an image -> its sizes; empty = not reported."""
        self._renders = True
        """True if the server may have the route that renders whole calls."""

    async def see(self, body: JSON) -> Seen | None:
        """Render a body with images; `None` = the model takes none."""
        try:
            rendered = await self._asked(body, _rendered)
        except EngineError as error:
            if error.status == 400 and any(words in str(error) for words in BLIND):
                return None
            raise
        listed = rendered.tokens if rendered.token_ids is None else rendered.token_ids
        places = await self._places(body, rendered.features or _Features())
        return Seen(np.array(listed, dtype=np.int32), places)

    async def render(self, body: JSON) -> Ids:
        """Render a body without images to ids."""
        return await self._asked(body, ids_from)

    async def _asked(self, body: JSON, ask: Callable[[EngineClient, str, JSON], Awaitable[T]]) -> T:
        """Render a body by the route that the server has for it."""
        if self._renders:
            try:
                asked = {**body, "tool_choice": "none", "mm_payload": "none"}
                return await ask(self._client, RENDER, asked)
            except EngineError as error:
                if error.status not in MISSING:
                    raise
            self._renders = False
        return await ask(self._client, TOKENIZE, body)

    async def _places(self, body: JSON, features: _Features) -> tuple[JSON, ...]:
        places = features.mm_placeholders.get("image", [])
        hashes = features.mm_hashes.get("image", [])
        placeholders: list[JSON] = [{"start": one.offset, "length": one.length} for one in places]
        if len(hashes) == len(places):
            images = _images(body["messages"])
            for place, name, image in zip(placeholders, hashes, images, strict=False):
                if sizes := await self._sizes(body["model"], name, image):
                    place["grid"] = sizes
        return tuple(placeholders)

    async def _sizes(self, model: str, name: str, image: JSON) -> JSON:
        """Return the processor's metadata of one image; empty if the server does not report it."""
        known = self._known.get(name)
        if known is None:
            message = {"role": "user", "content": [image]}
            body = {"model": model, "messages": [message], "mm_payload": "tensors"}
            try:
                alone = (await _rendered(self._client, RENDER, body)).features or _Features()
            except EngineError:
                return {}
            same = alone.mm_hashes.get("image") == [name]
            known = _small(alone.mm_metadata) if same else {}
            self._known[name] = known
            if len(self._known) > SIZES_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return known


async def _rendered(client: EngineClient, path: str, body: JSON) -> _Rendered:
    text = await client.post(path, msgspec.json.encode(body), HttpCall(), prompt_tokens=0)
    try:
        rendered = msgspec.json.decode(text, type=_Rendered)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{client.base_url}{path} cannot be read: {error}") from None
    if not rendered.token_ids and not rendered.tokens:
        raise EngineError(f"{client.base_url}{path} returns no ids")
    return rendered


def image_finding(*, seen: Seen | None, ids_taken: bool) -> Finding:
    """Build the probe's finding about images. `seen` is the rendering of one image."""
    if seen is None:
        return Finding.note("images", "the model takes none")
    return Finding.check(
        "images",
        ok=ids_taken,
        found="taken, with ids beside them too" if ids_taken else "taken as messages only",
        means="A prompt with an image is rendered by the server each time.",
        fix="Nothing: this model's processor has its placeholders otherwise.",
    )


def _images(messages: Sequence[JSON]) -> Iterator[JSON]:
    """Yield the parts of messages that are images, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if part.get("type") == "image_url")


def _small(metadata: dict[str, list[str | None]] | None) -> JSON:
    """Decode the sizes from vLLM's metadata of an item; empty if its form is unknown."""
    try:
        (text,) = (metadata or {})["image"]
        item = _UNPACKED.decode(base64.b64decode(text or ""))
        return {name: _numbers(element["data"]) for name, element in item.items()}
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return {}


def _numbers(data: Any) -> Any:  # noqa: ANN401 - numbers, nested as the tensor is
    """Convert a tensor (its dtype, shape and bytes) to lists; return a number as it is."""
    if not isinstance(data, list):
        return data
    dtype, shape, raw = data
    return np.frombuffer(raw, dtype).reshape(shape).tolist()


_UNPACKED = msgspec.msgpack.Decoder(dict[str, dict[str, Any]], ext_hook=lambda _, raw: bytes(raw))
