"""Limits of a request's shape, so that no body costs more than its size says."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from bridle.errors import RequestError

MOST_NESTED: Final = 128
"""Levels of arrays and objects in one value: real schemas have 20, and the code behind recurses."""

MOST_ITEMS: Final = 10_000
"""Messages of one request: each costs tens of microseconds before its first token is counted."""

MOST_VALUES: Final = 250_000
"""Members and items of all objects and arrays of one request: each costs some hundred bytes."""

MOST_SCANNED: Final = 1 << 20
"""Bytes of the largest body in which the field that is wrong is looked for: it costs 0.2 s."""

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_TEXT: Final = re.compile(rb'(?:[^"\\]{1,1000}|\\.){1,1000}', re.DOTALL)
"""Part of a string: what is matched at once holds up every other thread."""
_LONG_NUMBER: Final = re.compile(rb"\d{19}|[eE]\+?\d{3}")


def field_too_deep(raw: bytes) -> str:
    """Name the field of JSON in which the nesting exceeds `MOST_NESTED`; empty = there is none.

    The path of its first three levels, like `tools[0].function`.
    """
    path: list[str | int] = []
    for token in _TOKEN.finditer(raw) if len(raw) <= MOST_SCANNED else ():
        match token[0][:1]:
            case b"{" | b"[":
                path.append("" if token[0] == b"{" else 0)
                if len(path) > MOST_NESTED:
                    return _dotted(path[:3])
            case b"}" | b"]":
                del path[-1:]
            case b",":
                if path and isinstance(path[-1], int):
                    path[-1] += 1
            case _:
                if path and isinstance(path[-1], str):
                    path[-1] = token[0][1:-1].decode(errors="replace")[:100]
    return ""


def _dotted(path: list[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).lstrip(".")


def check_json(raw: bytes) -> None:
    """Raise the `RequestError` that names a field of `raw` that no JSON parser reads alike.

    It is nested too deeply, or a number of more than 64 bits. What is no JSON passes.
    """
    if raw.count(b"{") + raw.count(b"[") > MOST_NESTED and (field := field_too_deep(raw)):
        raise too_deep(field)
    if _LONG_NUMBER.search(raw) is None or len(raw) > MOST_SCANNED:
        return
    try:
        value = json.loads(raw, parse_int=lambda text: float(text) if len(text) > 20 else int(text))
    except (ValueError, RecursionError):
        return
    waiting: list[tuple[list[str | int], Any]] = [([], value)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, dict):
            waiting += [([*path, key], item) for key, item in one.items()]
        elif isinstance(one, list):
            waiting += [([*path, index], item) for index, item in enumerate(one)]
        elif isinstance(one, int | float) and not (math.isfinite(one) and -(2**63) <= one < 2**64):
            where = _dotted(path)
            message = f"'{where}' is a number of more than 64 bits." if where else "Not a value."
            raise RequestError(message, param=where or None)


def too_deep(path: str) -> RequestError:
    """The refusal of a value that is nested too deeply. An empty `path` is the body."""
    where = f"'{path}' is" if path else "The request body is"
    message = f"{where} nested too deeply: at most {MOST_NESTED} levels."
    return RequestError(message, param=path or None)


def check_depth(raw: bytes, value: Any, path: str) -> None:
    """Raise `RequestError` if `value`, decoded from `raw`, has more than `MOST_NESTED` levels.

    Most often the brackets are too few for that, which two looks at the bytes tell.
    """
    if len(raw) <= 2 * MOST_NESTED or raw.count(b"{") + raw.count(b"[") <= MOST_NESTED:
        return
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_NESTED):
        held = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for one in held for item in one if isinstance(item, dict | list)]
        if not level:
            return
    raise too_deep(path)


def check_count(count: int, path: str) -> None:
    """Raise `RequestError` if the array at `path` has more than `MOST_ITEMS` items."""
    if count > MOST_ITEMS:
        message = f"Invalid '{path}': array too long. Expected an array with maximum length "
        message += f"{MOST_ITEMS}, but got an array with length {count} instead."
        raise RequestError(message, param=path)


def check_values(raw: bytes, most: int = MOST_VALUES) -> None:
    """Raise a 413 `RequestError` if JSON has more than `most` members and items.

    To be run in a thread: a body with many commas in its texts takes some time.
    """
    if raw.count(b",") < most:
        return
    commas = at = 0
    while at < len(raw):
        quote = raw.find(b'"', at)
        end = len(raw) if quote < 0 else quote
        commas += raw.count(b",", at, end)
        if commas >= most:
            message = f"the request has more than {most} JSON values"
            raise RequestError(message, status=413, code="request_too_large")
        at = _string_end(raw, end + 1)


def _string_end(raw: bytes, at: int) -> int:
    """Return the place behind the string whose text begins at `at`."""
    while (found := _TEXT.match(raw, at)) is not None:
        at = found.end()
    return at + 1
