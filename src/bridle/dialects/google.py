"""Google generateContent: requests in, replies out, in camelCase and snake_case as they come.

The model and streaming are in the path, with or without a version before `/models/`. Thoughts are
shown only where `includeThoughts` asks for them. A function response is a tool message; the model
is shown its `output` (or `result`) where that is a text and the only member, as the API defines,
else the whole object as JSON. Replies are written in `google_write`.

The provider publishes no schemas of its computer use, whose actions the client runs: names and
arguments are those that Google's own clients run (google-gemini/computer-use-preview, ADK).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote

from bridle.dialects.base import (
    AssistantTurn,
    ReplyHead,
    Route,
    RouteKind,
    StreamEncoder,
    WireFormat,
    models_route,
    tidy,
    user_messages,
)
from bridle.dialects.fields import (
    camel,
    ignored_fields,
    members,
    note_unknown_value,
    read_sampling,
    table,
)
from bridle.dialects.google_write import ContentStream, content_json, error_response
from bridle.dialects.ids import standard_base64
from bridle.dialects.json_reader import (
    SpanMemo,
    an_object,
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
    ToolMemo,
    check_choice,
    object_schema,
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

_SALT = b"google:"
_FIELDS = table(
    used="model systemInstruction toolConfig generationConfig",
    harmless="safetySettings labels store serviceTier",
    refused="cachedContent",
)
CONFIG_FIELDS = table(
    used="temperature topP topK maxOutputTokens stopSequences seed presencePenalty "
    "frequencyPenalty responseMimeType responseSchema responseJsonSchema candidateCount "
    "thinkingConfig",
    harmless="serviceTier",
    unenforced="responseModalities responseLogprobs logprobs mediaResolution speechConfig "
    "imageConfig audioTimestamp enableEnhancedCivicAnswers routingConfig modelSelectionConfig "
    "generationOutputConfig responseFormat audioTranscriptionConfig enableAffectiveDialog "
    "translationConfig",
)
_MEMBERS = members(
    "",
    message="role parts",
    parts="text thought thoughtSignature inlineData fileData functionCall functionResponse",
    inlineData="mimeType data displayName",
    fileData="mimeType fileUri displayName",
    functionCall="id name args",
    functionResponse="id name response parts",
)
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
    fields = _FIELDS
    members = _MEMBERS
    messages_field = "contents"

    def __init__(self) -> None:
        super().__init__(read_tools, read_content)
        self._older_tools = ToolMemo(partial(read_tools, older=True))

    def route(self, method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
        """Return the route of a request: `POST .../models/NAME:METHOD`, or the model list.

        `None` = not of Google's API.
        """
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
        key = (_SALT, head_bytes, tools_span, route.model, route.sse)
        system, members = read_head(
            memo, key, lambda: self._read_head(head_bytes, tools_span, route)
        )
        messages, digests, lengths = read_spans(spans, memo, _SALT, "contents", self._read)
        return ModelRequest(
            messages=(*system, *messages),
            stream=route.stream or False,
            message_spans=spans,
            span_digests=digests,
            span_lengths=lengths,
            **members,
        )

    def read_new(self, spans: Sequence[bytes]) -> list[Message] | None:
        """Return the messages of further contents; `None` = only `parse` can read them.

        The first repeats a reply. One that was streamed may come back with a part for each piece;
        as it was kept it has at most two texts, reasoning and answer.
        """
        return None if spans[0].count(b'"text"') > 2 else super().read_new(spans)

    def _read_head(
        self, head_bytes: bytes, tools_span: bytes | None, route: Route
    ) -> tuple[Sequence[Message], JSON]:
        """Return the system message, and the members of a `ModelRequest` beside the messages."""
        head = camel(an_object(decode(head_bytes, ""), ""))
        model = route.model or name_at(head, "model", "")
        known = self._older_tools if speaks_older(model) else self._tools
        tools = ToolList() if tools_span is None else known.read(tools_span, "tools")
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
                "sse": route.sse,
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
    ineffective = ignored_fields(head, _FIELDS)
    for kind, names in ignored_fields(config, CONFIG_FIELDS, "generationConfig.").items():
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
            if len(names) == 1:
                return check_choice(names[0], tools, f"{path}.allowedFunctionNames")
            return check_choice("required", tools, f"{path}.mode")
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            return "auto"
        case _:
            raise RequestError(
                f"{path}.mode: unknown {mode!r}; known: AUTO, ANY, VALIDATED, NONE",
                param=f"{path}.mode",
            )


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


def read_tools(value: object, path: str, *, older: bool = False) -> ToolList:
    """Parse the field `tools`: an array of objects with function declarations, or one such object.

    With `older`, computer use has the actions of Gemini before 3.5.
    """
    specs: list[ToolSpec] = []
    predefined: list[ToolSpec] = []
    removed: list[str] = []
    for tool, where in objects([value] if isinstance(value, dict) else value, path):
        fields = camel(tool)
        for declared, place in objects_at(fields, "functionDeclarations", where):
            specs.append(_read_function(camel(declared), place))
        computer = object_at(fields, "computerUse", where)
        if computer is not None:
            own = computer_use(computer, f"{where}.computerUse", older=older)
            predefined += own
            removed += [] if own else ["computerUse"]
        known = ("functionDeclarations", "computerUse")
        removed += [key for key, given in fields.items() if key not in known and given is not None]
    named = {spec.name for spec in specs}
    shown = (*(spec for spec in predefined if spec.name not in named), *specs)
    return ToolList(shown, removed=provider_run(removed))


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

_ROLES = {"user": Role.USER, "function": Role.USER, "tool": Role.USER, "model": Role.ASSISTANT}


def plain_schema(value: JSON) -> JSON:
    """Return a Google schema as JSON schema, whose type names are in lower case."""
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
    """Return the message of the field `systemInstruction`: a content object, or a bare text."""
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
    """Return the messages of one content object: several where it has function responses."""
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


# ---- computer use


_OLDER_MODELS = ("gemini-1.", "gemini-2.", "gemini-3-flash-preview", "gemini-3.1-pro-preview")

_TEXT: JSON = {"type": "string"}
_ACROSS: JSON = {"type": "integer", "description": "0 (left) to 999 (right) of the screen."}
_DOWN: JSON = {"type": "integer", "description": "0 (top) to 999 (bottom) of the screen."}
_ARGUMENTS: dict[str, JSON] = {
    "x": _ACROSS,
    "y": _DOWN,
    "destination_x": _ACROSS,
    "destination_y": _DOWN,
    "direction": {**_TEXT, "enum": ["up", "down", "left", "right"]},
    "magnitude": {"type": "integer", "description": "How far, 1 to 999."},
    "text": _TEXT,
    "press_enter": {"type": "boolean"},
    "clear_before_typing": {"type": "boolean"},
    "key": {**_TEXT, "description": "The name of one key."},
    "keys": {"type": "array", "items": _TEXT, "description": "Names of the keys."},
    "keys+": {**_TEXT, "description": 'Names of keys, such as "control+c".'},
    "seconds": {"type": "integer"},
    "url": _TEXT,
}
"""Schemas by name; `keys+` is the older form of `keys`."""

_Actions = tuple[tuple[str, str, str], ...]
_ALWAYS: _Actions = (
    ("navigate", "url", "Opens a URL."),
    ("go_back", "", "Goes back to the page before."),
    ("go_forward", "", "Goes forward in the history."),
    ("drag_and_drop", "x y destination_x destination_y", "Drags from a point to another."),
)
_OLDER: _Actions = (
    ("open_web_browser", "", "Opens the web browser."),
    ("wait_5_seconds", "", "Waits for the page to finish."),
    ("search", "", "Opens a search engine."),
    ("click_at", "x y", "Clicks at a point."),
    ("hover_at", "x y", "Moves the mouse to a point."),
    ("type_text_at", "x y text press_enter? clear_before_typing?", "Types text at a point."),
    ("key_combination", "keys+", "Presses keys together."),
    ("scroll_document", "direction", "Scrolls the page."),
    ("scroll_at", "x y direction magnitude?", "Scrolls at a point."),
)
_NEWER: _Actions = (
    ("click", "x y", "Clicks at a point."),
    ("double_click", "x y", "Clicks twice at a point."),
    ("triple_click", "x y", "Clicks three times at a point."),
    ("middle_click", "x y", "Clicks the middle button at a point."),
    ("right_click", "x y", "Clicks the right button at a point."),
    ("mouse_down", "x y", "Presses the mouse button at a point and holds it."),
    ("mouse_up", "x y", "Releases the mouse button at a point."),
    ("move", "x y", "Moves the mouse to a point."),
    ("type", "text press_enter?", "Types text where the focus is."),
    ("press_key", "key", "Presses a key."),
    ("key_down", "key", "Presses a key and holds it."),
    ("key_up", "key", "Releases a key."),
    ("hotkey", "keys", "Presses keys together."),
    ("scroll", "x y direction magnitude?", "Scrolls at a point."),
    ("wait", "seconds", "Waits."),
    ("take_screenshot", "", "Returns the screen as it is."),
)
"""Names, arguments (`?` = optional) and descriptions of the actions."""


def speaks_older(model: str) -> bool:
    """Return whether clients of this model run the computer-use actions of Gemini before 3.5."""
    return model.rpartition("/")[2].startswith(_OLDER_MODELS)


def computer_use(given: JSON, path: str, *, older: bool) -> tuple[ToolSpec, ...]:
    """Return the functions of the tool `computerUse`; none for mobile devices (not published).

    With `older`, they are the actions of Gemini before 3.5.
    """
    fields = camel(given)
    if text_at(fields, "environment", path) == "ENVIRONMENT_MOBILE":
        return ()
    excluded = texts_at(fields, "excludedPredefinedFunctions", path)
    actions = (*(_OLDER if older else _NEWER), *_ALWAYS)
    return tuple(_predefined(*action) for action in actions if action[0] not in excluded)


def _predefined(name: str, arguments: str, description: str) -> ToolSpec:
    words = arguments.split()
    plain = {word: word.rstrip("+?") for word in words}
    properties = {plain[word]: _ARGUMENTS[word.rstrip("?")] for word in words}
    required = [plain[word] for word in words if not word.endswith("?")]
    return ToolSpec(name, description, object_schema(properties, required))


FORMAT = Google()
