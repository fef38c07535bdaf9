"""OpenAI Responses: requests in, replies out, as Codex and the SDKs speak it.

Items of one assistant turn (reasoning, message, calls) follow each other in `input`; those that
make up one message are one span, joined with commas, so that a span always stands for whole
messages whatever surrounds it. The item types are those of the API reference and of Codex's own
protocol (`compaction`, `compaction_trigger`, `additional_tools`); an item of an unknown type stays
in its place as a block.

A request that continues `previous_response_id` is first made whole with `continued`. Its
tools are read, and replies are written, in `openai_responses_write`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from bridle.dialects.base import (
    ReplyHead,
    Route,
    RouteKind,
    StoredReply,
    StreamEncoder,
    WireFormat,
    tidy,
)
from bridle.dialects.fields import (
    FORMATS,
    ignored_fields,
    members,
    note_unknown_value,
    read_sampling,
    table,
)
from bridle.dialects.history import KEPT, RequestHistory
from bridle.dialects.json_reader import (
    SpanMemo,
    an_object,
    arguments_text,
    content_digest,
    contents,
    decode,
    encode,
    flag_at,
    member,
    missing,
    name_at,
    object_at,
    objects_at,
    read_head,
    read_spans,
    split_array,
    split_body,
    split_object,
    text_at,
    texts_at,
    without_space,
    wrong,
)
from bridle.dialects.media import block_part, block_text, data_part, url_part
from bridle.dialects.openai_chat import read_choice, read_role
from bridle.dialects.openai_chat_write import error_response, models_json
from bridle.dialects.openai_responses_write import (
    Dress,
    ResponsesStream,
    call_of_item,
    compaction_json,
    qualified_name,
    read_tools,
    response_json,
    responses_message,
    summary_in,
)
from bridle.dialects.tools import ToolList, ToolMemo, tools_sent
from bridle.errors import RequestError
from bridle.types import (
    JSON,
    Dialect,
    Message,
    ModelRequest,
    Part,
    Reply,
    Role,
    TextPart,
    ToolCall,
    Usage,
)

_SALT = b"responses:"
_FIELDS = table(
    used="model instructions tool_choice stream max_output_tokens temperature top_p top_k stop "
    "text reasoning include previous_response_id store parallel_tool_calls object",
    harmless="metadata client_metadata user prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier stream_options moderation "
    "access_programs max_tool_calls",
    unenforced="truncation context_management top_logprobs image",
    refused="background conversation prompt mcp_servers generate",
)
TEXT_FIELDS = table(used="format", unenforced="verbosity")
_MEMBERS = members(
    "type id status prompt_cache_breakpoint internal_chat_message_metadata_passthrough",
    message="role content phase",
    input_text="text",
    output_text="text annotations logprobs",
    text="text annotations",
    refusal="refusal",
    input_image="image_url file_id detail",
    input_file="file_data file_url file_id filename detail",
    input_audio="input_audio data format",
    reasoning="summary content encrypted_content",
    function_call="call_id name namespace arguments async caller",
    custom_tool_call="call_id name namespace input async caller",
    function_call_output="call_id output name namespace caller",
    custom_tool_call_output="call_id output name namespace caller",
)
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "stop")},
    "max_tokens": "max_output_tokens",
}
_STORED = {
    ("GET",): "get",
    ("DELETE",): "delete",
    ("GET", "input_items"): "input_items",
    ("POST", "cancel"): "cancel",
}
"""Method and what follows the id -> what is done with a kept reply."""
_COMPACTED = "response.compaction"
_TRIGGER = b'{"type":"compaction_trigger"}'
_UPDATE = b'"configuration_update"'


class OpenAIResponses(WireFormat):
    """Responses."""

    dialect = Dialect.OPENAI_RESPONSES
    fields = _FIELDS
    members = _MEMBERS
    messages_field = "input"
    grows = False

    def __init__(self) -> None:
        super().__init__(read_tools, read_item)

    def route(self, method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
        """Return the route of a request: `POST .../responses`, token counts, stored replies,
        websockets.

        `None` = not of the Responses API.
        """
        del query
        _, found, rest = (tidy(path) + "/").rpartition("/responses/")
        if not found:
            return None
        words = rest.split("/")[:-1]
        if headers.get("upgrade", "").lower() == "websocket":
            return Route(self.dialect, RouteKind.UPGRADE)
        match method, words:
            case "POST", [] | ["compact"]:
                return Route(self.dialect, RouteKind.GENERATE, resource=words[0] if words else None)
            case "POST", ["input_tokens"]:
                return Route(self.dialect, RouteKind.COUNT_TOKENS)
        if (action := _STORED.get((method, *words[1:]))) is not None and words:
            return Route(self.dialect, RouteKind.STORED, resource=words[0], action=action)
        resource = "/".join(["responses", *words])
        return Route(self.dialect, RouteKind.UNSUPPORTED, resource=resource)

    def _parse(self, route: Route, body: bytes, memo: SpanMemo) -> ModelRequest:
        fields, items = split_body(body, "input", memo, _SALT)
        if items is None:
            items = _input_items(fields)
        if route.resource == "compact":
            items = (*items, _TRIGGER)
            fields["object"] = msgspec.Raw(encode(_COMPACTED))
        tools_span = tools_sent(fields.pop("tools", None))
        read, digests, lengths = read_spans(items, memo, _SALT, "input", self._read)
        spans = _joined(memo, items, digests, lengths, read)
        compacts = bool(read) and read[-1].text == COMPACTION_PROMPT
        silent = [place for place, length in enumerate(lengths) if length == 0]
        added = tuple([(items[place], f"input[{place}].tools") for place in silent])
        head_bytes = encode(fields)
        key = (_SALT, head_bytes, tools_span, added, compacts, route.resource)
        system, members = read_head(
            memo, key, lambda: self._read_head(route, fields, tools_span, added, compacts=compacts)
        )
        if not items and members["extra"]["previous"] is None:
            raise RequestError("'input' must hold at least one item.", param="input")
        return ModelRequest(
            messages=(*system, *spans.messages),
            head=head_bytes,
            message_spans=tuple(spans.spans),
            span_digests=tuple(spans.digests),
            span_lengths=tuple(spans.lengths),
            **members,
        )

    def _read_head(
        self,
        route: Route,
        fields: dict[str, msgspec.Raw],
        tools_span: bytes | None,
        added: Sequence[tuple[bytes, str]],
        *,
        compacts: bool,
    ) -> tuple[Sequence[Message], JSON]:
        """Return the instructions, and the members of a `ModelRequest` that no message decides.

        `added` are items that no message comes from, and the paths of their tools.
        """
        head = an_object(decode(encode(fields), ""), "")
        ineffective = ignored_fields(head, self.fields)
        tools = ToolList() if tools_span is None else self._tools.read(tools_span, "tools")
        tools = _with_added_tools(tools, added, self._tools)
        system = read_instructions(head.get("instructions"))
        text = object_at(head, "text", "") or {}
        for kind, names in ignored_fields(text, TEXT_FIELDS, "text.").items():
            ineffective.setdefault(kind, []).extend(names)
        form = object_at(text, "format", "text") or {}
        note_unknown_value(form.get("type"), FORMATS, "text.format", ineffective)
        if any(bytes(split_object(item)["type"]) == _UPDATE for item, _ in added):
            ineffective.setdefault("unenforced", []).append("configuration_update")
        reasoning = object_at(head, "reasoning", "") or {}
        effort = text_at(reasoning, "effort", "reasoning")
        return system, {
            "dialect": self.dialect,
            "model": name_at(head, "model", ""),
            "tools": tools.specs,
            "sampling": read_sampling(head, _SAMPLING),
            "stream": (flag_at(head, "stream", "") or False) and route.resource != "compact",
            "tool_choice": "none" if compacts else read_choice(head, tools),
            "response_schema": _read_schema(form),
            "thinking": False if effort == "none" else None,
            "reasoning_effort": effort,
            "parallel_tool_calls": flag_at(head, "parallel_tool_calls", ""),
            "head_messages": len(system),
            "tools_span": tools_span,
            "extra": {
                "removed": dict(tools.removed),
                "dress": _dress(head, fields, tools, reasoning, compacts=compacts),
                "previous": text_at(head, "previous_response_id", ""),
                "store": flag_at(head, "store", "") is not False,
                **({"compact": True} if head.get("object") == _COMPACTED else {}),
                **ineffective,
            },
        }

    def reply_json(
        self, request: ModelRequest, head: ReplyHead, reply: Reply, usage: Usage
    ) -> bytes:
        """Return the whole reply as non-streaming clients get it: a `response`, or a compaction."""
        dress = request.extra.get("dress") or Dress()
        whole = compaction_json if request.extra.get("compact") else response_json
        return encode(whole(head, dress, reply, usage))

    def reply_messages(self, reply_json: bytes) -> tuple[Message, ...]:
        items = self.output_items(reply_json)
        read, digests, lengths = read_spans(items, {}, _SALT, "output", read_item)
        return tuple(_Spans(items, digests, lengths, read).messages)

    def output_items(self, reply_json: bytes) -> tuple[bytes, ...]:
        """Return the raw output items of a reply that this gateway sent; the next request repeats
        them.
        """
        return split_array(split_object(reply_json)["output"], "output")

    def history(self, kept: StoredReply) -> tuple[bytes, ...]:
        """Return the items of a stored request and its reply, which a later request continues.

        A compaction item in the reply replaces everything before it.
        """
        output = self.output_items(kept.reply)
        for place, item in enumerate(output):
            if an_object(decode(item, "output"), "output").get("type") == "compaction":
                return output[place:]
        return (*kept.items, *output)

    def resolved(self, body: bytes, find: Callable[[str], bytes | None]) -> bytes:
        """Return a request with each `item_reference` replaced by the item that `find` returns.

        A reference that `find` does not know stays, and is refused when the request is read.
        """
        if b"item_reference" not in body:
            return body
        fields = split_object(body)
        items = []
        for place, item in enumerate(_input_items(fields)):
            value = an_object(decode(item, where := f"input[{place}]"), where)
            named = value.get("id") if value.get("type") == "item_reference" else None
            items.append((find(named) if isinstance(named, str) else None) or item)
        whole = msgspec.Raw(b"[" + b",".join(items) + b"]")
        return encode({**fields, "input": whole})

    def continued(self, body: bytes, kept: StoredReply) -> bytes:
        """Return a request with `previous_response_id`, rewritten as a request with its whole
        history.

        The instructions are the new request's own, as the API defines. The id stays for the record,
        after the items: the bytes before it are then the same in every request that continues like
        this, and are read once.
        """
        fields = split_object(body)
        items = [*self.history(kept), *_input_items(fields)]
        previous = fields.pop("previous_response_id", msgspec.Raw(b"null"))
        whole = msgspec.Raw(b"[" + b",".join(items) + b"]")
        return encode({**fields, "input": whole, "previous_response_id": previous})

    def unknown_previous(self, response_id: str) -> RequestError:
        """Return OpenAI's error for a `previous_response_id` that is not stored."""
        message = f"Previous response with id {response_id!r} not found."
        return RequestError(message, status=404, code="not_found", param="previous_response_id")

    def stream(self, request: ModelRequest, head: ReplyHead) -> StreamEncoder:
        return ResponsesStream(head, request.extra.get("dress") or Dress())

    def error(self, error: RequestError) -> tuple[int, dict[str, str], bytes]:
        return error_response(error, responses_message(error))

    def refuses_in_stream(self, error: RequestError) -> bool:
        """Return True for a context overflow, which streaming clients must get inside a started
        stream.

        Codex reads `response.failed` there; a bare 400 ends its run.
        """
        return error.code == "context_length_exceeded"

    def models(self, route: Route, names: Sequence[str], context_length: int) -> bytes:
        """Return OpenAI's model list; its route belongs to Chat Completions."""
        return models_json(route, names, context_length)

    def token_count(self, count: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": count})


class _Spans:
    """Items put together into messages: `spans`, `digests` and `lengths` per message or item."""

    def __init__(
        self,
        items: Sequence[bytes],
        digests: Sequence[bytes],
        lengths: Sequence[int],
        read: Sequence[Message],
        begun: _Spans | None = None,
    ) -> None:
        """`begun` is what the first of these items were put together to."""
        self.items = items
        self.spans: list[bytes] = [] if begun is None else begun.spans.copy()
        self.digests: list[bytes] = [] if begun is None else begun.digests.copy()
        self.lengths: list[int] = [] if begun is None else begun.lengths.copy()
        self.messages: list[Message] = [] if begun is None else begun.messages.copy()
        self.read = len(read)
        place, done = (0, 0) if begun is None else (begun.read, len(begun.items))
        new = items[done:], digests[done:], lengths[done:]
        for item, digest, length in zip(*new, strict=True):
            found = read[place : place + length]
            place += length
            joined = None
            if len(found) == 1 and self.lengths and self.lengths[-1] == 1:
                joined = join_turn(self.messages[-1], found[0])
            if joined is None:
                self.spans.append(item)
                self.digests.append(digest)
                self.lengths.append(length)
                self.messages += found
            else:
                self.messages[-1] = joined
                self.spans[-1] += b"," + item
                self.digests[-1] = content_digest(self.spans[-1])


def _joined(
    memo: SpanMemo,
    items: tuple[bytes, ...],
    digests: Sequence[bytes],
    lengths: Sequence[int],
    read: Sequence[Message],
) -> _Spans:
    """Join items into messages, beginning with those of the session's earlier requests."""
    if not isinstance(memo, RequestHistory):
        return _Spans(items, digests, lengths, read)
    known = [one for one in memo.joined if one.items == items[: len(one.items)]]
    begun = max(known, key=lambda one: len(one.items), default=None)
    made = _Spans(items, digests, lengths, read, begun)
    memo.joined = [made, *(one for one in memo.joined if one is not begun)][:KEPT]
    return made


def _input_items(fields: dict[str, msgspec.Raw]) -> tuple[bytes, ...]:
    """Take `input` out of `fields` and return its raw items; a string is one user message."""
    raw = fields.pop("input", None)
    if raw is None:
        if "previous_response_id" in fields:
            return ()
        raise missing("input")
    text = bytes(raw)
    if text.startswith(b'"'):
        return (b'{"role":"user","content":' + text + b"}",)
    return split_array(raw, "input")


def _with_added_tools(
    tools: ToolList, added: Sequence[tuple[bytes, str]], memo: ToolMemo
) -> ToolList:
    """Return `tools` and the tools of `additional_tools` items (Codex's code mode)."""
    for item, path in added:
        listed = split_object(item).get("tools")
        if listed is not None:
            tools = tools.plus(memo.read(bytes(listed), path))
    return tools


def _read_schema(form: JSON) -> JSON | None:
    match text_at(form, "type", "text.format"):
        case "json_schema":
            return object_at(form, "schema", "text.format") or {}
        case "json_object":
            return {}
        case _:
            return None


_ECHOED: dict[str, Any] = {
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_p": None,
    "truncation": "disabled",
}
"""Request fields that a response repeats, each with its default."""


def _dress(
    head: JSON, fields: dict[str, msgspec.Raw], tools: ToolList, reasoning: JSON, *, compacts: bool
) -> Dress:
    include = texts_at(head, "include", "")
    summary = text_at(reasoning, "summary", "reasoning")
    older = text_at(reasoning, "generate_summary", "reasoning")
    echo: JSON = {
        key: without_space(fields[key]) if head.get(key) is not None else default
        for key, default in _ECHOED.items()
    }
    echo["reasoning"] = {"effort": reasoning.get("effort"), "summary": summary}
    return Dress(
        freeform=tools.freeform,
        wire=tools.wire,
        summary=(summary or older) not in (None, "none"),
        encrypted="reasoning.encrypted_content" in include,
        compacts=compacts,
        echo=echo,
    )


# ---- items


COMPACTION_PROMPT = (
    "Summarise this conversation so that another assistant can go on with the work from your "
    "summary alone: the user's aims and wishes, what was done and found out, which files and "
    "commands matter, what is left to do. Answer with the summary only."
)
"""Instruction for the model where a client leaves the wording to the provider."""

_ENVELOPE = ("type", "id", "call_id", "output")
"""Keys of a result item that say what it is, not what came out."""

_HOSTED = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
    | {"mcp_call", "mcp_list_tools", "mcp_approval_request", "program", "program_output"}
)
"""Items of tools that the provider ran; the model is shown them as text."""

_SEARCH = frozenset({"tool_search_call", "tool_search_output"})
"""Items of a tool search; without a `call_id` the provider ran it."""

_SUMMARY = "A summary of the conversation so far:\n\n"

_ROLES = {
    "user": Role.USER,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "assistant": Role.ASSISTANT,
}


def read_instructions(value: Any) -> tuple[Message, ...]:
    """Return the message of the field `instructions`: a string, or a list of items."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (Message(Role.SYSTEM, (TextPart(value),)),)
    items = objects_at({"instructions": value}, "instructions", "")
    return tuple(message for item, where in items for message in read_item(item, where))


def join_turn(before: Message, after: Message) -> Message | None:
    """Return two successive assistant messages as one, or `None` where they must stay apart.

    Reasoning begins a turn, so it is not joined to anything but reasoning; text does not follow
    calls or text within one message, because a reply of the gateway has one message item, before
    its calls: Codex keeps the complete items of a reply that broke off, and adds those of the next.
    """
    if before.role is not Role.ASSISTANT or after.role is not Role.ASSISTANT:
        return None
    spoken = bool(before.content or before.tool_calls)
    if spoken and (after.reasoning is not None or after.content):
        return None
    thoughts = [text for text in (before.reasoning, after.reasoning) if text is not None]
    return Message(
        Role.ASSISTANT,
        before.content + after.content,
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=before.tool_calls + after.tool_calls,
        issued_ids=before.issued_ids + after.issued_ids,
        unknown=before.unknown + after.unknown,
    )


def read_item(item: JSON, path: str) -> tuple[Message, ...]:
    """Return the message of one input or output item; none for `additional_tools` or an update."""
    kind = text_at(item, "type", path)
    if kind is None and "role" not in item:
        raise RequestError(
            f"'{path}' has neither 'type' nor 'role'; an input item needs one of them.", param=path
        )
    match kind:
        case None | "message":
            return (_read_message(item, path),)
        case "reasoning":
            return (_read_reasoning(item, path),)
        case "additional_tools" | "configuration_update":
            return ()
        case "compaction_trigger":
            return (Message(Role.USER, (TextPart(COMPACTION_PROMPT),)),)
        case "compaction" | "compaction_summary":
            return (_read_compaction(item, path),)
        case "item_reference":
            identity = name_at(item, "id", path)
            message = f"Item with id '{identity}' not found: items are not kept by reference here."
            raise RequestError(message, status=404, code="not_found", param=path)
        case _:
            return (_read_tool_item(item, kind, path),)


def _read_message(item: JSON, path: str) -> Message:
    role = read_role(item, path, _ROLES)
    content = item.get("content")
    if content is None and role is Role.USER and "content" in item:
        raise wrong(member(path, "content"), "a string or an array of parts", None)
    parts = tuple(read_parts(content, member(path, "content")))
    return Message(role, parts, issued_ids=_ids(item, path) if role is Role.ASSISTANT else ())


def _ids(item: JSON, path: str) -> tuple[str, ...]:
    found = [text_at(item, key, path) for key in ("id", "encrypted_content") if key in item]
    return tuple([value for value in found if value])


def _read_reasoning(item: JSON, path: str) -> Message:
    texts: list[str] = []
    for key in ("content", "summary"):
        texts = [text_at(part, "text", where) or "" for part, where in objects_at(item, key, path)]
        if texts:
            break
    return Message(Role.ASSISTANT, reasoning="\n".join(texts), issued_ids=_ids(item, path))


def _read_compaction(item: JSON, path: str) -> Message:
    summary = summary_in(text_at(item, "encrypted_content", path))
    if summary is None:
        message = f"'{path}' is a compaction item of another provider, whose content cannot be read"
        hint = "send the conversation, or a summary as text."
        raise RequestError(f"{message}: {hint}", param=path)
    return Message(Role.USER, (TextPart(_SUMMARY + summary),), issued_ids=_ids(item, path))


def _read_tool_item(item: JSON, kind: str, path: str) -> Message:
    """Return the message of a call or its result, of functions and what is shown as functions."""
    answers = text_at(item, "call_id", path) or None
    if kind in _HOSTED or (kind in _SEARCH and answers is None):
        return Message(Role.ASSISTANT, (block_text(item),))
    if kind == "mcp_approval_response":
        return Message(Role.USER, (block_text(item),))
    if kind.endswith("_output"):
        answers = answers or (_own(item) if kind == "local_shell_call_output" else None)
        return Message(Role.TOOL, tuple(_read_output(item, kind, path)), tool_call_id=answers)
    call: ToolCall | None
    if kind == "function_call":
        name = qualified_name(text_at(item, "namespace", path), name_at(item, "name", path))
        call = ToolCall(answers, name, arguments_text(item.get("arguments")))
    elif kind == "custom_tool_call":
        name = qualified_name(text_at(item, "namespace", path), name_at(item, "name", path))
        call = ToolCall(answers, name, text_at(item, "input", path) or "", custom=True)
    else:
        call = call_of_item(item, kind, answers or _own(item), path)
    if call is None and kind.endswith("_call") and answers:
        rest = {key: value for key, value in item.items() if key not in {*_ENVELOPE, "status"}}
        call = ToolCall(answers, kind.removesuffix("_call"), arguments_text(rest))
    if call is not None:
        return Message(Role.ASSISTANT, tool_calls=(call,), issued_ids=_ids(item, path))
    role = Role.ASSISTANT if kind.endswith("_call") else Role.USER
    return Message(role, (block_part(item),))


def _own(item: JSON) -> str | None:
    found = item.get("id")
    return found if isinstance(found, str) else None


def _read_output(item: JSON, kind: str, path: str) -> Iterator[Part]:
    """Yield a call's output: its content, or an object as JSON; without output, the rest."""
    output = item.get("output")
    if kind == "tool_search_output":
        output = {"tools": item.get("tools")}
    if output is None and kind not in ("function_call_output", "custom_tool_call_output"):
        output = {key: value for key, value in item.items() if key not in _ENVELOPE}
    shot = output.get("image_url") if isinstance(output, dict) else None
    if (
        isinstance(shot, str)
        and isinstance(output, dict)
        and "screenshot" in str(output.get("type"))
    ):
        yield url_part(shot, "image/*")
    elif isinstance(output, dict) or (kind == "shell_call_output" and isinstance(output, list)):
        yield TextPart(encode(output).decode())
    else:
        yield from read_parts(output, member(path, "output"))


def read_parts(value: Any, path: str) -> Iterator[Part]:
    """Yield the parts of an item's content: a string or a list of parts; empty text gives
    no part.
    """
    for item, where in contents(value, path):
        if not isinstance(item, str):
            yield from _read_part(an_object(item, where), where)
        elif item:
            yield TextPart(item)


def _read_part(part: JSON, path: str) -> Iterator[Part]:
    match text_at(part, "type", path):
        case "input_text" | "output_text" | "text" | "summary_text" | "refusal" as kind:
            key = "refusal" if kind == "refusal" else "text"
            if text := text_at(part, key, path):
                yield TextPart(text)
        case "input_image" if part.get("image_url") is not None:
            yield url_part(name_at(part, "image_url", path), "image/*")
        case "input_file" if part.get("file_data") is not None:
            yield url_part(name_at(part, "file_data", path), "application/octet-stream")
        case "input_file" if part.get("file_url") is not None:
            yield url_part(name_at(part, "file_url", path), "application/octet-stream")
        case "input_audio" if (audio := object_at(part, "input_audio", path)) is not None:
            where = member(path, "input_audio")
            form = text_at(audio, "format", where) or "*"
            yield data_part(f"audio/{form}", name_at(audio, "data", where))
        case _:
            yield block_part(part)


FORMAT = OpenAIResponses()
