"""The calls of a request: their arguments in one form, and the results that answer them. Pure.

Equal JSON values give equal bytes. Harnesses re-serialise arguments (spacing, escapes, key order),
JavaScript rounds large integers and writes `1.0` as `1`, and some add the defaults of the tool's
schema. None of that is a difference. What is not JSON at all keeps its own text under another tag,
and nothing here ever raises.

A result whose call stands nowhere before it is an orphan: the model would read an answer to a
question that it never asked, usually because context was lost on the way. Neither adjacency nor
the number of results matters, and a call may stay without a result.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import orjson

from bridle.types import ToolSpec

if TYPE_CHECKING:
    from bridle.prompting.canonical import Atom, Hint

T = TypeVar("T")

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
    """Return text as UTF-8 in which lone surrogates are kept, so that any JSON string has bytes."""
    return text.encode("utf-8", "surrogatepass")


def canonical_arguments(text: str, defaults: Mapping[str, bytes] | None = None) -> bytes:
    """Return a tool call's arguments in a canonical form: one tag byte (`j` JSON, `r` raw) and
    bytes.

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
    """Yield every text that is not blank among the values of a call's arguments; none if they are
    no JSON.
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
    """Return a call's arguments as a JSON object; `None` = they are malformed."""
    try:
        value = _parse(text)[0]
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def canonical_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return the canonical bytes of a decoded JSON value; of any other value the bytes of its
    `repr`.
    """
    try:
        return _serialise(value, odd=_is_odd(value))
    except (ValueError, RecursionError, TypeError):
        return b"r" + text_bytes(repr(value))


KEPT_LISTS: Final = 64
"""Tool lists whose results a `once_per_tools` function remembers."""


def once_per_tools(read: Callable[[Sequence[ToolSpec]], T]) -> Callable[[Sequence[ToolSpec]], T]:
    """Return the function `read` with a memory of its results, by the identity of the tool list.

    A list that many requests give is one tuple (`bridle.dialects.tools`), of any session.
    """
    known: dict[int, tuple[tuple[ToolSpec, ...], T]] = {}

    @wraps(read)
    def remembered(tools: Sequence[ToolSpec]) -> T:
        found = known.get(id(tools))
        if found is not None and found[0] is tools:
            return found[1]
        made = read(tools)
        if isinstance(tools, tuple):
            if len(known) >= KEPT_LISTS:
                known.clear()
            known[id(tools)] = (tools, made)
        return made

    return remembered


@once_per_tools
def schema_defaults(tools: Sequence[ToolSpec]) -> Defaults:
    """Return the defaults that each tool's schema declares for its top-level arguments."""
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
    """Return the value's JSON text with sorted keys, no spaces, and numbers by value."""
    text = None if odd else _fast_text(value)
    if text is not None and not _NEEDS_NUMBERS.search(text):
        return text
    plain = _with_plain_numbers(value, 0)
    return text_bytes(json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def _fast_text(value: Any) -> bytes | None:  # noqa: ANN401 - any JSON value
    """Return the JSON text by orjson; `None` where it refuses (nesting, large integers)."""
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


# ---- results


Call: TypeAlias = tuple[str | None, bool, bytes]
"""A call's name, whether it has no id, and its link of the chain: the same call under the same
history has the same."""

_Group: TypeAlias = tuple[str | None, bool]
"""The calls of a name, with an id or without (`True`); `None` = of any name."""

_ANY: Final = ((None, True), (None, False))


@dataclass(frozen=True, slots=True)
class Orphan:
    """A tool result without a call."""

    call_id: str | None
    name: str | None


@dataclass(slots=True)
class Pairing:
    """The calls and results of a request, in their order."""

    orphans: list[Orphan] = field(default_factory=list)
    """Results whose call stands nowhere before them."""
    _ids: dict[str, int] = field(default_factory=dict)
    """Id -> number of the call; -1 = an id of an assistant message, which is as good."""
    calls: list[Call] = field(default_factory=list)
    _open: dict[_Group, dict[int, None]] = field(default_factory=dict)
    """Numbers of the calls without a result yet, in order; a group stays when it is empty."""

    def after(
        self,
        atoms: Sequence[Atom],
        hints: Sequence[Hint],
        chain: Sequence[bytes],
        *,
        read: tuple[int, int],
    ) -> Pairing:
        """Return the pairing of calls with results for a request that continues this pairing's
        request.

        `chain` is that of all its atoms; `read` the numbers of atoms and hints of the earlier
        request.
        """
        whole = Pairing(
            self.orphans.copy(),
            self._ids.copy(),
            self.calls.copy(),
            {group: numbers.copy() for group, numbers in self._open.items()},
        )
        start, hinted = read
        issued = list(hints[hinted:])[::-1]
        for position, atom in enumerate(atoms[start:], start):
            while issued and issued[-1].position <= position:
                whole._issued(issued.pop().ids)
            if atom.kind in ("C", "T"):
                whole._add(atom, chain[position + 1])
        while issued:
            whole._issued(issued.pop().ids)
        return whole

    @property
    def unpaired(self) -> Iterator[bytes]:
        """Yield the chain digests at the calls that have no result yet."""
        groups = (self._open.get(group, ()) for group in _ANY)
        return (self.calls[number][2] for numbers in groups for number in numbers)

    def _issued(self, ids: Sequence[str]) -> None:
        for value in ids:
            self._ids.setdefault(value, -1)

    def _add(self, atom: Atom, link: bytes) -> None:
        call_id = atom.ids[0] if atom.ids else None
        if atom.kind == "C":
            self._call(call_id, atom.text, link)
        else:
            self._result(call_id, atom.text)

    def _call(self, call_id: str | None, name: str | None, link: bytes) -> None:
        number, bare = len(self.calls), not call_id
        self.calls.append((name, bare, link))
        for group in ((name, bare), (None, bare)):
            self._open.setdefault(group, {})[number] = None
        if call_id:
            self._ids[call_id] = number

    def _result(self, call_id: str | None, name: str | None) -> None:
        """Match a result: by its id, else by its name, else by order.

        A result without an id whose name no call has answers the first call that has no result.
        One whose id is not known may still mean a call of its name that has no id.
        """
        if call_id and call_id in self._ids:
            self._close(self._ids[call_id])
            return
        groups = [(name, True)] if call_id else [(name, True), (name, False)]
        named = any(group in self._open for group in groups)
        first = self._first(groups if named or call_id else _ANY)
        if first is not None:
            self._close(first)
        elif not named:
            self.orphans.append(Orphan(call_id or None, name))

    def _first(self, groups: Sequence[_Group]) -> int | None:
        """Return the number of the first call of these groups without a result."""
        found = [next(iter(self._open[group])) for group in groups if self._open.get(group)]
        return min(found, default=None)

    def _close(self, number: int) -> None:
        if number >= 0:
            name, bare, _ = self.calls[number]
            self._open[name, bare].pop(number, None)
            self._open[None, bare].pop(number, None)
