"""OpenAI Chat Completions: requests in, replies out, also as its many clients really speak it.

Reading is as tolerant as fifteen recorded harnesses (November 2026) need: content may be a string,
parts, null or missing; system may be `developer`; reasoning comes back as `reasoning_content` or
`reasoning`; tools and calls may have their older function form. Replies are written in
`openai_chat_write`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from bridle.dialects.base import (
    ReplyHead,
    Route,
    RouteKind,
    StreamEncoder,
    WireFormat,
    caller,
    models_route,
    tidy,
)
from bridle.dialects.fields import (
    FORMATS,
    Use,
    ignored_fields,
    members,
    note_unknown_value,
    read_sampling,
    table,
)
from bridle.dialects.history import RequestHistory
from bridle.dialects.json_reader import (
    SpanMemo,
    an_object,
    arguments_text,
    contents,
    decode,
    encode,
    first_of,
    flag_at,
    member,
    name_at,
    number_at,
    object_at,
    objects,
    objects_at,
    read_head,
    read_spans,
    split_body,
    split_field,
    text_at,
    wholes_at,
    wrong,
)
from bridle.dialects.media import block_part, data_part, url_part
from bridle.dialects.openai_chat_write import (
    ChatStream,
    chat_error_message,
    error_response,
    finish_reason,
    logprobs_json,
    models_json,
    tool_call_json,
    usage_json,
)
from bridle.dialects.tools import (
    ToolList,
    check_choice,
    freeform_spec,
    function_spec,
    provider_run,
    tools_sent,
)
from bridle.errors import RequestError
from bridle.types import (
    JSON,
    Dialect,
    Message,
    ModelRequest,
    Part,
    Reply,
    Role,
    Sampling,
    TextPart,
    ToolCall,
    ToolSpec,
    Usage,
)


class _Text(msgspec.Struct):
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: None = None
    tool_calls: None = None
    function_call: None = None


class _Choice(msgspec.Struct):
    message: _Text


class _TextOnly(msgspec.Struct):
    """A reply of ours that says text, reasoning, and nothing else."""

    choices: list[_Choice]


_TEXT_ONLY = msgspec.json.Decoder(_TextOnly)

_SALT = b"chat:"
_FIELDS = table(
    used="model functions tool_choice function_call stream stream_options max_tokens "
    "max_completion_tokens temperature top_p top_k min_tokens stop stop_token_ids seed "
    "presence_penalty frequency_penalty response_format reasoning_effort enable_thinking "
    "chat_template_kwargs thinking reasoning logprobs n best_of parallel_tool_calls logit_bias "
    "min_p repetition_penalty",
    harmless="store metadata user prompt_cache_key prompt_cache_options prompt_cache_retention "
    "safety_identifier service_tier prediction moderation include_reasoning usage provider "
    "models route session_id trace cache_prompt request_id priority tool_stream "
    "separate_reasoning skip_special_tokens spaces_between_special_tokens",
    unenforced="length_penalty typical_p top_a verbosity "
    "modalities audio web_search_options top_logprobs ignore_eos bad_words allowed_token_ids "
    "guided_json guided_regex guided_choice guided_grammar structured_outputs transforms "
    "plugins thinking_budget reasoning_split truncate_prompt_tokens",
    refused="documents conversation previous_response_id mcp_servers",
)
_MEMBERS = members(
    "type cache_control prompt_cache_breakpoint",
    message="role content name tool_calls tool_call_id function_call refusal audio "
    "reasoning_content reasoning annotations provider_specific_fields",
    text="text annotations",
    image_url="image_url url detail",
    input_audio="input_audio data format",
    file="file file_data file_id filename",
    refusal="refusal",
    thinking="thinking text signature",
    reasoning="reasoning text signature",
    function="id index function name arguments",
    custom="id index custom name input",
    function_call="name arguments",
)
_SAMPLING = {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"),
    )
}
_UNSUPPORTED = (
    *("embeddings", "completions", "moderations", "batches", "files", "images", "audio"),
    *("fine_tuning", "tokenize", "uploads", "vector_stores", "assistants", "threads", "evals"),
    *("containers", "conversations", "realtime", "videos", "chatkit", "rerank", "score"),
)
_CALLING = frozenset({"tool_calls", "function_call"})
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}


class OpenAIChat(WireFormat):
    """Chat Completions."""

    dialect = Dialect.OPENAI_CHAT
    fields = _FIELDS
    members = _MEMBERS

    def __init__(self) -> None:
        super().__init__(read_tools, read_message)

    def route(self, method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
        """Return the route of a request: `POST .../chat/completions`, the model list, unsupported
        paths.

        `None` = not of OpenAI's API.
        """
        del query
        words = tidy(path)
        if method == "POST" and words.endswith("/chat/completions"):
            return Route(self.dialect, RouteKind.GENERATE)
        if (models := models_route(self.dialect, method, path, headers)) is not None:
            return models
        if caller(path, headers) is not self.dialect:
            return None
        for word in _UNSUPPORTED:
            if words.endswith(f"/{word}") or f"/v1/{word}/" in words:
                return Route(self.dialect, RouteKind.UNSUPPORTED, resource=word)
        return None

    def _parse(self, route: Route, body: bytes, memo: SpanMemo) -> ModelRequest:
        del route  # its only generating route
        fields, spans = split_body(body, "messages", memo, _SALT)
        if spans is None:
            spans = split_field(fields, "messages")
        if not spans:
            message = "Invalid 'messages': empty array. Expected at least one message."
            raise RequestError(message, param="messages")
        same = memo.same if isinstance(memo, RequestHistory) else None
        head = None if same is None else same.head
        if head is None:
            head = self._head(fields, memo)
            if same is not None:
                same.head = head
        messages, digests, lengths = read_spans(
            spans, memo, _SALT, "messages", self._read, read_usual
        )
        return ModelRequest(
            messages=tuple(messages),
            message_spans=spans,
            span_digests=digests,
            span_lengths=lengths,
            **head,
        )

    def _head(self, fields: dict[str, msgspec.Raw], memo: SpanMemo) -> JSON:
        """Return the members of a `ModelRequest` that its messages do not decide."""
        legacy = "functions" if "tools" not in fields and "functions" in fields else "tools"
        tools_span = tools_sent(fields.pop(legacy, None))
        head_bytes = encode(fields)
        return read_head(
            memo,
            (_SALT, head_bytes, legacy, tools_span),
            lambda: self._read_head(head_bytes, legacy, tools_span),
        )

    def _read_head(self, head_bytes: bytes, legacy: str, tools_span: bytes | None) -> JSON:
        head = an_object(decode(head_bytes, ""), "")
        _refuse_many(head)
        options = object_at(head, "stream_options", "") or {}
        tools = ToolList() if tools_span is None else self._tools.read(tools_span, legacy)
        return {
            "dialect": self.dialect,
            "model": name_at(head, "model", ""),
            "tools": tools.specs,
            "sampling": read_options(head),
            "stream": flag_at(head, "stream", "") or False,
            "tool_choice": read_choice(head, tools),
            "response_schema": read_schema(head),
            "thinking": read_thinking(head),
            "reasoning_effort": text_at(head, "reasoning_effort", ""),
            "parallel_tool_calls": flag_at(head, "parallel_tool_calls", ""),
            "head": head_bytes,
            "tools_span": tools_span,
            "logprobs": flag_at(head, "logprobs", "") or False,
            "include_usage": flag_at(options, "include_usage", "stream_options") or False,
            "extra": {
                "freeform": tools.freeform,
                "removed": dict(tools.removed),
                **_ineffective(head, self.fields),
            },
        }

    def read_new(self, spans: Sequence[bytes]) -> list[Message] | None:
        """Return the messages of further raw messages; `None` = one of them has an unusual form."""
        found: list[Message] = []
        for span in spans:
            if (message := read_usual(span)) is None:
                return None
            found += (message,)
        return found

    def reply_json(
        self, request: ModelRequest, head: ReplyHead, reply: Reply, usage: Usage
    ) -> bytes:
        message: JSON = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            freeform = request.extra.get("freeform", ())
            message["content"] = reply.content or None
            message["tool_calls"] = [tool_call_json(call, freeform) for call in reply.tool_calls]
        sampled = reply.token_logprobs
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None if sampled is None else logprobs_json(sampled),
            "finish_reason": finish_reason(reply),
        }
        return encode(
            {
                "id": f"chatcmpl-{head.reply_id}",
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "choices": [choice],
                "usage": usage_json(usage),
            }
        )

    def reply_messages(self, reply_json: bytes) -> tuple[Message, ...]:
        try:
            (choice,) = _TEXT_ONLY.decode(reply_json).choices
        except (msgspec.MsgspecError, ValueError):  # calls, or a completion's text
            return self._read_reply(reply_json)
        text, thoughts = choice.message.content, choice.message.reasoning_content
        content = (TextPart(text),) if text else ()
        return (Message(Role.ASSISTANT, content, reasoning=thoughts or None),)

    def _read_reply(self, reply_json: bytes) -> tuple[Message, ...]:
        choices = objects(decode(reply_json, "reply")["choices"], "choices")
        return tuple(
            message
            for choice, path in choices
            for message in read_message(_said(choice, path), path)
        )

    def stream(self, request: ModelRequest, head: ReplyHead) -> StreamEncoder:
        freeform = request.extra.get("freeform", ())
        return ChatStream(head, include_usage=request.include_usage, freeform=freeform)

    def error(self, error: RequestError) -> tuple[int, dict[str, str], bytes]:
        return error_response(error, chat_error_message(error))

    def models(self, route: Route, names: Sequence[str], context_length: int) -> bytes:
        return models_json(route, names, context_length)

    def token_count(self, count: int) -> bytes:
        """Return a token count as vLLM's `/tokenize` does: Chat Completions has no such route."""
        return encode({"count": count})


def _said(choice: JSON, path: str) -> JSON:
    """Return the message of a choice; a completion's is its text."""
    if "message" not in choice:
        return {"role": "assistant", "content": choice.get("text")}
    return an_object(choice["message"], path)


def _refuse_many(head: JSON) -> None:
    for key in ("n", "best_of"):
        value = head.get(key)
        if value is not None and (value != 1 or isinstance(value, bool)):
            raise RequestError(
                f"The gateway samples only one choice: '{key}' must be 1.", param=key
            )


def _ineffective(head: JSON, uses: Mapping[str, Use]) -> JSON:
    """Return the fields of the head that have no effect, and an unknown `response_format`."""
    ineffective = ignored_fields(head, uses)
    form = object_at(head, "response_format", "") or {}
    note_unknown_value(form.get("type"), FORMATS, "response_format", ineffective)
    return ineffective


# ---- messages


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: str


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Function
    type: Literal["function"]


class _Usual(msgspec.Struct, forbid_unknown_fields=True):
    """A message as most clients send it; null and a missing field are one."""

    role: Literal["user", "assistant", "tool", "system", "developer"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Called] | None = None
    tool_call_id: str | None = None
    refusal: None = None


_USUAL = msgspec.json.Decoder(_Usual)


def read_usual(span: bytes) -> Message | None:
    """Parse a raw message of the usual form, faster than `read_message`; `None` = another form."""
    try:
        usual = _USUAL.decode(span)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    text, calls, role = usual.content, usual.tool_calls, _ROLES[usual.role]
    content = (TextPart(text),) if text else ()
    if role is Role.ASSISTANT:
        called = [
            ToolCall(one.id, one.function.name, one.function.arguments) for one in calls or ()
        ]
        return Message(role, content, usual.reasoning_content or None, tuple(called))
    if calls is not None or usual.reasoning_content is not None:
        return None
    if role is Role.TOOL:
        return Message(role, content, tool_call_id=usual.tool_call_id)
    return None if text is None else Message(role, content)


def read_role(value: JSON, path: str, roles: Mapping[str, Role]) -> Role:
    """Return the role of a message; `roles` maps the wire's names to roles."""
    name = name_at(value, "role", path)
    if name not in roles:
        known = ", ".join(f"'{known}'" for known in roles)
        message = f"Invalid value: '{name}'. Supported values are: {known}."
        raise RequestError(message, param=member(path, "role"))
    return roles[name]


def read_message(value: JSON, path: str) -> tuple[Message, ...]:
    """Return one wire message of Chat Completions as an internal message."""
    role = read_role(value, path, _ROLES)
    thoughts: list[str] = []
    given = value.get("content")
    if given is None and role is Role.USER and "content" in value:
        raise wrong(member(path, "content"), "a string or an array of parts", None)
    if type(given) is str:  # most messages
        content: tuple[Part, ...] = (TextPart(given),) if given else ()
    else:
        content = tuple(read_content(given, member(path, "content"), thoughts))
    if role is Role.ASSISTANT:
        return (_read_assistant(value, path, content, thoughts),)
    if role is Role.TOOL:
        call_id = text_at(value, "tool_call_id", path)
        return (Message(role, content, tool_call_id=call_id, name=text_at(value, "name", path)),)
    if "name" in value and (speaker := text_at(value, "name", path)) and role is Role.USER:
        content = (TextPart(f"{speaker}: "), *content)
    return (Message(role, content),)


def _read_assistant(
    value: JSON, path: str, content: tuple[Part, ...], thoughts: list[str]
) -> Message:
    refusal = text_at(value, "refusal", path)
    if refusal and not content:
        content = (TextPart(refusal),)
    if value.get("audio") is not None:
        message = f"'{path}.audio' names audio that the provider keeps: send its text as content."
        raise RequestError(message, param=f"{path}.audio")
    key = "reasoning_content" if value.get("reasoning_content") is not None else "reasoning"
    # `reasoning` is an object with some gateways; it is evidence only, so it may be anything.
    reasoning = value.get(key) if isinstance(value.get(key), str) else None
    return Message(
        Role.ASSISTANT,
        content,
        reasoning=reasoning or "".join(thoughts) or None,
        tool_calls=tuple(_read_calls(value, path)) if value.keys() & _CALLING else (),
    )


def _read_calls(value: JSON, path: str) -> Iterator[ToolCall]:
    for call, where in objects_at(value, "tool_calls", path):
        custom = object_at(call, "custom", where)
        if custom is not None:
            inner, key, inside = custom, "input", member(where, "custom")
        else:
            inner = object_at(call, "function", where) or {}
            key, inside = "arguments", member(where, "function")
        yield ToolCall(
            text_at(call, "id", where),
            name_at(inner, "name", inside),
            arguments_text(inner.get(key)),
            custom=custom is not None,
        )
    older = object_at(value, "function_call", path)
    if older is not None:
        where = member(path, "function_call")
        yield ToolCall(None, name_at(older, "name", where), arguments_text(older.get("arguments")))


def read_content(value: Any, path: str, thoughts: list[str]) -> Iterator[Part]:
    """Yield the parts of a message's content: a string, a list of parts, or nothing.

    Empty text is no part. Text of reasoning parts goes to `thoughts`.
    """
    for item, where in contents(value, path):
        yield from _read_part(item, where, thoughts)


def _read_part(value: Any, path: str, thoughts: list[str]) -> Iterator[Part]:
    if isinstance(value, str):
        yield from (TextPart(value),) if value else ()
        return
    part = an_object(value, path)
    match text_at(part, "type", path):
        case "text" | "input_text" | "output_text" | None if "text" in part:
            yield from _some_text(text_at(part, "text", path))
        case "refusal":
            yield from _some_text(text_at(part, "refusal", path))
        case "thinking" | "reasoning" as kind:
            thoughts.append(text_at(part, kind, path) or text_at(part, "text", path) or "")
        case "image_url" if part.get("image_url") is not None:
            image = part["image_url"]
            where = member(path, "image_url")
            url = (
                image if isinstance(image, str) else name_at(an_object(image, where), "url", where)
            )
            yield url_part(url, "image/*")
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            audio, where = part["input_audio"], member(path, "input_audio")
            form = text_at(audio, "format", where) or "*"
            yield data_part(f"audio/{form}", name_at(audio, "data", where))
        case "file" if isinstance(part.get("file"), dict) and part["file"].get("file_data"):
            where = member(path, "file")
            yield url_part(name_at(part["file"], "file_data", where), "application/octet-stream")
        case _:
            yield block_part(part)


def _some_text(text: str | None) -> Iterator[Part]:
    if text:
        yield TextPart(text)


# ---- tools


def read_tools(value: object, path: str) -> ToolList:
    """Parse the field `tools`, or the older `functions`."""
    specs: list[ToolSpec] = []
    freeform: set[str] = set()
    removed: list[str] = []
    for tool, where in objects(value, path):
        kind = text_at(tool, "type", where)
        custom = object_at(tool, "custom", where) if kind == "custom" else None
        if custom is not None:
            specs.append(freeform_spec(custom, member(where, "custom")))
            freeform.add(specs[-1].name)
        elif kind in ("function", None):
            inner = object_at(tool, "function", where)
            inside = where if inner is None else member(where, "function")
            function = tool if inner is None else inner
            schema = object_at(function, "parameters", inside)
            specs.append(function_spec(function, inside, schema))
        else:
            removed.append(kind)
    return ToolList(tuple(specs), frozenset(freeform), removed=provider_run(removed))


# ---- options


def read_options(head: JSON) -> Sampling:
    """Return the request's sampling parameters, with vLLM's additions (`top_k`,
    `min_tokens`...).
    """
    budget = first_of(head, ("max_completion_tokens", "max_tokens"))
    return read_sampling(
        head,
        {**_SAMPLING, "max_tokens": budget},
        stop_token_ids=wholes_at(head, "stop_token_ids", ""),
        logit_bias=_read_bias(head),
    )


def _read_bias(head: JSON) -> dict[str, float] | None:
    """Return `logit_bias` of at least one token; `None` = none."""
    given = object_at(head, "logit_bias", "") or {}
    found: dict[str, float] = {}
    for token in given:
        if not (token.isascii() and token.isdecimal()):
            raise wrong("logit_bias", "an object from token ids to numbers", given)
        bias = number_at(given, token, "logit_bias", least=-100, most=100)
        found |= {} if bias is None else {token: bias}
    return found or None


def read_choice(head: JSON, tools: ToolList) -> str:
    """Return the request's `tool_choice`, or the older `function_call`; of a list of tools its
    mode.
    """
    key = first_of(head, ("tool_choice", "function_call"))
    key = "tool_choice" if head.get(key) is None else key
    asked = head.get(key)
    match asked:
        case None:
            return "auto"
        case "auto" | "none" | "required" as mode:
            return check_choice(mode, tools, key)
        case "any":
            return check_choice("required", tools, key)
        case dict():
            return check_choice(_chosen(asked, key), tools, key)
        case str():
            raise RequestError(
                f"Invalid value for '{key}': {asked!r}. Supported values are: 'none', 'auto' and "
                "'required'.",
                param=key,
            )
        case _:
            raise wrong(key, "a string or an object", asked)


def _chosen(choice: JSON, key: str) -> str:
    match text_at(choice, "type", key):
        case "allowed_tools":
            inner = object_at(choice, "allowed_tools", key) or choice
            return text_at(inner, "mode", key) or "auto"
        case "function" | "custom" as kind:
            if (named := choice.get(kind)) is None:
                return name_at(choice, "name", key)
            return name_at(an_object(named, f"{key}.{kind}"), "name", f"{key}.{kind}")
        case kind:
            # A hosted tool cannot be chosen: it was dropped, or there is none.
            return text_at(choice, "name", key) or (
                "auto" if kind else name_at(choice, "type", key)
            )


def read_schema(head: JSON) -> JSON | None:
    """Return the JSON schema of `response_format`; `{}` for any object, `None` for free text."""
    form = object_at(head, "response_format", "")
    if form is None:
        return None
    match text_at(form, "type", "response_format"):
        case "json_schema":
            inside = object_at(form, "json_schema", "response_format") or {}
            return object_at(inside, "schema", "response_format.json_schema") or {}
        case "json_object":
            return {}
        case _:
            return None


def read_thinking(head: JSON) -> bool | None:
    """Return whether the request turns thinking on, in any form that servers of open models use.

    `None` = it does not say.
    """
    kwargs = object_at(head, "chat_template_kwargs", "") or {}
    for found in (
        flag_at(kwargs, "enable_thinking", "chat_template_kwargs"),
        flag_at(kwargs, "thinking", "chat_template_kwargs"),
        flag_at(head, "enable_thinking", ""),
    ):
        if found is not None:
            return found
    for key in ("thinking", "reasoning"):
        switch = head.get(key)
        if isinstance(switch, dict) and switch.get("type") in ("enabled", "disabled"):
            return bool(switch["type"] == "enabled")
        if isinstance(switch, dict) and isinstance(switch.get("enabled"), bool):
            return bool(switch["enabled"])
    return False if text_at(head, "reasoning_effort", "") == "none" else None


FORMAT = OpenAIChat()
