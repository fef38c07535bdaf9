"""Shared by the tests of dialects: one reply head, replies, and a provider made of a dialect.

`Provider` answers the official SDKs in process: the SDK builds the request and parses the reply, so
both directions are checked against its own reading of the wire format.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx2
from tests.dialects.sse import SseEvent, SseParser

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import ReplyHead, RouteKind, StreamEncoder
from bridle.errors import RequestError
from bridle.types import Dialect, FinishReason, ModelRequest, Reply, ToolCall, Usage

HEAD = ReplyHead("00112233445566778899aabb", "my-model", 1_790_000_000, prompt_tokens=11)
USAGE = Usage(prompt_tokens=11, completion_tokens=7, cached_tokens=4, reasoning_tokens=3)

TEXT = Reply("Hello there.", None, (), FinishReason.STOP)
THOUGHT = Reply("It is 4.", "Two and two.", (), FinishReason.STOP)
CALLS = Reply(
    "Looking.",
    "I need both.",
    (
        ToolCall("call_aaaaaaaaaaaaaaaaaaaaaaaa", "lookup", '{"key": "a", "n": 1}'),
        ToolCall("call_bbbbbbbbbbbbbbbbbbbbbbbb", "lookup", '{"key":"\\u00e9"}'),
    ),
    FinishReason.STOP,
)
CUT = Reply("Once upon a", None, (), FinishReason.LENGTH)
NOTHING = Reply("", None, (), FinishReason.STOP)
REPLIES = {"text": TEXT, "thought": THOUGHT, "calls": CALLS, "cut": CUT, "nothing": NOTHING}


def pieces(text: str, size: int = 3) -> Iterator[str]:
    """`text` in small pieces."""
    return (text[start : start + size] for start in range(0, len(text), size))


def live(encoder: StreamEncoder, reply: Reply, usage: Usage = USAGE) -> bytes:
    """A reply streamed as it would be sampled, with keep-alives in between."""
    out = [encoder.open(), encoder.keepalive()]
    out += [encoder.reasoning(piece) for piece in pieces(reply.reasoning or "")]
    out += [encoder.keepalive()]
    out += [encoder.text(piece) for piece in pieces(reply.content)]
    for index, call in enumerate(reply.tool_calls):
        out.append(encoder.tool_call(index, call.id or "", call.name, call.arguments))
    return b"".join(out) + b"".join(encoder.close(reply, usage))


def synthetic(encoder: StreamEncoder, reply: Reply, usage: Usage = USAGE) -> bytes:
    """A reply that was whole before it was streamed."""
    return encoder.open() + b"".join(encoder.close(reply, usage))


def events(stream: bytes) -> list[SseEvent]:
    """The events of a stream."""
    return SseParser().feed(stream)


@dataclass
class Provider:
    """A provider that gives one reply, or one error, to every request."""

    reply: Reply = field(default_factory=lambda: TEXT)
    error: RequestError | None = None
    live: bool = True
    late_error: RequestError | None = None
    """Told after the stream has begun."""
    requests: list[ModelRequest] = field(default_factory=list)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        query = request.url.query.decode()
        route = recognise(request.method, request.url.path, query, headers)
        assert route is not None, f"{request.method} {request.url}"
        wire = DIALECTS[route.dialect]
        json_type = {"Content-Type": "application/json"}
        if route.kind in (RouteKind.MODELS, RouteKind.MODEL):
            shown = wire.models(route, ["my-model", "other"], 4096)
            return httpx2.Response(200, headers=json_type, content=shown)
        try:
            parsed = wire.parse(route, request.read(), {})
            if self.error is not None:
                raise self.error
        except RequestError as refused:
            status, result, body = wire.error(refused)
            return httpx2.Response(status, headers=result, content=body)
        self.requests.append(parsed)
        if route.kind is RouteKind.COUNT_TOKENS:
            return httpx2.Response(200, headers=json_type, content=wire.token_count(42))
        if not parsed.stream:
            whole = wire.reply_json(parsed, HEAD, self.reply, USAGE)
            return httpx2.Response(200, headers=json_type, content=whole)
        encoder = wire.stream(parsed, HEAD)
        if self.late_error is not None:
            stream = encoder.open() + encoder.text("Hel")
            stream += encoder.error(self.late_error) or b""
        else:
            stream = (live if self.live else synthetic)(encoder, self.reply)
        kind = {"Content-Type": "text/event-stream" if route.sse else "application/json"}
        return httpx2.Response(200, headers=kind, content=stream)

    def client(self) -> httpx2.Client:
        """An HTTP client whose every request comes here."""
        return httpx2.Client(transport=httpx2.MockTransport(self))


POSTED = {
    Dialect.OPENAI_CHAT: "/v1/chat/completions",
    Dialect.OPENAI_RESPONSES: "/v1/responses",
    Dialect.ANTHROPIC: "/v1/messages",
    Dialect.GOOGLE: "/v1beta/models/my-model:generateContent",
}
"""A path of each dialect that asks for a reply."""


def parse(dialect: Dialect, body: object, path: str | None = None) -> ModelRequest:
    """A body read in a dialect, without a memo."""
    route = recognise("POST", path or POSTED[dialect], "", {})
    assert route is not None
    return DIALECTS[dialect].parse(route, json.dumps(body).encode(), {})
