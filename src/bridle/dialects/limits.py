"""Limits of a request's shape, so that no body costs more than its size says."""

from __future__ import annotations

from typing import Any, Final

from bridle.errors import RequestError

MOST_NESTED: Final = 128
"""Levels of arrays and objects in one value: real schemas have 20, and the code behind recurses."""

MOST_ITEMS: Final = 10_000
"""Messages of one request: each costs tens of microseconds before its first token is counted."""


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
