"""Formatting of values on pages: times, sizes, shares; and the template environment."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2
import orjson

HERE = Path(__file__).parent

NONE = "\u2013"
"""Text of an unknown number."""

LONGEST = 20_000
"""Most characters of a text on a page."""


Segment = tuple[str, float, float, float]


def seconds(value: float | None) -> str:
    """Format a duration: `12 ms`, `3.4 s`, `5 min 2 s`, `2 h 4 min`."""
    if value is None:
        return NONE
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ago(at: float | None) -> str:
    """Format a time as its age in one unit."""
    if at is None:
        return NONE
    past = max(0.0, time.time() - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if past >= size:
            return f"{past / size:.0f} {unit} ago"
    return f"{past:.0f} s ago"


def clock(at: float | None) -> str:
    return NONE if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def count(value: float | None) -> str:
    """Format an integer with thin spaces: `12 345`."""
    return NONE if value is None else f"{value:,.0f}".replace(",", "\u202f")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; from 1000 on as `count` does."""
    if value is not None and abs(value) >= 1000:
        return count(value)
    return NONE if value is None else f"{value:.{digits}g}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def cut(text: object, most: int = LONGEST) -> str:
    """Truncate a text to `most` characters and say how many were left out."""
    whole = str(text)
    left = len(whole) - most
    return whole if left <= 0 else f"{whole[:most]}\n… {left} characters more"


def pretty(value: object) -> str:
    """Format a value, or a string that holds JSON, as indented JSON; other strings stay."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError:
            return str(value)
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    except (orjson.JSONEncodeError, RecursionError):
        return str(value)


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message in the form of OpenAI Chat; missing fields are empty."""

    role: str
    name: str
    answers: str
    """Id of the tool call that it answers."""
    reasoning: str
    parts: Sequence[tuple[str, str]]
    """See `parts`."""
    calls: Sequence[tuple[str, str, str]]
    """(Name, id, arguments) of each tool call."""


def said(message: Mapping[str, object]) -> ShownMessage:

    def text(key: str) -> str:
        return str(message.get(key) or "")

    listed = message.get("tool_calls")
    return ShownMessage(
        role=text("role") or "unknown",
        name=text("name"),
        answers=text("tool_call_id"),
        reasoning=text("reasoning_content"),
        parts=parts(message.get("content")),
        calls=[_call(one) for one in listed] if isinstance(listed, list) else [],
    )


def _call(call: object) -> tuple[str, str, str]:
    known = call if isinstance(call, dict) else {}
    function = known.get("function")
    function = function if isinstance(function, dict) else {}
    return (
        str(function.get("name") or "?"),
        str(known.get("id") or ""),
        str(function.get("arguments") or ""),
    )


def parts(content: object) -> list[tuple[str, str]]:
    """Split a message's content into `(kind, text)`: `text`, `image` (a data URL) or `other`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [("text", content)] if content else []
    return (
        [_part(one) for one in content] if isinstance(content, list) else [("other", str(content))]
    )


def _part(part: object) -> tuple[str, str]:
    if isinstance(part, dict) and part.get("type") == "text":
        return "text", str(part.get("text", ""))
    if isinstance(part, dict) and part.get("type") == "image_url":
        url = str((part.get("image_url") or {}).get("url", ""))
        shown = ("data:image/png;", "data:image/jpeg;", "data:image/gif;", "data:image/webp;")
        return ("image", url) if url.startswith(shown) else ("other", f"image at {url[:200]}")
    return "other", cut(pretty(part), 500)


def segments(values: Iterable[tuple[str, float]], width: float = 100.0) -> list[Segment]:
    """Lay out the parts of a bar that is `width` wide: `(name, value, x, width)`."""
    listed = [(name, float(value)) for name, value in values if value]
    whole = sum(value for _, value in listed) or 1.0
    found, at = [], 0.0
    for name, value in listed:
        wide = width * value / whole
        found.append((name, value, round(at, 3), round(wide, 3)))
        at += wide
    return found


def columns(ends: Sequence[tuple[float, int, int]]) -> list[tuple[int, float, float, str]]:
    """Lay out a column chart 100 high: `(x, height of completed, of others, title)`."""
    top = max((done + other for _, done, other in ends), default=0) or 1
    return [
        (n, 100 * done / top, 100 * other / top, f"{clock(at)}: {done} completed, {other} not")
        for n, (at, done, other) in enumerate(ends)
    ]


def dots(rewards: Sequence[float]) -> list[tuple[float, float, float]]:
    """Lay out rewards as dots on a line 100 wide: `(x, y, reward)`; equal ones are stacked."""
    if not rewards:
        return []
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    seen: dict[float, int] = {}
    found = []
    for reward in sorted(rewards):
        x = round(100 * (reward - low) / (high - low), 2)
        seen[x] = seen.get(x, 0) + 1
        found.append((x, float(seen[x]), reward))
    return found


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return the template environment, which escapes every value."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = (seconds, ago, clock, count, number, share, cut, pretty, said, segments, columns, dots)
    made.filters.update({one.__name__: one for one in named})
    return made
