"""The dialect contract: one class per provider's wire format, which alone knows that format.

A dialect does no I/O: bytes in, values out; values in, bytes out. The gateway finds it by route,
passes it request bodies and writes what it returns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import unquote

from bridle.dialects.fields import Use, watch_members
from bridle.dialects.json_reader import ReadMessages, SpanMemo, an_object, decode, too_deep
from bridle.dialects.tools import ToolList, ToolMemo
from bridle.errors import RequestError
from bridle.types import (
    Dialect,
    Message,
    ModelRequest,
    Part,
    Reply,
    Role,
    ToolCall,
    Usage,
    one_line,
)


def retry_headers(error: RequestError) -> dict[str, str]:
    """Return the headers of a refused request: its type, and after how long to retry, or not to.

    `retry-after-ms` and `x-should-retry` are what the OpenAI and Anthropic SDKs obey first.
    """
    headers = {"Content-Type": "application/json"}
    if error.code == "budget_exhausted":
        headers["x-should-retry"] = "false"
    elif error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    return headers


DONE = b"data: [DONE]\n\n"
"""Last server-sent event of OpenAI's streams."""


def event_bytes(data: bytes, event: str | None = None) -> bytes:
    """Return one server-sent event. `data` is JSON text without line breaks; `event` names it."""
    data = one_line(data)
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


ENGINE_FAILURES = tuple(f"engine_{kind}" for kind in ("cut", "reset", "silent", "garbled", "500"))
"""Codes of errors after which a retry may succeed, as another replica may answer."""


class RouteKind(StrEnum):
    """The action that a path asks for."""

    GENERATE = "generate"
    MODELS = "models"
    MODEL = "model"
    COUNT_TOKENS = "count_tokens"
    PROBE = "probe"
    """Reachability checks such as `HEAD /`; answered with an empty 200."""
    STORED = "stored"
    """The action on a reply kept by its id (`/v1/responses/{id}`); `Route.action` says what."""
    UPGRADE = "upgrade"
    """A websocket upgrade; refused with 426, at which clients fall back to HTTP at once."""
    UNSUPPORTED = "unsupported"
    """A route of this provider that we refuse clearly (embeddings, batches)."""


@dataclass(frozen=True, slots=True)
class Route:
    """A recognised path."""

    dialect: Dialect
    kind: RouteKind
    model: str | None = None
    """Model named in the path (Google, single-model routes)."""
    stream: bool | None = None
    """Streaming as the path decides it (Google); `None` = the body says."""
    sse: bool = True
    """Google only: whether the stream is SSE (`alt=sse`) or one JSON array."""
    resource: str | None = None
    """The id in a STORED path; the first words of the path where UNSUPPORTED; which of a dialect's
    generating routes it is, where there are several (`completions`, `compact`)."""
    action: str = ""
    """STORED only: `get`, `delete`, `input_items` or `cancel`."""


@dataclass(slots=True, eq=False)
class ReplyHead:
    """The fields that every form of one reply shares."""

    reply_id: str
    """Random id of ours (96 bits, hex) without the dialect's prefix; it encodes nothing."""
    model: str
    """The name that the request used."""
    created: int
    """Unix seconds."""
    prompt_tokens: int = 0
    """The prompt's length, for dialects whose stream opens with it; 0 = not known yet."""


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply that a later request may continue, and the request that it answers."""

    items: tuple[bytes, ...]
    """The request's spans, whole from the first one on."""
    reply: bytes
    """The reply's JSON."""
    head: bytes
    tools: bytes | None = None


class StreamEncoder(ABC):
    """Turns one reply into the event grammar of a streaming client, piece by piece.

    Call order: `open` once, then `text` / `reasoning` / `tool_call` in any order, then `close`
    once. `close` is given the whole reply and returns (everything before the last event, the last
    event). The first begins with the part of the reply that was not sent yet (all of it if only
    `open` was called), so a synthetic stream is `open` + `close`. The gateway holds the last event
    until the exchange is committed; without it the client treats the reply as cut.

    A reply whose text does not begin with what was sent (a parser changed its mind) sends nothing
    more of that part: sent text cannot be taken back. Subclasses write `open`, `keepalive`,
    `error`, `finish` and the `write_*` methods.
    """

    calls_at_end = False
    """True if tool calls leave at the `close` only, all in one event."""

    def __init__(self) -> None:
        self._reasoning = ""
        self._text = ""
        self._calls = 0

    @abstractmethod
    def open(self) -> bytes:
        """Return the bytes that begin the stream; may be empty."""

    def reasoning(self, text: str) -> bytes:
        """Return the events of a piece of reasoning; none for an empty one."""
        self._reasoning += text
        return self.write_reasoning(text) if text else b""

    def text(self, text: str) -> bytes:
        """Return the events of a piece of visible text; none for an empty one."""
        self._text += text
        return self.write_text(text) if text else b""

    def tool_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """Return the events of one whole tool call, and count it as sent."""
        self._calls += 1
        return self.write_call(index, call_id, name, arguments)

    def close(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Return the parts of `reply` that were not sent yet with the reply's end, and the last
        event.
        """
        pieces = [
            self.reasoning(_unsent(reply.reasoning or "", self._reasoning)),
            self.text(_unsent(reply.content, self._text)),
        ]
        pieces.append(self.write_calls(self._calls, reply.tool_calls[self._calls :]))
        before, last = self.finish(reply, usage)
        return b"".join(pieces) + before, last

    @abstractmethod
    def write_reasoning(self, text: str) -> bytes:
        """Return the events of a piece of reasoning that is not empty."""

    @abstractmethod
    def write_text(self, text: str) -> bytes:
        """Return the events of a piece of text that is not empty."""

    @abstractmethod
    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """Return the events of one whole tool call."""

    def write_calls(self, first: int, calls: Sequence[ToolCall]) -> bytes:
        """Return the events of the last tool calls of a reply; `first` is the index of the first
        one.
        """
        return b"".join(
            self.write_call(index, call.id or "", call.name, call.arguments)
            for index, call in enumerate(calls, first)
        )

    @abstractmethod
    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Return the end of a reply whose pieces were all sent, and apart from it the last
        event.
        """

    @abstractmethod
    def keepalive(self) -> bytes:
        """Return bytes without a meaning that keep the client waiting."""

    @abstractmethod
    def error(self, error: RequestError) -> bytes | None:
        """Return an error event for a started stream; `None` = close the connection: the client
        retries.
        """


def _unsent(whole: str, sent: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""


class WireFormat(ABC):
    """One provider's wire format."""

    dialect: Dialect
    fields: Mapping[str, Use]
    """Fields of a request, without messages and tools."""
    members: Mapping[str, frozenset[str]]
    """By kind of object in a message (its `type`, else its key): the fields that are read, or say
    nothing to the model. Other kinds are shown or counted as whole blocks."""
    messages_field: str = "messages"
    """Name of the request's list of messages or items, whose elements are the spans."""
    grows: bool = True
    """True if a span's messages do not depend on the spans before it."""

    def __init__(
        self, read_tools: Callable[[object, str], ToolList], read_message: ReadMessages
    ) -> None:
        """Make it with these readers of the tool list and of one span."""
        self._tools = ToolMemo(read_tools)
        self._read = watch_members(self.members, read_message)

    @abstractmethod
    def route(self, method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
        """Return the route of a request (session prefix removed); `None` = not of this dialect.

        `headers` have lower-case names. Any prefix before the API's own path is accepted.
        """

    def parse(self, route: Route, body: bytes, memo: SpanMemo) -> ModelRequest:
        """Parse a request. `RequestError` names the path of the field that is wrong.

        Only spans (raw messages) whose digest is not in `memo` are decoded; they are added to it.
        """
        try:
            return self._parse(route, body, memo)
        except RecursionError:
            raise too_deep("") from None

    @abstractmethod
    def _parse(self, route: Route, body: bytes, memo: SpanMemo) -> ModelRequest: ...

    def read_new(self, spans: Sequence[bytes]) -> list[Message] | None:
        """Return the messages of further spans (raw messages) of a request that was read before.

        `None` = only `parse` can read them.
        """
        found: list[Message] = []
        try:
            for span in spans:
                found += self._read(an_object(decode(span, ""), ""), "")
        except (RequestError, RecursionError):
            return None
        return found

    @abstractmethod
    def reply_json(
        self, request: ModelRequest, head: ReplyHead, reply: Reply, usage: Usage
    ) -> bytes:
        """Return the whole reply as non-streaming clients get it; the capture stores the same
        bytes.
        """

    @abstractmethod
    def reply_messages(self, reply_json: bytes) -> tuple[Message, ...]:
        """Return the assistant messages of a reply that this gateway sent, read as a request's are.

        A harness that repeats the reply unchanged sends these, so they identify the exchange.
        """

    def body(self, head: bytes, spans: Sequence[bytes], tools: bytes | None) -> bytes:
        """Return a request's JSON from the parts that capture keeps of it (`ModelRequest.head`,
        `message_spans`, `tools_span`): `parse` reads it as it read the original.
        """
        fields = [b'"%s":[%s]' % (self.messages_field.encode(), b",".join(spans))]
        if tools is not None:
            fields.append(b'"tools":' + tools)
        if inner := head.strip()[1:-1].strip():
            fields.append(inner)
        return b"{" + b",".join(fields) + b"}"

    @abstractmethod
    def stream(self, request: ModelRequest, head: ReplyHead) -> StreamEncoder:
        """Return an encoder for one streaming reply."""

    @abstractmethod
    def error(self, error: RequestError) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a refused request, in the provider's form."""

    def refuses_in_stream(self, error: RequestError) -> bool:
        """Return whether streaming clients act on this error only inside a started stream.

        Then a streaming request gets status 200 and the error as an event.
        """
        del error
        return False

    @abstractmethod
    def models(self, route: Route, names: Sequence[str], context_length: int) -> bytes:
        """Return a model list, or one model where the route names one (`route.kind` is MODEL)."""

    @abstractmethod
    def token_count(self, count: int) -> bytes:
        """Return the answer to a token-counting request."""


# ---- messages


@dataclass(slots=True)
class AssistantTurn:
    """An assistant message while its parts are read; text after a call begins another message."""

    content: list[Part] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    _before: list[Message] = field(default_factory=list)

    def add(self, parts: Sequence[Part]) -> None:
        """Add parts to the message; after a tool call they begin another message."""
        if parts and self.calls:
            self._before.append(self._message())
            self.content, self.thoughts, self.calls, self.ids = [], [], [], []
        self.content += parts

    def messages(self) -> tuple[Message, ...]:
        """Return the messages that were read, the one in progress last."""
        return (*self._before, self._message())

    def _message(self) -> Message:
        return Message(
            Role.ASSISTANT,
            tuple(self.content),
            reasoning="".join(self.thoughts) or None,
            tool_calls=tuple(self.calls),
            issued_ids=tuple(self.ids),
        )


def user_messages(pieces: Iterable[Part | Message]) -> tuple[Message, ...]:
    """Return tool results as they are and the parts between them as user messages, in order.

    Without any there is one user message, which is empty.
    """
    messages: list[Message] = []
    parts: list[Part] = []
    for piece in pieces:
        if not isinstance(piece, Message):
            parts.append(piece)
            continue
        if parts:
            messages.append(Message(Role.USER, tuple(parts)))
            parts = []
        messages.append(piece)
    if parts or not messages:
        messages.append(Message(Role.USER, tuple(parts)))
    return tuple(messages)


# ---- paths that providers share


def tidy(path: str) -> str:
    """Return the path without a trailing slash and doubled slashes."""
    return "/" + "/".join(word for word in path.split("/") if word)


def caller(path: str, headers: dict[str, str]) -> Dialect:
    """Return the provider whose client sent the request, where only the headers tell."""
    if "x-goog-api-key" in headers or "x-goog-api-client" in headers or "/v1beta/" in path + "/":
        return Dialect.GOOGLE
    if "anthropic-version" in headers:
        return Dialect.ANTHROPIC
    return Dialect.OPENAI_CHAT


def models_route(dialect: Dialect, method: str, path: str, headers: dict[str, str]) -> Route | None:
    """Return the route of the model list, or of one model, whose name may contain slashes.

    `None` = the request is not for `dialect`.
    """
    before, found, name = (tidy(path) + "/").partition("/models/")
    if method != "GET" or not found or caller(before, headers) is not dialect:
        return None
    if not name:
        return Route(dialect, RouteKind.MODELS)
    return Route(dialect, RouteKind.MODEL, model=unquote(name.rstrip("/")))
