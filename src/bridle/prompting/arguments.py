"""The canonical form of a call's arguments: equal JSON values give equal bytes. Pure.

Harnesses re-serialise arguments (spacing, escapes, key order), JavaScript rounds large integers and
writes `1.0` as `1`, and some add the defaults of the tool's schema. None of that is a difference.
What is not JSON at all keeps its own text under another tag, and nothing here ever raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import orjson

from bridle.types import ToolSpec

Defaults: TypeAlias = Mapping[str, Mapping[str, bytes]]
"""Tool name -> top-level argument -> canonical bytes of its schema's default."""

EXACT_INTEGERS = 2**53
"""Below this size a double holds every integer (RFC 8785 §3.2.2.3)."""

MAX_DEPTH = 200
"""Values nested deeper keep their text; parsers disagree about the limit."""

_NEEDS_NUMBERS = re.compile(rb"[0-9][.eE]|[0-9]{16}")
"""Matches JSON text that may hold a float or a large integer (a match in a string is harmless)."""


class _TooDeepError(ValueError):
    """A value is nested deeper than `MAX_DEPTH`."""


def text_bytes(text: str) -> bytes:
    """UTF-8, lone surrogates kept: any string a harness can send has bytes."""
    return text.encode("utf-8", "surrogatepass")


def canonical_arguments(text: str, defaults: Mapping[str, bytes] | None = None) -> bytes:
    """Return one tag byte (`j` JSON, `r` raw) and the canonical bytes.

    `""`, white space and `null` are `{}`. A top-level key whose value equals its default in
    `defaults` is dropped.
    """
    try:
        value, odd = _parse(text)
        if value is None:
            value = {}
        if defaults and isinstance(value, dict):
            value = {
                key: item
                for key, item in value.items()
                if key not in defaults or defaults[key] != canonical_json(item)
            }
        return b"j" + _serialise(value, odd=odd)
    except (ValueError, RecursionError):
        return b"r" + text_bytes(text)


def argument_texts(text: str) -> Iterator[str]:
    """Yield every text among the values of a call's arguments, blank ones left out; none if no
    JSON.
    """
    try:
        left = [_parse(text)[0]]
    except (ValueError, RecursionError):
        return
    while left:
        value = left.pop()
        if isinstance(value, str) and not value.isspace() and value:
            yield value
        elif isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)


def parsed_object(text: str) -> dict[str, Any] | None:
    """Return the object that a call's arguments are; `None` = they are malformed."""
    try:
        value = _parse(text)[0]
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def canonical_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Canonical bytes of a decoded JSON value; what no serialiser takes gives its `repr`."""
    try:
        return _serialise(value, odd=_is_odd(value))
    except (ValueError, RecursionError, TypeError):
        return b"r" + text_bytes(repr(value))


KEPT_LISTS: Final = 64
"""Tool lists whose defaults are remembered."""

_known: dict[int, tuple[tuple[ToolSpec, ...], Defaults]] = {}
"""By identity: a list that comes again and again is one object (`bridle.dialects.tools`)."""


def schema_defaults(tools: Sequence[ToolSpec]) -> Defaults:
    """Return the defaults that each tool's schema declares for its top-level arguments."""
    known = _known.get(id(tools))
    if known is not None and known[0] is tools:
        return known[1]
    found = _read_defaults(tools)
    if isinstance(tools, tuple):
        if len(_known) >= KEPT_LISTS:
            _known.clear()
        _known[id(tools)] = (tools, found)
    return found


def _read_defaults(tools: Sequence[ToolSpec]) -> Defaults:
    found: dict[str, dict[str, bytes]] = {}
    for tool in tools:
        properties = (tool.parameters or {}).get("properties")
        if not isinstance(properties, dict):
            continue
        for key, schema in properties.items():
            if isinstance(schema, dict) and "default" in schema:
                found.setdefault(tool.name, {})[key] = canonical_json(schema["default"])
    return found


def _parse(text: str) -> tuple[Any, bool]:
    """Return the value, and whether only the standard library could read it.

    That is the case for NaN, infinities and lone surrogates, which orjson refuses; a value that
    holds one is always read here, so equal values always take the same way.
    """
    if not text or text.isspace():
        return None, False
    try:
        return orjson.loads(text), False
    except orjson.JSONDecodeError:
        return json.loads(text), True


def _is_odd(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Return whether orjson refuses to read this value's text (as `_parse` does)."""
    text = _fast_text(value)
    if text is not None and b"null" not in text:  # NaN is written as null
        return False
    try:
        orjson.loads(json.dumps(value))
    except orjson.JSONDecodeError:
        return True
    return False


def _serialise(value: Any, *, odd: bool) -> bytes:  # noqa: ANN401 - any JSON value
    """Sorted keys, no spaces, numbers by value."""
    text = None if odd else _fast_text(value)
    if text is not None and not _NEEDS_NUMBERS.search(text):
        return text
    plain = _with_plain_numbers(value, 0)
    return text_bytes(json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def _fast_text(value: Any) -> bytes | None:  # noqa: ANN401 - any JSON value
    """Serialize by orjson; `None` where it refuses (nesting, integers beyond 64 bit)."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return None


def _with_plain_numbers(value: Any, depth: int) -> Any:  # noqa: ANN401 - any JSON value
    """Return the same value with each number in the one form that doubles give it."""
    if depth > MAX_DEPTH:
        raise _TooDeepError
    if isinstance(value, dict):
        return {key: _with_plain_numbers(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_plain_numbers(item, depth + 1) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        double = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    if double.is_integer() and abs(double) < EXACT_INTEGERS:
        return int(double)
    return double
