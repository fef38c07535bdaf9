"""Reading Google contents: roles, parts, and keys in either case.

A function response is a tool message; what the model is shown of it is its `output` (or `result`)
where that is a text and all there is, as the API defines, else the whole object as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from bridle.dialects.ids import standard_base64
from bridle.dialects.media import block_part, block_text, data_part, url_part
from bridle.dialects.reading import (
    an_object,
    arguments_text,
    flag_at,
    member,
    name_at,
    object_at,
    objects_at,
    text_at,
    wrong,
)
from bridle.errors import RequestError
from bridle.types import JSON, Message, Part, Role, TextPart, ToolCall

_VALUES = ("enum", "default", "example", "const")
"""Schema keys under which stand values, not schemas."""

_HOSTED = frozenset({"executableCode", "codeExecutionResult", "toolCall", "toolResponse"})
"""Parts of what the provider ran; the model is shown them as text."""

_SNAKE = re.compile(r"_([a-z])")
_ROLES = {"user": Role.USER, "function": Role.USER, "tool": Role.USER, "model": Role.ASSISTANT}


def camel(value: JSON) -> JSON:
    """The object with its own keys in camelCase; deeper objects are left alone."""
    if "_" not in "".join(value):
        return value
    return {_SNAKE.sub(lambda found: found[1].upper(), key): item for key, item in value.items()}


def plain_schema(value: JSON) -> JSON:
    """A Google schema as JSON schema: type names are in lower case."""
    return {key: _schema_member(key, item) for key, item in value.items()}


def _schema_member(key: str, value: Any) -> Any:
    match value:
        case str() if key == "type":
            return value.lower()
        case dict() if key == "properties":
            return {name: _schema_member("", item) for name, item in value.items()}
        case dict() if key not in _VALUES:
            return plain_schema(value)
        case list() if key not in _VALUES:
            return [_schema_member("", item) for item in value]
        case _:
            return value


def read_system(value: Any, path: str) -> tuple[Message, ...]:
    """The message of `systemInstruction`: a content, or a bare text."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (Message(Role.SYSTEM, (TextPart(value),)),)
    content = an_object(value, path)
    parts: list[Part] = []
    for part, where in _parts_of(content, path):
        parts += _content_part(part, where)
    return (Message(Role.SYSTEM, tuple(parts)),) if parts else ()


def read_content(value: JSON, path: str) -> tuple[Message, ...]:
    """One content: one message, or several where function responses stand in it."""
    name = text_at(value, "role", path) or "user"
    role = _ROLES.get(name)
    if role is None:
        message = f"{member(path, 'role')}: unknown role {name!r}; known: user, model"
        raise RequestError(message, param=member(path, "role"))
    if role is Role.ASSISTANT:
        return _read_model(value, path)
    if value.get("parts", ()) is None:
        raise wrong(member(path, "parts"), "an array", None)
    return _read_user(value, path)


def _parts_of(value: JSON, path: str) -> Iterator[tuple[JSON, str]]:
    given = value.get("parts")
    if isinstance(given, dict):
        yield camel(given), member(path, "parts")
    elif isinstance(given, str):
        raise wrong(member(path, "parts"), "an array", given)
    else:
        for part, where in objects_at(value, "parts", path):
            yield camel(part), where


def _content_part(part: JSON, path: str) -> Iterator[Part]:
    """Text, media, or a block kept as it is."""
    if "text" in part:
        if text := text_at(part, "text", path):
            yield TextPart(text)
    elif (data := object_at(part, "inlineData", path)) is not None:
        fields, where = camel(data), member(path, "inlineData")
        kind = text_at(fields, "mimeType", where) or "application/octet-stream"
        yield data_part(kind, name_at(fields, "data", where))
    elif (file := object_at(part, "fileData", path)) is not None:
        fields, where = camel(file), member(path, "fileData")
        kind = text_at(fields, "mimeType", where) or "application/octet-stream"
        yield url_part(name_at(fields, "fileUri", where), kind)
    elif _HOSTED & part.keys():
        yield block_text(part)
    elif part.keys() - {"thoughtSignature", "thought"}:
        yield block_part(part)


# ---- user contents


def _read_user(value: JSON, path: str) -> tuple[Message, ...]:
    messages: list[Message] = []
    parts: list[Part] = []
    for part, where in _parts_of(value, path):
        response = object_at(part, "functionResponse", where)
        if response is None:
            parts += _content_part(part, where)
            continue
        if parts:
            messages.append(Message(Role.USER, tuple(parts)))
            parts = []
        messages.append(_read_response(camel(response), member(where, "functionResponse")))
    if parts or not messages:
        messages.append(Message(Role.USER, tuple(parts)))
    return tuple(messages)


def _read_response(value: JSON, path: str) -> Message:
    shown: list[Part] = []
    if text := _response_text(value.get("response")):
        shown.append(TextPart(text))
    for part, where in objects_at(value, "parts", path):
        shown += _content_part(camel(part), where)
    return Message(
        Role.TOOL,
        tuple(shown),
        tool_call_id=text_at(value, "id", path) or None,
        name=text_at(value, "name", path),
    )


def _response_text(response: Any) -> str:
    if isinstance(response, dict) and len(response) == 1:
        only = response.get("output", response.get("result"))
        if isinstance(only, str):
            return only
    if response is None or response == {}:
        return ""
    if isinstance(response, str):
        return response
    return json.dumps(response, ensure_ascii=False)


# ---- model contents


def _read_model(value: JSON, path: str) -> tuple[Message, ...]:
    """One message, and a further one for each text that follows a call."""
    done: list[Message] = []
    content: list[Part] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    ids: list[str] = []

    def message() -> Message:
        return Message(
            Role.ASSISTANT,
            tuple(content),
            reasoning="".join(thoughts) or None,
            tool_calls=tuple(calls),
            issued_ids=tuple(ids),
        )

    for part, where in _parts_of(value, path):
        if mark := text_at(part, "thoughtSignature", where):
            ids.append(standard_base64(mark))
        if flag_at(part, "thought", where):
            thoughts.append(text_at(part, "text", where) or "")
        elif (call := object_at(part, "functionCall", where)) is not None:
            calls.append(_read_call(call, member(where, "functionCall")))
        elif found := list(_content_part(part, where)):
            if calls:
                done.append(message())
                content, thoughts, calls, ids = [], [], [], []
            content += found
    return (*done, message())


def _read_call(value: JSON, path: str) -> ToolCall:
    fields = camel(value)
    return ToolCall(
        text_at(fields, "id", path) or None,
        name_at(fields, "name", path),
        arguments_text(fields.get("args")),
    )
