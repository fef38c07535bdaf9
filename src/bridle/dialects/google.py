"""Google generateContent: requests in, replies out, in camelCase and snake_case as they come.

The model and streaming are in the path, with or without a version before `/models/`. Thoughts are
shown only where `includeThoughts` asks for them. A function response is a tool message; the model
is shown its `output` (or `result`) where that is a text and the only member, as the API defines,
else the whole object as JSON.

Every call of a reply has an id and a signature of ours; a reply without calls has its signature on
the last text part, as the provider's newer models do. Statuses are those of Google's API error
model (google.rpc.Code); the time to wait is in a `RetryInfo` detail, which Gemini CLI reads, and in
`Retry-After`.

A stream is partial responses, as SSE or as the items of one JSON array; the last has the finish
reason and the usage. Google's clients fail on comments and on silence: a blank line keeps them
waiting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from bridle.dialects.base import (
    ENGINE_FAILURES,
    AssistantTurn,
    ReplyHead,
    Route,
    RouteKind,
    StreamEncoder,
    WireFormat,
    models_route,
    retry_headers,
    tidy,
    user_messages,
)
from bridle.dialects.fields import ignored_fields, note_unknown_value, read_sampling
from bridle.dialects.ids import call_id, signature, standard_base64
from bridle.dialects.json_reader import (
    SpanMemo,
    an_object,
    arguments_object,
    arguments_text,
    decode,
    encode,
    flag_at,
    member,
    name_at,
    object_at,
    objects,
    objects_at,
    read_head,
    read_spans,
    split_body,
    split_field,
    text_at,
    texts_at,
    whole_at,
    wrong,
)
from bridle.dialects.media import block_part, block_text, data_part, url_part
from bridle.dialects.tools import (
    ToolList,
    check_choice,
    provider_run,
    tools_sent,
)
from bridle.errors import RequestError
from bridle.types import (
    JSON,
    Dialect,
    FinishReason,
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
    one_line,
)

_SALT = b"google:"
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "max_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
_METHODS = {
    "generateContent": RouteKind.GENERATE,
    "streamGenerateContent": RouteKind.GENERATE,
    "countTokens": RouteKind.COUNT_TOKENS,
}


class Google(WireFormat):
    """generateContent and streamGenerateContent."""

    dialect = Dialect.GOOGLE
    messages_field = "contents"

    def __init__(self) -> None:
        super().__init__(read_tools, read_content)

    def route(self, method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
        """Recognise `POST .../models/NAME:METHOD`, and Google's model list."""
        _, found, rest = tidy(path).rpartition("/models/")
        name, colon, verb = rest.rpartition(":")
        if method != "POST" or not found or not colon:
            return models_route(self.dialect, method, path, headers)
        kind = _METHODS.get(verb, RouteKind.UNSUPPORTED)
        streams = verb == "streamGenerateContent"
        return Route(
            self.dialect,
            kind,
            model=unquote(name),
            stream=streams,
            sse=parse_qs(query).get("alt") == ["sse"],
            resource=verb if kind is RouteKind.UNSUPPORTED else None,
        )

    def _parse(self, route: Route, body: bytes, memo: SpanMemo) -> ModelRequest:
        fields, spans = split_body(body, "contents", memo, _SALT)
        inner = fields.get("generateContentRequest") or fields.get("generate_content_request")
        if inner is not None:  # countTokens takes a whole request, too
            fields, spans = split_body(bytes(inner), "contents")
        if spans is None:
            one = bytes(fields.get("contents", b"")).lstrip()
            spans = (one,) if one.startswith(b"{") else split_field(fields, "contents")
        fields.pop("contents", None)
        if not spans:
            message = "* GenerateContentRequest.contents: contents is not specified"
            raise RequestError(message, param="contents")
        tools_span = tools_sent(fields.pop("tools", None))
        head_bytes = encode(fields)
        key = (_SALT, head_bytes, tools_span, route.model)
        system, members = read_head(
            memo, key, lambda: self._read_head(head_bytes, tools_span, route.model)
        )
        messages, digests, lengths = read_spans(spans, memo, _SALT, "contents", self._read)
        extra = {**members["extra"], "sse": route.sse}
        return ModelRequest(
            messages=(*system, *messages),
            stream=route.stream or False,
            message_spans=spans,
            span_digests=digests,
            span_lengths=lengths,
            **{**members, "extra": extra},
        )

    def _read_head(
        self, head_bytes: bytes, tools_span: bytes | None, named: str | None
    ) -> tuple[Sequence[Message], JSON]:
        """Return the system message, and the members of a `ModelRequest` beside the messages."""
        head = camel(an_object(decode(head_bytes, ""), ""))
        model = named or name_at(head, "model", "")
        tools = ToolList() if tools_span is None else self._tools.read(tools_span, "tools")
        system = read_system(head.get("systemInstruction"), "systemInstruction")
        config = camel(object_at(head, "generationConfig", "") or {})
        thinking = camel(object_at(config, "thinkingConfig", "generationConfig") or {})
        where = "generationConfig.thinkingConfig"
        shown = flag_at(thinking, "includeThoughts", where) or False
        level = text_at(thinking, "thinkingLevel", where)
        return system, {
            "dialect": self.dialect,
            "model": model,
            "tools": tools.specs,
            "sampling": _read_sampling(config),
            "tool_choice": _read_choice(head, tools),
            "response_schema": _read_schema(config),
            "thinking": _read_thinking(thinking, where, shown=shown),
            "reasoning_effort": level.lower() if level else None,
            "head": head_bytes,
            "head_messages": len(system),
            "tools_span": tools_span,
            "extra": {
                "removed": dict(tools.removed),
                "thoughts": shown,
                **_ineffective(head, config),
            },
        }

    def reply_json(
        self, request: ModelRequest, head: ReplyHead, reply: Reply, usage: Usage
    ) -> bytes:
        shown = bool(request.extra.get("thoughts"))
        return encode(content_json(head, reply, usage, thoughts=shown))

    def reply_messages(self, reply_json: bytes) -> tuple[Message, ...]:
        candidates = objects(decode(reply_json, "reply")["candidates"], "candidates")
        return tuple(
            message
            for candidate, path in candidates
            for message in read_content(an_object(candidate["content"], path), path)
        )

    def stream(self, request: ModelRequest, head: ReplyHead) -> StreamEncoder:
        return ContentStream(
            head,
            thoughts=bool(request.extra.get("thoughts")),
            sse=bool(request.extra.get("sse", True)),
        )

    def error(self, error: RequestError) -> tuple[int, dict[str, str], bytes]:
        return error_response(error)

    def models(self, route: Route, names: Sequence[str], context_length: int) -> bytes:

        def model(name: str) -> JSON:
            return {
                "name": f"models/{name}",
                "version": "1",
                "displayName": name,
                "inputTokenLimit": context_length,
                "outputTokenLimit": context_length,
                "supportedGenerationMethods": ["generateContent", "countTokens"],
            }

        if route.kind is RouteKind.MODEL:
            return encode(model(route.model or ""))
        return encode({"models": [model(name) for name in names]})

    def token_count(self, count: int) -> bytes:
        return encode({"totalTokens": count})


def _ineffective(head: JSON, config: JSON) -> JSON:
    """Return the fields of the head and the configuration that have no effect."""
    ineffective = ignored_fields(head, Dialect.GOOGLE)
    for kind, names in ignored_fields(config, "generationConfig", "generationConfig.").items():
        ineffective.setdefault(kind, []).extend(names)
    name, known = "responseMimeType", ("text/plain", "application/json")
    note_unknown_value(config.get(name), known, f"generationConfig.{name}", ineffective)
    return ineffective


def _read_sampling(config: JSON) -> Sampling:
    path = "generationConfig"
    if (count := whole_at(config, "candidateCount", path)) not in (None, 1):
        message = f"Only one candidate is sampled, not {count}."
        raise RequestError(message, param=f"{path}.candidateCount")
    return read_sampling(config, _SAMPLING, path)


def _read_choice(head: JSON, tools: ToolList) -> str:
    config = camel(object_at(head, "toolConfig", "") or {})
    calling = camel(object_at(config, "functionCallingConfig", "toolConfig") or {})
    path = "toolConfig.functionCallingConfig"
    mode = (text_at(calling, "mode", path) or "AUTO").upper()
    names = texts_at(calling, "allowedFunctionNames", path)
    match mode:
        case "NONE":
            return "none"
        case "ANY":
            only = names[0] if len(names) == 1 else "required"
            return check_choice(only, tools, f"{path}.allowedFunctionNames")
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            return "auto"
        case _:
            raise RequestError(f"{path}.mode: unknown {mode!r}", param=f"{path}.mode")


def _read_schema(config: JSON) -> JSON | None:
    path = "generationConfig"
    for key in ("responseJsonSchema", "responseSchema"):
        if (schema := object_at(config, key, path)) is not None:
            return plain_schema(schema)
    kind = text_at(config, "responseMimeType", path)
    return {} if kind == "application/json" else None


def _read_thinking(thinking: JSON, path: str, *, shown: bool) -> bool | None:
    budget = whole_at(thinking, "thinkingBudget", path, least=-1)
    if budget == 0:
        return False
    return True if shown or (budget or 0) > 0 else None


# ---- tools


def read_tools(value: object, path: str) -> ToolList:
    """Return `tools`: an array of objects with function declarations, or one such object.

    Raises `RequestError` for `computerUse`, whose actions have no published schemas.
    """
    specs: list[ToolSpec] = []
    removed: list[str] = []
    for tool, where in objects([value] if isinstance(value, dict) else value, path):
        fields = camel(tool)
        for declared, place in objects_at(fields, "functionDeclarations", where):
            specs.append(_read_function(camel(declared), place))
        if fields.get("computerUse") is not None:
            name = f"{where}.computerUse"
            message = f"{name} is not served; declare its actions in functionDeclarations"
            raise RequestError(message, param=name)
        known = "functionDeclarations"
        removed += [key for key, given in fields.items() if key != known and given is not None]
    return ToolList(tuple(specs), removed=provider_run(removed))


def _read_function(value: JSON, path: str) -> ToolSpec:
    schema = object_at(value, "parametersJsonSchema", path)
    if schema is None:
        schema = object_at(value, "parameters", path)
    return ToolSpec(
        name_at(value, "name", path),
        text_at(value, "description", path),
        None if schema is None else plain_schema(schema),
    )


# ---- contents: roles, parts, and keys in either case


_VALUES = ("enum", "default", "example", "const")
"""Schema keys with values, not schemas."""

_HOSTED = frozenset({"executableCode", "codeExecutionResult", "toolCall", "toolResponse"})
"""Parts of what the provider ran; the model is shown them as text."""

_SNAKE = re.compile(r"_([a-z])")
_ROLES = {"user": Role.USER, "function": Role.USER, "tool": Role.USER, "model": Role.ASSISTANT}


def camel(value: JSON) -> JSON:
    """Return the object with its own keys in camelCase; deeper objects are left alone."""
    if "_" not in "".join(value):
        return value
    return {_SNAKE.sub(lambda found: found[1].upper(), key): item for key, item in value.items()}


def plain_schema(value: JSON) -> JSON:
    """Return a Google schema as JSON schema: type names are in lower case."""
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
    """Return the message of `systemInstruction`: a content, or a bare text."""
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
    """Read one content: one message, or several where it has function responses."""
    name = text_at(value, "role", path) or "user"
    role = _ROLES.get(name)
    if role is None:
        message = f"{member(path, 'role')}: unknown role {name!r}; known: user, model"
        raise RequestError(message, param=member(path, "role"))
    if role is Role.ASSISTANT:
        return _read_model(value, path)
    if value.get("parts", ()) is None:
        raise wrong(member(path, "parts"), "an array", None)
    return user_messages(_read_user(value, path))


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
    """Yield text, media, or a block kept as it is."""
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


def _read_user(value: JSON, path: str) -> Iterator[Part | Message]:
    """Yield the parts of user content and the messages of function responses."""
    for part, where in _parts_of(value, path):
        response = object_at(part, "functionResponse", where)
        if response is None:
            yield from _content_part(part, where)
        else:
            yield _read_response(camel(response), member(where, "functionResponse"))


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
    turn = AssistantTurn()
    for part, where in _parts_of(value, path):
        if mark := text_at(part, "thoughtSignature", where):
            turn.ids.append(standard_base64(mark))
        if flag_at(part, "thought", where):
            turn.thoughts.append(text_at(part, "text", where) or "")
        elif (call := object_at(part, "functionCall", where)) is not None:
            turn.calls.append(_read_call(call, member(where, "functionCall")))
        else:
            turn.add(list(_content_part(part, where)))
    return turn.messages()


def _read_call(value: JSON, path: str) -> ToolCall:
    fields = camel(value)
    return ToolCall(
        text_at(fields, "id", path) or None,
        name_at(fields, "name", path),
        arguments_text(fields.get("args")),
    )


# ---- replies and errors, streamed or whole


_ERRORS: dict[str, tuple[int, str]] = {
    "authentication_error": (401, "UNAUTHENTICATED"),
    "permission_error": (403, "PERMISSION_DENIED"),
    "not_found": (404, "NOT_FOUND"),
    "request_too_large": (413, "INVALID_ARGUMENT"),
    "context_length_exceeded": (400, "INVALID_ARGUMENT"),
    "rate_limit": (429, "RESOURCE_EXHAUSTED"),
    "session_busy": (429, "RESOURCE_EXHAUSTED"),
    "budget_exhausted": (403, "PERMISSION_DENIED"),
    "overloaded": (503, "UNAVAILABLE"),
    "paused": (503, "UNAVAILABLE"),
    "engine_error": (500, "INTERNAL"),
    **dict.fromkeys((*ENGINE_FAILURES, "store_error"), (503, "UNAVAILABLE")),
}
"""Our code -> status and name as Google says them. Its clients try every 429 again, so a budget
that is used up is a refusal of permission."""


def content_json(head: ReplyHead, reply: Reply, usage: Usage, *, thoughts: bool) -> JSON:
    parts: list[JSON] = []
    if reply.reasoning and thoughts:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.content:
        parts.append({"text": reply.content, **_unless(reply.tool_calls, sign(head, 0))})
    parts += [call_part(head, index, call) for index, call in enumerate(reply.tool_calls)]
    return response_json(head, parts, finish_reason(reply), usage)


def _unless(calls: Any, mark: JSON) -> JSON:
    return {} if calls else mark


def sign(head: ReplyHead, index: int) -> JSON:
    """Return the signature member of call `index`, or of the text where there is no call."""
    return {"thoughtSignature": signature(head.reply_id, index)}


def call_part(head: ReplyHead, index: int, call: ToolCall) -> JSON:
    """Call `index` of a reply; arguments that are no object are wrapped."""
    function = {
        "id": call_id("call", call.id, head.reply_id, index),
        "name": call.name,
        "args": msgspec.Raw(arguments_object(call.arguments)),
    }
    return {"functionCall": function, **sign(head, index)}


def response_json(
    head: ReplyHead, parts: list[JSON], finish: str | None = None, usage: Usage | None = None
) -> JSON:
    """Return a response, whole or one piece of a stream."""
    candidate: JSON = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    response: JSON = {"candidates": [candidate]}
    if usage is not None:
        response["usageMetadata"] = usage_json(usage)
    return {**response, "modelVersion": head.model, "responseId": head.reply_id}


def finish_reason(reply: Reply) -> str:
    """Google's word for how a reply ended; calls end it like text."""
    return "STOP" if reply.finish_reason is FinishReason.STOP else "MAX_TOKENS"


def usage_json(usage: Usage) -> JSON:
    """Return token counts; thoughts are counted apart from the candidate."""
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    if usage.reasoning_tokens:
        counts["thoughtsTokenCount"] = usage.reasoning_tokens
    return counts


# ---- errors


def error_json(error: RequestError) -> JSON:
    """Return the error object, as a body or as a piece of a stream."""
    status, name = _ERRORS.get(error.code, (error.status, "INVALID_ARGUMENT"))
    details: list[JSON] = []
    if error.param is not None:
        violation = {"field": error.param, "description": str(error)}
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.BadRequest",
                "fieldViolations": [violation],
            }
        )
    if error.retry_after_s is not None:
        kind = "type.googleapis.com/google.rpc.RetryInfo"
        details.append({"@type": kind, "retryDelay": f"{error.retry_after_s:g}s"})
    shown: JSON = {"code": status, "message": _error_message(error), "status": name}
    return {"error": {**shown, "details": details} if details else shown}


def error_response(error: RequestError) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a refused request."""
    shown = error_json(error)
    return shown["error"]["code"], retry_headers(error), encode(shown)


def _error_message(error: RequestError) -> str:
    if error.code != "context_length_exceeded" or error.context_length is None:
        return str(error)
    return (
        f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens "
        f"allowed ({error.context_length})."
    )


class ContentStream(StreamEncoder):
    """One reply as partial responses. Without `sse` they are the items of one JSON array.

    Its calls leave in one response: clients that run tools at each response would otherwise answer
    the first call without the others.
    """

    calls_at_end = True

    def __init__(self, head: ReplyHead, *, thoughts: bool, sse: bool) -> None:
        super().__init__()
        self._head = head
        self._thoughts = thoughts
        self._sse = sse
        self._items = 0

    def open(self) -> bytes:
        return b"" if self._sse else b"["

    def write_reasoning(self, text: str) -> bytes:
        """Return a thought part; nothing for a client that did not ask."""
        return self._piece([{"text": text, "thought": True}]) if self._thoughts else b""

    def write_text(self, text: str) -> bytes:
        return self._piece([{"text": text}])

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        return self.write_calls(index, [ToolCall(call_id, name, arguments)])

    def write_calls(self, first: int, calls: Sequence[ToolCall]) -> bytes:
        parts = [call_part(self._head, index, call) for index, call in enumerate(calls, first)]
        return self._piece(parts) if parts else b""

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Write the finish reason, usage, and the signature where no call had one."""
        signed = reply.content and not reply.tool_calls
        parts = [{"text": "", **(sign(self._head, 0) if signed else {})}]
        last = self._framed(response_json(self._head, parts, finish_reason(reply), usage))
        return b"", last if self._sse else last + b"]"

    def keepalive(self) -> bytes:
        return b"\r\n"

    def error(self, error: RequestError) -> bytes:
        shown = self._framed(error_json(error))
        return shown if self._sse else shown + b"]"

    def _piece(self, parts: list[JSON]) -> bytes:
        return self._framed(response_json(self._head, parts))

    def _framed(self, value: JSON) -> bytes:
        if self._sse:
            return b"data: " + one_line(encode(value)) + b"\r\n\r\n"
        self._items += 1
        return (b"" if self._items == 1 else b",\r\n") + encode(value)
