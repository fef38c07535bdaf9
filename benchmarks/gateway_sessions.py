"""The sessions that `gateway.py` plays: the bodies they send, and the replies they read.

A session sends a body, reads the reply, and sends that back with a new message, again and again.
`direct` and `proxy` get the bytes that the gateway would send the engine, of the same lengths in
tokens; the others get messages in their dialect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import orjson

from benchmarks import gateway_parts as parts
from bridle.engines.ids import ids_json
from bridle.engines.vllm_routes import VllmRoute
from bridle.prompting.prompt import PromptIds

LITELLM_KEY = "sk-benchmark"
"""Of LiteLLM's proxy."""

TURNS = 16
"""Turns of a session, if nothing else is asked for."""

NEW_TOKENS = 64
"""Tokens that the harness adds per turn, about."""

TOOL_TOKENS = 355
"""Tokens of one tool of `parts.tools` in a prompt, about."""

INSTRUCTION = "You are a careful agent."

Bodies = Generator[bytes, bytes, None]
JSON = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One kind of traffic: a dialect, or ids (`direct`, `proxy`), and how replies come."""

    name: str
    reply: str = "json"
    """`json`; `whole` or `live`: a stream, by the gateway's setting of that name."""

    def __str__(self) -> str:
        return self.name if self.reply == "json" else f"{self.name}/{self.reply}"

    @property
    def floor(self) -> Way:
        """The proxy's traffic with the same kind of replies."""
        return Way("proxy", "json" if self.reply == "json" else "stream")

    @property
    def server(self) -> str:
        """The part that it asks: `direct`, `proxy`, `text`, or the gateway `whole` or `live`."""
        if self.name in {"direct", "proxy", "text", "litellm"}:
            return self.name
        return "live" if self.reply == "live" else "whole"


def first_tokens(context: int, turns: int) -> int:
    """Tokens that a session begins with, so that its mean context is about `context`."""
    return max(16, context - turns * (parts.OUTPUT_TOKENS + NEW_TOKENS) // 2)


def bodies(way: Way, context: int, tools: int, turns: int) -> Bodies:
    """Bodies of one session; each reply is sent in. Tools come on top of the context."""
    if way.name in DIALECTS:
        return dialect_bodies(way, context, tools, turns)
    return engine_bodies(context + tools * TOOL_TOKENS, turns, stream=way.reply != "json")


def growing(before: bytes, after: bytes, items: list[bytes]) -> Iterator[bytes]:
    """JSON of an array that grows by what is put into `items`, without end."""
    inside = b""
    while True:
        inside = b",".join([inside, *items] if inside else items)
        items.clear()
        yield b"".join((before, inside, after))


def engine_bodies(context: int, turns: int, *, stream: bool) -> Bodies:
    """Bodies as the gateway sends them to the engine."""
    prompt = PromptIds.root(np.zeros(1, np.int32))
    call = parts.engine_call(VllmRoute.GENERATE, prompt, stream=stream)
    before, _, after = call.rpartition(b"[0]")
    seed = time.perf_counter_ns()
    ids = np.random.default_rng(seed).integers(300, 1500, first_tokens(context, turns))
    items = [ids_json(ids.astype(np.int32))[1:-1]]
    for body in growing(before + b"[", b"]" + after, items):
        yield body
        items.append(b",".join([b"1234"] * (parts.OUTPUT_TOKENS + NEW_TOKENS + 8)))


def dialect_bodies(way: Way, context: int, tools: int, turns: int) -> Bodies:
    """Bodies of one session in a dialect."""
    dialect = DIALECTS[way.name]
    seed = time.perf_counter_ns()
    # No two sessions begin alike, or the tokenizer would remember the text.
    opening = f"Go {seed}." + parts.words(first_tokens(context, turns), seed)
    head = dialect.head(parts.tools(tools))
    if dialect.streams_by_field and way.reply != "json":
        head["stream"] = True
    items = [orjson.dumps(message) for message in (*dialect.opening, dialect.user(opening))]
    before = orjson.dumps(head)[:-1] + b',"' + dialect.messages.encode() + b'":['
    # Between two calls the client does little, as before the proxy: it shares the gateway's caches.
    texts = [f"Turn {turn}." + parts.words(NEW_TOKENS, turn) for turn in range(turns)]
    users = [orjson.dumps(dialect.user(text)) for text in texts]
    for user, body in zip(users, growing(before, b"]}", items), strict=False):
        reply = yield body
        parsed = events(reply) if way.reply != "json" else orjson.loads(reply)
        items += [*(orjson.dumps(message) for message in dialect.reply(parsed)), user]


def events(stream: bytes) -> list[JSON]:
    """The JSON of a stream's events."""
    lines = stream.split(b"\n")
    return [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


# ---- dialects


@dataclass(frozen=True)
class Dialect:
    """Requests and replies of a harness of one API."""

    family: str
    path: str
    messages: str
    """Name of the field that grows."""
    head: Callable[[list[JSON]], JSON]
    """The other fields, with tools as OpenAI Chat has them."""
    reply: Callable[[Any], list[JSON]]
    """A reply, or the events of one, as messages to send back."""
    opening: tuple[JSON, ...] = ()
    stream_path: str | None = None

    @property
    def streams_by_field(self) -> bool:
        """Return whether a field of the body asks for a stream; else the path does."""
        return self.stream_path is None

    def user(self, text: str) -> JSON:
        """A user's message."""
        if self.messages == "contents":
            return {"role": "user", "parts": [{"text": text}]}
        return {"role": "user", "content": text}

    def path_of(self, way: Way) -> str:
        """Path below the session's base URL."""
        return self.stream_path if self.stream_path and way.reply != "json" else self.path


def named(head: JSON, tools: list[JSON]) -> JSON:
    """Fields of a request, with tools where there are some."""
    return {**head, "tools": tools} if tools else head


def functions(tools: list[JSON]) -> list[JSON]:
    """The inside of tools of OpenAI Chat."""
    return [tool["function"] for tool in tools]


def chat_head(tools: list[JSON]) -> JSON:
    """Chat Completions."""
    return named({"model": "m"}, tools)


def responses_head(tools: list[JSON]) -> JSON:
    """Responses."""
    flat = [{"type": "function", "strict": False, **tool} for tool in functions(tools)]
    return named({"model": "m", "instructions": INSTRUCTION}, flat)


def anthropic_head(tools: list[JSON]) -> JSON:
    """Messages."""
    own = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in functions(tools)
    ]
    return named({"model": "m", "max_tokens": 4096, "system": INSTRUCTION}, own)


def google_head(tools: list[JSON]) -> JSON:
    """Google's generateContent."""
    own = [{"functionDeclarations": functions(tools)}] if tools else []
    return named({"systemInstruction": {"parts": [{"text": INSTRUCTION}]}}, own)


def chat_reply(result: Any) -> list[JSON]:  # noqa: ANN401 - one reply or a list of events
    """The assistant's message."""
    if isinstance(result, dict):
        return [result["choices"][0]["message"]]
    deltas = [one["choices"][0]["delta"] for one in result if one["choices"]]
    return [{"role": "assistant", "content": "".join(one.get("content") or "" for one in deltas)}]


def responses_reply(result: Any) -> list[JSON]:  # noqa: ANN401 - one reply or a list of events
    """The output items."""
    found: list[JSON] = (result if isinstance(result, dict) else result[-1]["response"])["output"]
    return found


def anthropic_reply(result: Any) -> list[JSON]:  # noqa: ANN401 - one reply or a list of events
    """The assistant's message."""
    if isinstance(result, dict):
        return [{"role": "assistant", "content": result["content"]}]
    text = "".join(one["delta"]["text"] for one in result if one["type"] == "content_block_delta")
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def google_reply(result: Any) -> list[JSON]:  # noqa: ANN401 - one reply or a list of events
    """The model's content; of a stream all parts, one after the other."""
    several = [result] if isinstance(result, dict) else result
    return [
        {
            "role": "model",
            "parts": [part for one in several for part in one["candidates"][0]["content"]["parts"]],
        }
    ]


CHAT = Dialect(
    *("openai", "/chat/completions", "messages", chat_head, chat_reply),
    opening=({"role": "system", "content": INSTRUCTION},),
)
DIALECTS = {
    "chat": CHAT,
    "text": CHAT,
    "litellm": CHAT,
    "responses": Dialect("openai", "/responses", "input", responses_head, responses_reply),
    "anthropic": Dialect(
        *("anthropic", "/v1/messages", "messages", anthropic_head, anthropic_reply)
    ),
    "google": Dialect(
        *("google", "/v1beta/models/m:generateContent", "contents", google_head, google_reply),
        stream_path="/v1beta/models/m:streamGenerateContent?alt=sse",
    ),
}


# ---- a player


class Player:
    """One session over one connection. `token` opens sessions; an engine or a proxy needs none.

    After `turns` turns its mean context was about `context` tokens, `tools` tools not counted.
    """

    def __init__(
        self, way: Way, context: int, tools: int, server: str, token: str = "", turns: int = TURNS
    ) -> None:
        self._way = way
        self._server = server
        self._token = token
        self._bodies = bodies(way, context, tools, turns)
        self._body = next(self._bodies)
        self._session = ""
        """Its id, where it has one."""

    async def __aenter__(self) -> Self:
        target, key = self._server + VllmRoute.GENERATE.path, "none"
        if self._way.name == "litellm":
            target, key = f"{self._server}/v1{CHAT.path}", LITELLM_KEY
        elif self._way.name in DIALECTS:
            opening = asyncio.to_thread(parts.open_session, self._server, self._token)
            opened, dialect = await opening, DIALECTS[self._way.name]
            target = opened["base_url"][dialect.family] + dialect.path_of(self._way)
            key, self._session = opened["key"], opened["session_id"]
        url = urlsplit(target)
        path = f"{url.path}?{url.query}" if url.query else url.path
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        loop = asyncio.get_running_loop()
        _, self._caller = await loop.create_connection(
            parts.Caller, str(url.hostname), url.port or 80
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._caller.transport.close()
        if self._session:
            await asyncio.to_thread(parts.end_session, self._server, self._token, self._session)

    async def turn(self) -> float:
        """Make one call; returns its latency in ms, from the first byte sent to the last read."""
        started = time.perf_counter()
        reply = await self._caller.post(self._head, self._body)
        ended = time.perf_counter()
        self._body = next_body(self._bodies, reply)
        return (ended - started) * 1e3


def next_body(source: Bodies, reply: bytes) -> bytes:
    """The body of the next turn; nothing after the last one."""
    try:
        return source.send(reply)
    except StopIteration:
        return b""
