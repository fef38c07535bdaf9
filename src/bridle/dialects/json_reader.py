"""Reading of JSON bodies: raw spans first, values only where needed, errors with their path.

A body is split into the raw JSON of its fields and of its messages without decoding them; spans
that the session sent before are taken from its memo. msgspec does the work. What msgspec refuses
and harnesses still send (lone surrogates of text that JavaScript cut in two, a byte-order mark,
`NaN`, numbers beyond a double) is repaired, or read by the standard library. Text that leaves here
has no lone surrogate, as no tokenizer takes one: each became U+FFFD.

The size, depth and number of values of a body are limited, so that none costs more than its size
says. Every error is a `RequestError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from bridle.dialects.history import Begun, RequestHistory
from bridle.errors import RequestError
from bridle.types import JSON, Message

MOST_NESTED: Final = 128
"""Levels of arrays and objects in one value: real schemas have 20, and the code behind recurses."""
_AROUND: Final = 16
"""More levels than stand around a call's arguments in a request or reply."""

MOST_ITEMS: Final = 10_000
"""Messages of one request: each costs tens of microseconds before its first token is counted."""

MOST_VALUES: Final = 250_000
"""Members and items of all objects and arrays of one request: each costs some hundred bytes."""

MOST_SCANNED: Final = 1 << 20
"""Bytes of the largest body in which the field that is wrong is looked for: it costs 0.2 s."""

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_TEXT: Final = re.compile(rb'(?:[^"\\]{1,1000}|\\.){1,1000}', re.DOTALL)
"""Part of a string. It is bounded because a match holds up every other thread."""
_LONG_NUMBER: Final = re.compile(rb"\d{19}|[eE]\+?\d{3}")


def field_too_deep(raw: bytes) -> str:
    """Return the path (as `tools[0].function`) of the JSON field that is nested deeper than
    `MOST_NESTED`, in its first three levels; empty = there is none.
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
    """Raise `RequestError` for a field that JSON parsers read differently.

    It is nested too deeply, or a number of more than 64 bits. Text that is no JSON passes.
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
    """Return the error for a value that is nested too deeply. An empty `path` is the body."""
    where = f"'{path}' is" if path else "The request body is"
    message = f"{where} nested too deeply: at most {MOST_NESTED} levels."
    return RequestError(message, param=path or None)


def check_depth(raw: bytes, value: Any, path: str, most: int = MOST_NESTED) -> None:
    """Raise `RequestError` if `value`, decoded from `raw`, has more than `most` levels.

    Most often the brackets are too few for that, which counting them in the bytes shows.
    """
    if len(raw) <= 2 * most or raw.count(b"{") + raw.count(b"[") <= most:
        return
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
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


# ---- reading


ReadMessages: TypeAlias = Callable[[JSON, str], tuple[Message, ...]]
"""Reads one decoded span; the second argument is its path."""
T = TypeVar("T")

_VALUE = msgspec.json.Decoder()
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_BODIES = {
    key: msgspec.json.Decoder(
        msgspec.defstruct(
            "Body", [(key, list[msgspec.Raw]), ("tools", msgspec.Raw, msgspec.Raw(b""))]
        )
    )
    for key in ("messages", "input", "contents")
}
_REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)

_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(
    rb"(?<!\\)((?:\\\\)*)(?:(?P<high>%b)(?!%b)|(?<!%b)(?P<low>%b))" % (_HIGH, _LOW, _HIGH, _LOW)
)
"""An escaped surrogate without its other half, after an even number of backslashes."""


SpanMemo: TypeAlias = MutableMapping[bytes, tuple[Message, ...]]
"""Dialect's salt + content digest of a raw message span -> its messages; one per
session, so that a request's history is decoded once however often it is sent."""


def content_digest(raw: bytes) -> bytes:
    """Return the 16-byte content address (sha256, truncated) of a raw message or body."""
    return hashlib.sha256(raw).digest()[:16]


def encode(value: Any) -> bytes:
    """Return a value as compact JSON; lone surrogates in its text become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_cleaned(value))


def without_space(raw: bytes | msgspec.Raw) -> msgspec.Raw:
    """Return JSON text without white space between its tokens: on one line, as events need it."""
    return msgspec.Raw(msgspec.json.format(bytes(raw), indent=-1))


def wrong(path: str, expected: str, value: Any) -> RequestError:
    """Return the error for a value of the wrong type: where it is, the expected type, its type."""
    where = f"'{path}'" if path else "the request body"
    message = f"Invalid type for {where}: expected {expected}, but got {_kind(value)} instead."
    return RequestError(message, param=path or None)


def missing(path: str) -> RequestError:
    """Return the error for a request without a field that it must have."""
    return RequestError(f"Missing required parameter: '{path}'.", param=path)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"


def without_lone_surrogates(text: str) -> str:
    """Return `text` with each lone surrogate as U+FFFD and each pair as its character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return without_lone_surrogates(value)
        case list():
            return [_cleaned(item) for item in value]
        case dict():
            return {without_lone_surrogates(key): _cleaned(item) for key, item in value.items()}
        case _:
            return value


def _mended(raw: bytes) -> bytes:
    """Return `raw` without a byte-order mark and with lone surrogate escapes replaced."""
    return _LONE.sub(rb"\1\\ufffd", raw.removeprefix(b"\xef\xbb\xbf"))


def _lenient(raw: bytes, path: str) -> Any:
    """Decode by the standard library JSON that msgspec refused."""
    where = f"'{path}'" if path else "The request body"
    try:
        return _cleaned(json.loads(raw.decode()))
    except RecursionError:
        raise too_deep(path or field_too_deep(raw)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}", param=path or None) from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        message = f"{where} has a number of more than {most} digits."
        raise RequestError(message, param=path or None) from None


def decode(raw: bytes | msgspec.Raw, path: str) -> Any:
    """Return the value of raw JSON. `RequestError` names `path` if it is no JSON, or nested too
    deeply.
    """
    try:
        value = _VALUE.decode(raw)
    except _REFUSED:
        value = _lenient(_mended(bytes(raw)), path)
    check_depth(bytes(raw), value, path)
    return value


def split_object(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the body's fields, each still raw. `RequestError` if it is no JSON object."""
    try:
        return _OBJECT.decode(body)
    except msgspec.ValidationError:
        raise wrong("", "an object", decode(body, "")) from None
    except _REFUSED:
        pass
    try:
        return _OBJECT.decode(_mended(body))
    except _REFUSED:
        value = _lenient(_mended(body), "")
    if not isinstance(value, dict):
        raise wrong("", "an object", value)
    return {key: msgspec.Raw(json.dumps(item).encode()) for key, item in value.items()}


def split_body(
    body: bytes, key: str, memo: SpanMemo | None = None, salt: bytes = b""
) -> tuple[dict[str, msgspec.Raw], tuple[bytes, ...] | None]:
    """Return the body's fields, and the raw items of its array `key` apart from them.

    A first pass finds the items, a second one the other fields in the rest of the body, without the
    items and the tool list. Items that `memo` (a `RequestHistory`) knows are not read again. `None`
    for the items (the array is then among the fields) where the body is too unusual for that;
    `RequestError` if it is no JSON object.
    """
    history = memo if isinstance(memo, RequestHistory) else None
    if history is not None and (grown := history.grown(body, key, salt)) is not None:
        read = _split_grown(history, body, *grown)
        if read is not None:
            return read
    known = None if history is None else history.find(body, key, salt)
    text = body if known is None else known[1]
    try:
        found: Any = _BODIES[key].decode(text)
        items: list[msgspec.Raw] = getattr(found, key)
        place = _place(text, items) if items else None
        fields = _OBJECT.decode(_without(text, place, found.tools))
    except _REFUSED:
        return split_object(body), None
    assert not bytes(fields.pop(key)).strip(b"[] \t\r\n"), "the items were not cut out"
    if "tools" in fields:
        fields["tools"] = found.tools
    check_count(len(items) + (0 if known is None else len(known[0].items)), key)
    new = tuple(map(bytes, items))
    if history is None:
        return fields, new
    begun = None if known is None else known[0]
    if place is not None:
        start, end = place
        if begun is not None:
            start, end = begun.start, end + len(body) - len(text)
        history.reads(begun, body, start, end, fields)
    elif begun is not None:
        history.reads(begun, body, begun.start, len(begun.prefix), fields)
    return fields, new if begun is None else begun.items + new


def split_grown(inside: bytes) -> tuple[bytes, ...] | None:
    """Return the raw items in `inside`, the part of an array behind a comma; `None` = it is no such
    part.
    """
    try:
        return tuple(map(bytes, _ARRAY.decode(b"[%b]" % inside))) or None
    except _REFUSED:
        return None


def _split_grown(
    history: RequestHistory, body: bytes, begun: Begun, inside: bytes
) -> tuple[dict[str, msgspec.Raw], tuple[bytes, ...]] | None:
    """Split a body that is `begun` with `inside` as its new items; `None` = it is not."""
    if (items := split_grown(inside)) is None:
        return None
    whole = begun.items + items
    if len(whole) > MOST_ITEMS:
        check_count(len(whole), begun.key)
    history.reads(begun, body, begun.start, len(body) - begun.behind, begun.fields)
    return dict(begun.fields), whole


def _place(body: bytes, items: Sequence[msgspec.Raw]) -> tuple[int, int]:
    """Return the offsets in `body` at which the first of `items` begins and the last one ends."""
    base = _address(body)
    return (
        _address(items[0]) - base,
        _address(items[-1]) - base + memoryview(items[-1]).nbytes,
    )


def _without(body: bytes, items: tuple[int, int] | None, tools: msgspec.Raw) -> bytes:
    """Return `body` with the items between these places gone and `tools` (if not empty) null."""
    cuts: list[tuple[int, int, bytes]] = []
    if items is not None:
        cuts.append((*items, b""))
    if size := memoryview(tools).nbytes:
        start = _address(tools) - _address(body)
        cuts.append((start, start + size, b"null"))
    kept, place = [], 0
    for start, end, filler in sorted(cuts):
        kept += [body[place:start], filler]
        place = end
    return b"".join([*kept, body[place:]])


def _address(view: bytes | msgspec.Raw) -> int:
    """Return the address of the bytes of `view`; a `Raw` is a view of the bytes it came from."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def split_array(raw: msgspec.Raw, path: str) -> tuple[bytes, ...]:
    """Return the items of a raw JSON array, each still raw."""
    try:
        found = _ARRAY.decode(raw)
        check_count(len(found), path)
        return tuple(map(bytes, found))
    except msgspec.ValidationError:
        raise wrong(path, "an array of objects", decode(raw, path)) from None
    except _REFUSED:
        items = decode(raw, path)
        if not isinstance(items, list):
            raise wrong(path, "an array of objects", items) from None
        return tuple(json.dumps(item).encode() for item in items)


def split_field(fields: dict[str, msgspec.Raw], key: str) -> tuple[bytes, ...]:
    """Remove the array field `key` from the fields, and return its raw items.

    `RequestError` if the field is missing.
    """
    if (raw := fields.pop(key, None)) is None:
        raise missing(key)
    return split_array(raw, key)


def read_head(memo: SpanMemo, key: Hashable, read: Callable[[], T]) -> T:
    """Return `read()`, or its value from the cache if the session sent the fields in `key` before.

    The caller must not change it.
    """
    return memo.head(key, read) if isinstance(memo, RequestHistory) else read()


def read_spans(
    spans: Sequence[bytes],
    memo: SpanMemo,
    salt: bytes,
    path: str,
    read: ReadMessages,
    plain: Callable[[bytes], Message | None] | None = None,
) -> tuple[list[Message], tuple[bytes, ...], tuple[int, ...]]:
    """Return the messages of raw wire messages (`spans`), and per span its digest and message
    count.

    Only spans that are not in `memo` are decoded. `salt` names the dialect in the memo's keys: one
    session may use several. `plain` reads a span of the usual form, as `read` does; `None` = the
    span has another form.
    """
    history = memo if isinstance(memo, RequestHistory) else None
    begun = None if history is None else history.begun(spans)
    messages = [] if begun is None else list(begun.messages)
    digests = [] if begun is None else list(begun.digests)
    lengths = [] if begun is None else list(begun.lengths)
    done = len(digests)
    for index, span in enumerate(spans[done:], done):
        digest = sha256(span).digest()[:16]  # `content_digest`
        key = salt + digest
        known = memo.get(key)
        if known is None and plain is not None and (message := plain(span)) is not None:
            known = memo[key] = (message,)
        if known is None:
            where = f"{path}[{index}]"
            try:
                known = memo[key] = read(an_object(decode(span, where), where), where)
            except RecursionError:
                raise too_deep(where) from None
        messages += known
        digests += (digest,)
        lengths += (len(known),)
    found = tuple(digests), tuple(lengths), tuple(messages)
    if history is not None:
        history.remember(begun, salt, path, tuple(spans), *found)
    return messages, found[0], found[1]


# ---- typed members


def an_object(value: Any, path: str) -> JSON:
    """Return `value`; raises `RequestError` if it is not an object."""
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    return value


def objects(value: Any, path: str) -> Iterator[tuple[JSON, str]]:
    """Yield each object of an array with its path; nothing for `None`."""
    for index, item in enumerate(_as_list(value, path)):
        where = f"{path}[{index}]"
        yield an_object(item, where), where


def _as_list(value: Any, path: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(path, "an array", value)
    return value


def member(path: str, key: str) -> str:
    """Return the path of the member `key` of the object at `path`, as `a.b`."""
    return f"{path}.{key}" if path else key


def contents(value: Any, path: str, items: str = "parts") -> Iterator[tuple[Any, str]]:
    """Yield each item of a message's content with its path: a string, or the items of an array.

    Nothing for null or an empty string; `items` names the items in the error for anything else.
    """
    match value:
        case None | "":
            return
        case str():
            yield value, path
        case list():
            for index, item in enumerate(value):
                yield item, f"{path}[{index}]"
        case _:
            raise wrong(path, f"a string or an array of {items}", value)


def text_at(value: JSON, key: str, path: str) -> str | None:
    """Return the string member `key` of an object; `None` where it is null or missing."""
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise wrong(member(path, key), "a string", found)
    return found


def name_at(value: JSON, key: str, path: str) -> str:
    """Return the string member `key` of the object at `path`.

    Raises `RequestError` if it is missing, empty or no string.
    """
    found = text_at(value, key, path)
    if not found:
        raise missing(member(path, key))
    return found


def flag_at(value: JSON, key: str, path: str) -> bool | None:
    """Return the boolean member `key` of an object; `None` where it is null or missing."""
    found = value.get(key)
    if found is not None and not isinstance(found, bool):
        raise wrong(member(path, key), "a boolean", found)
    return found


def number_at(
    value: JSON, key: str, path: str, *, least: float = -math.inf, most: float = math.inf
) -> float | None:
    """Return the number member `key` of an object, within bounds; `None` where it is null or
    missing.
    """
    found = value.get(key)
    if found is None:
        return None
    where = member(path, key)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise wrong(where, "a number", found)
    if not least <= found <= most or not -sys.float_info.max <= found <= sys.float_info.max:
        raise _outside(where, found, least, most)
    return float(found)


def whole_at(value: JSON, key: str, path: str, *, least: int | None = None) -> int | None:
    """Return the integer member `key` of an object, within bounds; `None` where it is null or
    missing.

    `8.0` is an integer, too.
    """
    found = value.get(key)
    if found is None:
        return None
    where = member(path, key)
    whole = isinstance(found, int) or (isinstance(found, float) and found.is_integer())
    if isinstance(found, bool) or not whole:
        raise wrong(where, "an integer", found)
    low = -(2**63) if least is None else least
    if not low <= found < 2**63:
        raise _outside(where, found, low, 2**63 - 1)
    return int(found)


def _outside(path: str, value: float, least: float, most: float) -> RequestError:
    if isinstance(value, int) and (digits := len(str(abs(value)))) > 100:  # beyond a double
        shown = f"a number of {digits} digits"
    else:
        shown = f"{value:.6g}"
    limit = f">= {least:g}" if value < least else f"<= {most:g}"
    message = f"Invalid value for '{path}': expected a number {limit}, but got {shown} instead."
    return RequestError(message, param=path)


def object_at(value: JSON, key: str, path: str) -> JSON | None:
    """Return the member `key` of an object, itself an object; `None` where it is null or
    missing.
    """
    found = value.get(key)
    return None if found is None else an_object(found, member(path, key))


def objects_at(value: JSON, key: str, path: str) -> Iterator[tuple[JSON, str]]:
    """Yield each object in the array member `key`, with its path; nothing where it is null or
    missing.
    """
    return objects(value.get(key), member(path, key))


def texts_at(value: JSON, key: str, path: str) -> tuple[str, ...]:
    """Return the non-empty strings of the member `key`, which is a string or an array of
    strings.
    """
    found = value.get(key)
    if isinstance(found, str):
        return (found,) if found else ()
    where = member(path, key)
    items = _as_list(found, where)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise wrong(f"{where}[{index}]", "a string", item)
    return tuple(item for item in items if item)


def wholes_at(value: JSON, key: str, path: str) -> tuple[int, ...]:
    """Return the integers of the array member `key` of an object."""
    where = member(path, key)
    items = _as_list(value.get(key), where)
    for index, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int):
            raise wrong(f"{where}[{index}]", "an integer", item)
        if not -(2**63) <= item < 2**63:
            raise _outside(f"{where}[{index}]", item, -(2**63), 2**63 - 1)
    return tuple(items)


def first_of(value: JSON, keys: Iterable[str]) -> str:
    """Return the first of `keys` that has a value in `value`; the last one if none has."""
    for key in keys:
        if value.get(key) is not None:
            return key
    return key


# ---- arguments of calls


def arguments_text(value: Any) -> str:
    """Return call arguments as text: a string unchanged, null as "", any other value as compact
    JSON.
    """
    match value:
        case None:
            return ""
        case str():
            return value
        case _:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def arguments_object(arguments: str) -> bytes:
    """Return the JSON text of call arguments for a dialect that needs an object.

    An object stays as it was written, but on one line. Empty text and `null` are `{}`. Anything
    else, also an object that is nested too deeply to be read again, goes under the key
    `INVALID_JSON`, which Anthropic's documentation uses for it, so that the harness's own schema
    check tells the model: SDKs raise at a stream of broken JSON.
    """
    raw = arguments.strip()
    if raw in ("", "null"):
        return b"{}"
    text = without_lone_surrogates(raw).encode()
    try:
        value = _VALUE.decode(text)
        check_depth(text, value, "", MOST_NESTED - _AROUND)
        if isinstance(value, dict):
            return bytes(without_space(text)) if "\n" in raw or "\r" in raw else text
    except (*_REFUSED, RequestError):
        pass
    return encode({"INVALID_JSON": without_lone_surrogates(arguments)})
