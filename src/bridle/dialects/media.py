"""Content that is not text: images, documents, audio, files, and blocks that nobody here knows.

Each becomes a `MediaPart` in its place. Its digest is taken over what the model would see: the
decoded bytes of inline data, the URL itself, or the block's sorted JSON without the keys that
change from turn to turn.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from typing import Any

from bridle.dialects.ids import standard_base64
from bridle.types import JSON, MediaPart, Part, TextPart

VOLATILE = frozenset(
    {"id", "status", "cache_control", "signature", "thoughtSignature", "thought_signature"}
    | {"encrypted_content", "encrypted_index", "encrypted_stdout", "fingerprint"}
    | {"annotations", "logprobs", "provider_specific_fields"}
)
"""Keys that change between two echoes of one block and mean nothing to the model."""

LONGEST_DATA = 1000
"""Characters of base64 that are shown as text."""

_DATA = re.compile(r"(data:[^,]*,)?[A-Za-z0-9+/=_\-\s]*")

KNOWN_BLOCKS = frozenset({"tool_reference"})
"""Types of blocks that are kept as their JSON and are known."""

BLOCK_TYPE = "application/json"
"""Media type of a block kept as its own JSON."""


def data_part(media_type: str, data: str) -> MediaPart:
    """Return inline base64 data as a part; text that is no base64 is digested as it is."""
    try:
        decoded = base64.b64decode(standard_base64(data), validate=True)
    except (binascii.Error, ValueError):
        decoded = data.encode()
    source = f"data:{media_type};base64,{data}"
    return MediaPart(media_type, hashlib.sha256(decoded).hexdigest(), source)


def url_part(url: str, media_type: str) -> MediaPart:
    """Return a URL as a part; of a data URL its data.

    `media_type` is for URLs without one.
    """
    if url.startswith("data:"):
        head, comma, data = url.removeprefix("data:").partition(",")
        kind, *flags = head.split(";")
        if comma and "base64" in flags:
            return data_part(kind or media_type, data)
        media_type = kind or media_type
    return MediaPart(media_type, hashlib.sha256(url.encode()).hexdigest(), url)


def block_part(block: JSON) -> MediaPart:
    """Return a content block of an unknown type as a part that keeps its JSON."""
    text = json.dumps(_lasting(block), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    source = json.dumps(block, ensure_ascii=False, separators=(",", ":"))
    return MediaPart(BLOCK_TYPE, hashlib.sha256(text.encode()).hexdigest(), source)


def block_text(block: JSON) -> TextPart:
    """Return the text that the model is shown in place of an unknown block: its type and readable
    JSON.

    Data of images and files is left out: as text it would be no picture, but fill the context.
    """
    kind = block.get("type") or next(iter(block), "block")
    shown = {key: value for key, value in _lasting(block).items() if key != "type"}
    text = json.dumps(_readable(shown), ensure_ascii=False, separators=(",", ":"))
    return TextPart(f"[{kind}] {text}\n")


def block_name(part: Part) -> str | None:
    """Return the type of a content block of unknown type; `None` = the part is something else."""
    if not isinstance(part, MediaPart) or part.media_type != BLOCK_TYPE:
        return None
    block = _block_in(part)
    name = block.get("type") or next(iter(block), "block")
    return None if name in KNOWN_BLOCKS else str(name)


def shown_block(part: MediaPart) -> str | None:
    """Return the text of an unknown block that was kept as its JSON; `None` = the part is
    not one.
    """
    if part.media_type != BLOCK_TYPE or part.source.startswith("data:"):
        return None
    block = _block_in(part)
    return None if _names_file(block) else block_text(block).text


def _block_in(part: MediaPart) -> JSON:
    block: JSON = json.loads(part.source) if part.source.startswith("{") else {"type": "data"}
    return block


def _names_file(block: JSON) -> bool:
    """Return whether the block refers to a file that the provider keeps."""
    inner = [block, *(block.get(key) for key in ("source", "file", "image_url", "fileData"))]
    return any(isinstance(one, dict) and ("file_id" in one or "fileId" in one) for one in inner)


def _readable(value: Any) -> Any:
    match value:
        case dict():
            return {key: _readable(item) for key, item in value.items()}
        case list():
            return [_readable(item) for item in value]
        case str() if len(value) > LONGEST_DATA and _DATA.fullmatch(value):
            return f"({len(value)} characters of data)"
        case _:
            return value


def _lasting(value: Any) -> Any:
    match value:
        case dict():
            return {key: _lasting(item) for key, item in value.items() if key not in VOLATILE}
        case list():
            return [_lasting(item) for item in value]
        case _:
            return value
