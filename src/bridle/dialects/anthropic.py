"""Anthropic Messages: requests in, replies out, as Claude Code and the SDKs speak it.

`system` is the head's message; `role: system` inside `messages` stays in its place. A user message
with tool results becomes tool messages and user messages in the order of its blocks. Thinking is
shown only to a request that asked for it. Replies are written in `anthropic_write`, which also has
the tools that Anthropic defines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from bridle.dialects.anthropic_write import (
    TOOLSETS,
    MessagesStream,
    client_run,
    error_body,
    message_json,
    status_of,
    toolset,
)
from bridle.dialects.base import (
    AssistantTurn,
    ReplyHead,
    Route,
    RouteKind,
    StoredReply,
    StreamEncoder,
    WireFormat,
    caller,
    models_route,
    retry_headers,
    tidy,
    user_messages,
)
from bridle.dialects.fields import (
    ignored_fields,
    members,
    note_unknown_value,
    read_sampling,
    split_billing,
    table,
)
from bridle.dialects.json_reader import (
    SpanMemo,
    an_object,
    arguments_text,
    contents,
    decode,
    encode,
    flag_at,
    member,
    name_at,
    object_at,
    objects,
    read_head,
    read_spans,
    split_array,
    split_body,
    split_field,
    split_object,
    text_at,
    wrong,
)
from bridle.dialects.media import BLOCK_TYPE, block_part, block_text, data_part, url_part
from bridle.dialects.tools import ToolList, check_choice, function_spec, provider_run, tools_sent
from bridle.errors import RequestError
from bridle.types import (
    JSON,
    Dialect,
    MediaPart,
    Message,
    ModelRequest,
    Part,
    Reply,
    Role,
    TextPart,
    ToolCall,
    ToolSpec,
    Usage,
)

_SALT = b"messages:"
_FIELDS = table(
    used="model system tool_choice max_tokens temperature top_p top_k stop_sequences stream "
    "thinking output_config output_format thread",
    harmless="metadata service_tier cache_control betas anthropic_beta anthropic_version "
    "billing_policy diagnostics inference_geo speed user_profile_id workspace_id fallbacks "
    "fallback_credit_token",
    unenforced="context_management compaction",
    refused="mcp_servers container",
)
_MEMBERS = members(
    "type cache_control",
    message="role content",
    text="text citations",
    image="source transformations",
    document="source title context citations",
    search_result="source title content citations",
    compaction="content encrypted_content signature tool_changes",
    thinking="thinking signature",
    redacted_thinking="data",
    tool_use="id name input caller toolset_name",
    tool_result="tool_use_id content is_error toolset_name",
)
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "max_tokens")},
    "stop": "stop_sequences",
}
_PROBES = (("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello"))


class Anthropic(WireFormat):
    """Messages."""

    dialect = Dialect.ANTHROPIC
    fields = _FIELDS
    members = _MEMBERS

    def __init__(self) -> None:
        super().__init__(read_tools, read_message)

    def route(self, method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
        """Return the route of a request: messages, token counts, model list or Claude Code's
        probes.

        `None` = not of Anthropic's API.
        """
        del query
        words = tidy(path)
        kind = None
        if method == "POST" and words.endswith("/messages"):
            kind = RouteKind.GENERATE
        elif method == "POST" and words.endswith("/messages/count_tokens"):
            kind = RouteKind.COUNT_TOKENS
        elif (method, words) in _PROBES:
            kind = RouteKind.PROBE
        if kind is not None:
            return Route(self.dialect, kind)
        if "/messages/batches" in words:
            return Route(self.dialect, RouteKind.UNSUPPORTED, resource="messages/batches")
        if words.endswith("/files") and caller(path, headers) is self.dialect:
            return Route(self.dialect, RouteKind.UNSUPPORTED, resource="files")
        return models_route(self.dialect, method, path, headers)

    def _parse(self, route: Route, body: bytes, memo: SpanMemo) -> ModelRequest:
        del route
        fields, spans = split_body(body, "messages", memo, _SALT)
        if spans is None:
            spans = split_field(fields, "messages")
        tools_span = tools_sent(fields.pop("tools", None))
        head_bytes = encode(fields)
        key = (_SALT, head_bytes, tools_span)
        system, tools, members = read_head(
            memo, key, lambda: self._read_head(head_bytes, tools_span)
        )
        if not spans and members["extra"].get("previous") is None:
            raise RequestError("messages: at least one message is required", param="messages")
        messages, digests, lengths = read_spans(spans, memo, _SALT, "messages", self._read)
        if tools.deferred:
            messages = [_with_loaded_tools(message, tools) for message in messages]
        thinks = members["extra"]["thinking"] is not None
        return ModelRequest(
            messages=(*system, *messages),
            message_spans=spans,
            span_digests=digests,
            span_lengths=lengths,
            prefill=_read_prefill(messages[-1], spans[-1], thinks=thinks) if spans else None,
            **members,
        )

    def _read_head(
        self, head_bytes: bytes, tools_span: bytes | None
    ) -> tuple[tuple[Message, ...], ToolList, JSON]:
        """Return the system message, the tools, and the members of a `ModelRequest` that no message
        decides.
        """
        head = an_object(decode(head_bytes, ""), "")
        thread = object_at(head, "thread", "")
        previous = None if thread is None else _read_thread(thread)
        tools = ToolList() if tools_span is None else self._tools.read(tools_span, "tools")
        system, removed = read_system(head.get("system"), "system")
        thinking = object_at(head, "thinking", "") or {}
        output = object_at(head, "output_config", "") or {}
        choice = object_at(head, "tool_choice", "") or {}
        shown = thinking.get("type") in ("enabled", "adaptive")
        how = "omitted" if thinking.get("display") == "omitted" else "text"
        alone = flag_at(choice, "disable_parallel_tool_use", "tool_choice")
        ineffective = ignored_fields(head, self.fields)
        form = object_at(output, "format", "output_config") or {}
        name = "output_config.format"
        note_unknown_value(form.get("type"), ("json_schema", "text"), name, ineffective)
        members: JSON = {
            "dialect": self.dialect,
            "model": name_at(head, "model", ""),
            "tools": tools.specs,
            "sampling": read_sampling(head, _SAMPLING),
            "stream": flag_at(head, "stream", "") or False,
            "tool_choice": _read_choice(choice, tools),
            "response_schema": _read_schema(head, output),
            "thinking": True if shown else False if thinking.get("type") == "disabled" else None,
            "reasoning_effort": text_at(output, "effort", "output_config"),
            "parallel_tool_calls": None if alone is None else not alone,
            "head": head_bytes,
            "head_messages": len(system),
            "tools_span": tools_span,
            "extra": {
                "removed": {**tools.removed, **removed},
                "thinking": how if shown else None,
                **({"toolsets": list(tools.wire)} if tools.wire else {}),
                **({} if thread is None else {"store": True, "previous": previous}),
                **ineffective,
            },
        }
        return system, tools, members

    def reply_json(
        self, request: ModelRequest, head: ReplyHead, reply: Reply, usage: Usage
    ) -> bytes:
        thinking, toolsets = request.extra.get("thinking"), request.extra.get("toolsets", ())
        return encode(message_json(head, reply, usage, thinking, toolsets))

    def continued(self, body: bytes, kept: StoredReply) -> bytes:
        """Return a request that continues a thread, rewritten as a request with the thread's whole
        history.

        The system prompt and the tools are the thread's; `RequestError` where they are sent again.
        `thread` comes last: the bytes before it are the same in every request of the thread, and
        are read once.
        """
        fields, thread = split_object(body), split_object(kept.head)
        for name in ("system", "tools"):
            if tools_sent(fields.pop(name, None)) is not None:
                message = f"{name}: kept by the thread since its first request; do not repeat it"
                raise RequestError(message, param=name)
        begun = {"system": thread["system"]} if "system" in thread else {}
        if kept.tools is not None:
            begun["tools"] = msgspec.Raw(kept.tools)
        content = bytes(split_object(kept.reply)["content"])
        reply = b'{"role":"assistant","content":%b}' % content
        items = [*kept.items, reply, *split_array(fields.pop("messages"), "messages")]
        whole = msgspec.Raw(b"[" + b",".join(items) + b"]")
        last = {"messages": whole, "thread": fields.pop("thread")}
        return encode({**begun, **fields, **last})

    def unknown_previous(self, message_id: str) -> RequestError:
        """Return the error for an unknown thread, after which the SDKs send their whole history
        again.
        """
        message = f"thread.previous_message_id: no thread was found for {message_id!r}"
        return RequestError(message, status=404, code="thread_not_found", param="thread")

    def reply_messages(self, reply_json: bytes) -> tuple[Message, ...]:
        return read_message(an_object(decode(reply_json, "reply"), "reply"), "reply")

    def stream(self, request: ModelRequest, head: ReplyHead) -> StreamEncoder:
        thinking, toolsets = request.extra.get("thinking"), request.extra.get("toolsets", ())
        return MessagesStream(head, thinking=thinking, toolsets=toolsets)

    def error(self, error: RequestError) -> tuple[int, dict[str, str], bytes]:
        return status_of(error), retry_headers(error), encode(error_body(error))

    def models(self, route: Route, names: Sequence[str], context_length: int) -> bytes:
        def model(name: str) -> JSON:
            return {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
                "max_input_tokens": context_length,
                "max_tokens": context_length,
            }

        if route.kind is RouteKind.MODEL:
            return encode(model(route.model or ""))
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        listed = {"data": [model(name) for name in names], "has_more": False}
        return encode({**listed, "first_id": None, "last_id": None, **ends})

    def token_count(self, count: int) -> bytes:
        return encode({"input_tokens": count})


def _read_thread(thread: JSON) -> str | None:
    """Return the id of the message that a thread is continued from; `None` where it begins."""
    match name_at(thread, "type", "thread"):
        case "create":
            return None
        case "continue":
            return name_at(thread, "previous_message_id", "thread")
        case other:
            message = f"thread.type: unknown {other!r}; known: create, continue"
            raise RequestError(message, param="thread.type")


def _read_choice(choice: JSON, tools: ToolList) -> str:
    match text_at(choice, "type", "tool_choice"):
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "any":
            return check_choice("required", tools, "tool_choice")
        case "tool":
            name = name_at(choice, "name", "tool_choice")
            return name if name in tools.deferred else check_choice(name, tools, "tool_choice.name")
        case other:
            raise RequestError(
                f"tool_choice.type: unknown {other!r}; known: auto, any, tool, none",
                param="tool_choice.type",
            )


def _read_prefill(last: Message, span: bytes, *, thinks: bool) -> str | None:
    """Return the text of a last assistant message, which the reply continues; `None` = none.

    Refused as by the provider: an end in white space, and a text without a thought before it
    where thinking is on. So is a turn that the provider paused in a tool of its own.
    """
    if last.role is not Role.ASSISTANT or last.tool_calls or not last.text.strip():
        return None
    if (hosted := hosted_end(span)) is not None:
        message = (
            f"messages: the last message is an assistant turn that ends in {hosted!r}, which only "
            "the provider that paused there can resume; send a user message after it"
        )
        raise RequestError(message, param="messages")
    if last.text != last.text.rstrip():
        message = "messages: final assistant content cannot end with trailing whitespace"
        raise RequestError(message, param="messages")
    if thinks and last.reasoning is None and not last.issued_ids:
        message = (
            "messages: when `thinking` is enabled, a final `assistant` message must start with a "
            "thinking block"
        )
        raise RequestError(message, param="messages")
    return last.text


def _read_schema(head: JSON, output: JSON) -> JSON | None:
    form = object_at(output, "format", "output_config") or object_at(head, "output_format", "")
    if form is None or form.get("type") != "json_schema":
        return None
    return object_at(form, "schema", "output_config.format") or {}


# ---- tools


def read_tools(value: object, path: str) -> ToolList:
    """Parse the field `tools`, of which those that the client runs are kept.

    A deferred tool is shown to the model when a reference names it.
    """
    specs: list[ToolSpec] = []
    deferred: dict[str, ToolSpec] = {}
    removed: list[str] = []
    toolsets: dict[str, JSON] = {}
    for tool, where in objects(value, path):
        kind = text_at(tool, "type", where)
        schema = object_at(tool, "input_schema", where)
        later = flag_at(tool, "defer_loading", where)
        if kind is not None and (family := toolset(kind, tool, where)) is not None:
            spec, later = family
            toolsets[spec.name] = {}
        elif schema is None and kind not in (None, "custom"):
            own = client_run(kind, text_at(tool, "name", where) or kind, tool)
            if own is None:
                removed.append(kind)
                continue
            spec = own
        else:
            spec = function_spec(tool, where, schema)
        if later:
            deferred[spec.name] = spec
        else:
            specs.append(spec)
    return ToolList(tuple(specs), wire=toolsets, deferred=deferred, removed=provider_run(removed))


def _with_loaded_tools(message: Message, tools: ToolList) -> Message:
    """Replace each reference to a deferred tool in a message by that tool's schema."""
    content = tuple(_loaded(part, tools) for part in message.content)
    return message if content == message.content else replace(message, content=content)


def _loaded(part: Part, tools: ToolList) -> Part:
    if not isinstance(part, MediaPart) or part.media_type != BLOCK_TYPE:
        return part
    block = json.loads(part.source)
    if block.get("type") != "tool_reference":
        return part
    spec = tools.deferred.get(str(block.get("tool_name")))
    if spec is None:
        return part
    shown = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return TextPart(json.dumps(shown, ensure_ascii=False))


# ---- content: strings or lists of blocks, in every role and in tool results


_ADDED = ("tool_addition", "tool_reference")
_HOSTED = ("server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback", "browser_state")
"""Blocks of what the provider ran or did; also those whose type ends in `_tool_result`."""

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}


def read_system(value: Any, path: str) -> tuple[tuple[Message, ...], dict[str, list[str]]]:
    """Return the message of the field `system` (none if it is empty), and the texts that rules
    removed.
    """
    parts = tuple(_parts(value, path))
    leading = [part.text for part in parts[:1] if isinstance(part, TextPart)]
    skip, removed = split_billing(leading if isinstance(value, list) else [])
    kept = parts[skip:]
    return ((Message(Role.SYSTEM, kept),) if kept else ()), removed


def read_message(value: JSON, path: str) -> tuple[Message, ...]:
    """Return the internal messages of one wire message: several where it has tool results."""
    name = name_at(value, "role", path)
    role = _ROLES.get(name)
    if role is None:
        message = f"{member(path, 'role')}: unknown role {name!r}; known: user, assistant, system"
        raise RequestError(message, param=member(path, "role"))
    where = member(path, "content")
    content = value.get("content")
    if role is Role.ASSISTANT:
        return _read_assistant(content, where)
    if role is Role.SYSTEM:
        return (Message(role, tuple(_parts(content, where))),)
    if content is None and "content" in value:
        raise wrong(where, "a string or an array of blocks", None)
    return user_messages(_read_user(content, where))


def hosted_end(span: bytes) -> str | None:
    """Return the type of the last block of a raw message if it is of a tool that the provider runs.

    `None` = it is not.
    """
    *_, (last, _) = _blocks(decode(span, "").get("content"), "")
    kind = str(last.get("type"))
    return kind if _is_hosted(kind) else None


def _is_hosted(kind: str | None) -> bool:
    return kind in _HOSTED or (kind or "").endswith("_tool_result")


def _blocks(value: Any, path: str) -> Iterator[tuple[JSON, str]]:
    """Yield each block with its path; a string is one text block."""
    for item, where in contents(value, path, "blocks"):
        block = {"type": "text", "text": item} if isinstance(item, str) else item
        yield an_object(block, where), where


def _parts(value: Any, path: str) -> Iterator[Part]:
    for block, where in _blocks(value, path):
        yield from _part(block, where)


def _part(block: JSON, path: str) -> Iterator[Part]:
    """Yield the parts of one block that is content: text, image, document, or kept as it is."""
    match text_at(block, "type", path):
        case "text":
            if text := text_at(block, "text", path):
                yield TextPart(text)
        case "image":
            yield from _from_source(block, path, "image/*")
        case "document":
            titles = [text_at(block, key, path) for key in ("title", "context")]
            if given := [text for text in titles if text]:
                yield TextPart("\n".join(given) + "\n")
            yield from _from_source(block, path, "application/pdf")
        case "search_result":
            found = [text_at(block, key, path) for key in ("title", "source")]
            yield TextPart("\n".join(filter(None, found)) + "\n")
            yield from _parts(block.get("content"), member(path, "content"))
        case "compaction":
            yield from _summary(block, path)
        case "container_upload":
            message = "container_upload: files are not kept here; send their content"
            raise RequestError(message, param=path)
        case kind if _is_hosted(kind) or kind in ("tool_addition", "tool_removal"):
            yield from _as_text(block)
        case _:
            yield block_part(block)


def _as_text(block: JSON) -> Iterator[Part]:
    """Yield a block as text, but for the reference to a tool, whose schema is shown instead."""
    tool = block.get("tool")
    if isinstance(tool, dict) and (block["type"], tool.get("type")) == _ADDED:
        yield TextPart("[tool_addition] ")
        yield block_part({"type": "tool_reference", "tool_name": tool.get("name")})
    else:
        yield block_text(block)


def _summary(block: JSON, path: str) -> Iterator[Part]:
    if not block.get("content") and block.get("encrypted_content"):
        message = f"{path}: the compaction block's content is encrypted; send it as text"
        raise RequestError(message, param=path)
    yield from _parts(block.get("content"), member(path, "content"))
    yield from _parts(block.get("tool_changes"), member(path, "tool_changes"))


def _from_source(block: JSON, path: str, media_type: str) -> Iterator[Part]:
    source = object_at(block, "source", path) or {}
    where = member(path, "source")
    match text_at(source, "type", where):
        case "base64":
            kind = text_at(source, "media_type", where) or media_type
            yield data_part(kind, name_at(source, "data", where))
        case "url":
            yield url_part(name_at(source, "url", where), media_type)
        case "text":
            if text := text_at(source, "data", where):
                yield TextPart(text)
        case "content":
            yield from _parts(source.get("content"), member(where, "content"))
        case _:
            yield block_part(block)


# ---- user messages


def _read_user(value: Any, path: str) -> Iterator[Part | Message]:
    """Yield the parts of user blocks and the messages of tool results."""
    for block, where in _blocks(value, path):
        if block.get("type") != "tool_result":
            yield from _part(block, where)
            continue
        content = tuple(_parts(block.get("content"), member(where, "content")))
        yield Message(Role.TOOL, content, tool_call_id=text_at(block, "tool_use_id", where))


# ---- assistant messages


def _read_assistant(value: Any, path: str) -> tuple[Message, ...]:
    turn = AssistantTurn()
    for block, where in _blocks(value, path):
        match block.get("type"):
            case "thinking":
                turn.thoughts.append(text_at(block, "thinking", where) or "")
                turn.ids += filter(None, [text_at(block, "signature", where)])
            case "redacted_thinking":
                turn.ids += filter(None, [text_at(block, "data", where)])
            case "tool_use":
                turn.calls.append(_read_call(block, where))
            case _:
                turn.add(list(_part(block, where)))
    return turn.messages()


def _read_call(block: JSON, path: str) -> ToolCall:
    """Read a call; that of an action of a toolset is a call of the toolset's function."""
    name, given = name_at(block, "name", path), block.get("input")
    family = text_at(block, "toolset_name", path)
    if family in TOOLSETS:
        inner = object_at(block, "input", path) or {}
        name, given = family, {"action": name, **inner}
    return ToolCall(text_at(block, "id", path), name, arguments_text(given))


FORMAT = Anthropic()
