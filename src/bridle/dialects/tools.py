"""Tool lists: read once per distinct list, and freeform tools as functions with one string.

A freeform ("custom") tool takes text, not JSON. The model is shown a function with the one argument
`input`; its call is turned back into the text on the way out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from bridle.dialects.fields import SERVER_TOOLS
from bridle.dialects.json_reader import (
    content_digest,
    decode,
    flag_at,
    name_at,
    object_at,
    text_at,
    too_deep,
)
from bridle.errors import RequestError
from bridle.types import JSON, ToolCall, ToolSpec

KEPT_LISTS = 64
"""Number of distinct tool lists that are remembered; harnesses have a handful each, of some 30
kB."""


@dataclass(frozen=True, slots=True)
class ToolList:
    """A tool list as read."""

    specs: tuple[ToolSpec, ...] = ()
    freeform: frozenset[str] = frozenset()
    """Names of freeform tools."""
    wire: Mapping[str, JSON] = field(default_factory=dict)
    """Our name -> how the dialect's own encoder names such a call, where that is another form."""
    deferred: Mapping[str, ToolSpec] = field(default_factory=dict)
    """Tools that the model is shown only where a tool result refers to them."""
    removed: Mapping[str, list[str]] = field(default_factory=dict)
    """Tools that rules removed: rule name -> tools."""

    def plus(self, other: ToolList) -> ToolList:
        """Return a list with the tools of both, those of `other` last."""
        removed = {name: list(tools) for name, tools in self.removed.items()}
        for name, tools in other.removed.items():
            removed.setdefault(name, []).extend(tools)
        return ToolList(
            self.specs + other.specs,
            self.freeform | other.freeform,
            {**self.wire, **other.wire},
            {**self.deferred, **other.deferred},
            removed,
        )


class ToolMemo:
    """Tool lists by content digest, the last `KEPT_LISTS` of them."""

    def __init__(self, read: Callable[[object, str], ToolList]) -> None:
        self._read = read
        self._known: dict[bytes, ToolList] = {}

    def read(self, raw: bytes, path: str) -> ToolList:
        """Parse a raw tool list, or return the result for one that was parsed before.

        `RequestError` names the part of it that is wrong.
        """
        digest = list_digest(raw)
        found = self._known.pop(digest, None)
        if found is None:
            try:
                found = self._read(decode(raw, path), path)
            except RecursionError:
                raise too_deep(path) from None
            if len(self._known) >= KEPT_LISTS:
                del self._known[next(iter(self._known))]
        self._known[digest] = found
        return found


_sent: list[tuple[bytes, bytes]] = []
"""Raw lists and their digests, the last sent first."""


def tools_sent(raw: msgspec.Raw | None) -> bytes | None:
    """Return the raw tool list of a request, or `None` where none or an empty one was sent.

    For a list that was sent before, the earlier object is returned, whose digest is cached:
    comparing 60 kB takes 3 us, hashing them 30 or, without the processor's help, 150.
    """
    if raw is None:
        return None
    text = bytes(raw)
    for place, (known, digest) in enumerate(_sent):
        if known == text:
            if place:
                del _sent[place]
                _sent.insert(0, (known, digest))
            return known
    if b"".join(text.split(None, 4)) in (b"null", b"[]"):
        return None
    _sent.insert(0, (text, content_digest(text)))
    del _sent[KEPT_LISTS:]
    return text


def list_digest(raw: bytes) -> bytes:
    """Return the content digest of a raw tool list; that of a recently sent list is cached."""
    for known, digest in _sent:
        if known is raw:
            return digest
    return content_digest(raw)


def check_choice(choice: str, tools: ToolList, path: str) -> str:
    """Return `choice`, a mode of `tool_choice` or a tool's name.

    `RequestError` if it is no mode and names no tool of the request.
    """
    modes = ("auto", "none", "required")
    if choice not in modes and all(spec.name != choice for spec in tools.specs):
        raise RequestError(f"Tool choice {choice!r} not found in 'tools' parameter.", param=path)
    if choice == "required" and not tools.specs:
        raise RequestError(
            "The tool choice asks for a tool call, but 'tools' has no tool.", param=path
        )
    return choice


def object_schema(properties: JSON, required: Sequence[str] = ()) -> JSON:
    """Return the JSON schema of a function's arguments: an object with these properties."""
    return {"type": "object", "properties": properties, "required": list(required)}


def provider_run(types: list[str]) -> dict[str, list[str]]:
    """Return the record that tools of these types were removed because the provider runs them."""
    return {SERVER_TOOLS.name: types} if types else {}


def function_spec(value: JSON, path: str, schema: JSON | None, name: str | None = None) -> ToolSpec:
    """Return a function of the wire's tool list as a tool; `name` replaces its own name."""
    return ToolSpec(
        name or name_at(value, "name", path),
        text_at(value, "description", path),
        schema,
        flag_at(value, "strict", path) or False,
    )


def freeform_spec(value: JSON, path: str, name: str | None = None) -> ToolSpec:
    """Return a freeform tool as a function, whose description contains the tool's grammar."""
    description = text_at(value, "description", path)
    grammar = _freeform_grammar(object_at(value, "format", path) or {})
    argument = {"type": "string", "description": "The tool's input, as it is."}
    schema = {**object_schema({"input": argument}, ["input"]), "additionalProperties": False}
    text = "\n\n".join(filter(None, (description, grammar))) or None
    return ToolSpec(name or name_at(value, "name", path), text, schema)


def _freeform_grammar(form: JSON) -> str | None:
    """Return the format of a freeform tool as shown to the model; `None` where any text will do."""
    grammar = form.get("grammar", form) or {}
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if not isinstance(definition, str):
        return None
    return f"The input must match this {grammar.get('syntax') or 'lark'} grammar:\n{definition}"


def freeform_input(arguments: str) -> str:
    """Return the text for a freeform tool: the argument `input`, else all arguments as text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def as_function(call: ToolCall) -> ToolCall:
    """Return a tool call as the model sampled it: a freeform call as a call of its function."""
    if not call.custom:
        return call
    return ToolCall(call.id, call.name, json.dumps({"input": call.arguments}, ensure_ascii=False))
