"""The messages of a trace, in the shape of OpenAI Chat, from stored spans and replies.

A request is stored as digests of raw spans against an earlier request (`RequestRecord`). A trace's
messages are those of its first request, then, turn by turn, the reply as it was given and what the
harness added to it. The harness's own copy of a reply is left out: what was sampled is the fact.

How a dialect's spans, heads and replies read as chat messages is one `ChatShape` per dialect in
`CHAT_SHAPES`; a dialect without one gives its own JSON unchanged.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from bridle.capture.records import Exchange
from bridle.types import JSON, Dialect


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How one dialect's stored JSON reads as OpenAI Chat messages. All are pure functions."""

    head: Callable[[JSON], list[JSON]]
    """Messages that stand in a request's head (system prompt, instructions)."""
    span: Callable[[JSON], list[JSON]]
    """Messages of one stored span (a message or an item)."""
    reply: Callable[[JSON], list[JSON]]
    """Assistant messages of a whole reply."""
    tools: Callable[[list[JSON]], list[JSON]]
    """Tool list as Chat has it."""


def _chat_reply(reply: JSON) -> list[JSON]:
    return [choice["message"] for choice in reply.get("choices", [])[:1]]


CHAT = ChatShape(lambda _: [], lambda span: [span], _chat_reply, lambda tools: tools)
"""OpenAI Chat is the shape itself."""

AS_STORED = ChatShape(
    lambda head: [{"role": "system", "content": head[key]} for key in ("system",) if key in head],
    lambda span: [span],
    lambda reply: [{"role": "assistant", "content": reply}],
    lambda tools: tools,
)
"""For a dialect without a shape: its own JSON."""

CHAT_SHAPES: dict[Dialect, ChatShape] = {Dialect.OPENAI_CHAT: CHAT}


class Transcript:
    """Reads the messages of one session's exchanges; every span is decoded once."""

    def __init__(self, exchanges: Iterable[Exchange], bodies: Mapping[bytes, bytes]) -> None:
        self._exchanges = {exchange.exchange_id: exchange for exchange in exchanges}
        self._bodies = bodies
        self._messages: dict[tuple[Dialect, bytes], list[JSON]] = {}
        self._replies: dict[str, list[JSON]] = {}

    def spans(self, exchange: Exchange) -> list[bytes]:
        """Digests of all spans of an exchange's request, in order.

        Where an earlier request is not there (or bases form a ring), what follows it is given.
        """
        runs: list[Sequence[bytes]] = []
        take = span_count(exchange)
        seen: set[str] = set()
        at: Exchange | None = exchange
        while at is not None and at.exchange_id not in seen and take > 0:
            seen.add(at.exchange_id)
            request = at.request
            runs.append(request.spans[: max(0, take - request.kept_spans)])
            take = min(take, request.kept_spans)
            at = self._exchanges.get(request.base) if request.base is not None else None
        return [digest for run in reversed(runs) for digest in run]

    def request(self, exchange: Exchange) -> list[JSON]:
        """All messages of a request."""
        shape = CHAT_SHAPES.get(exchange.dialect, AS_STORED)
        head = _decode(exchange.request.head)
        messages = shape.head(head) if isinstance(head, dict) else []
        return [*messages, *self._of_spans(exchange.dialect, self.spans(exchange))]

    def reply(self, exchange: Exchange) -> list[JSON]:
        """The assistant messages of a reply; none where nothing was kept."""
        known = self._replies.get(exchange.exchange_id)
        if known is None:
            reply = _decode(exchange.reply)
            shape = CHAT_SHAPES.get(exchange.dialect, AS_STORED)
            known = shape.reply(reply) if isinstance(reply, dict) else []
            self._replies[exchange.exchange_id] = known
        return known

    def after(self, path: Sequence[Exchange]) -> list[JSON]:
        """What follows the first request on a path: each reply and what the harness added to it."""
        messages = list(self.reply(path[0]))
        spans = self.spans(path[-1])
        for before, exchange in itertools.pairwise(path):
            new = spans[span_count(before) : span_count(exchange)]
            added = self._of_spans(exchange.dialect, new)
            echo = len(self.reply(before))
            while echo > 0 and added and added[0].get("role") == "assistant":
                added, echo = added[1:], echo - 1
            messages += added
            messages += self.reply(exchange)
        return messages

    def tools(self, exchange: Exchange) -> list[JSON] | None:
        """The tool list that a request sent; `None` if it sent none."""
        digest = exchange.request.tools
        tools = _decode(self._bodies.get(digest, b"")) if digest is not None else None
        shape = CHAT_SHAPES.get(exchange.dialect, AS_STORED)
        return shape.tools(tools) if isinstance(tools, list) else None

    def _of_spans(self, dialect: Dialect, digests: Iterable[bytes]) -> list[JSON]:
        return [message for digest in digests for message in self._of_span(dialect, digest)]

    def _of_span(self, dialect: Dialect, digest: bytes) -> list[JSON]:
        """Messages of a span; one whose body is not in the store says so in its place."""
        known = self._messages.get((dialect, digest))
        if known is None:
            span = _decode(self._bodies.get(digest, b""))
            if isinstance(span, dict):
                known = CHAT_SHAPES.get(dialect, AS_STORED).span(span)
            else:
                known = [{"role": "user", "content": None, "missing": digest.hex()}]
            self._messages[dialect, digest] = known
        return known


def span_count(exchange: Exchange) -> int:
    """How many spans an exchange's request has."""
    return exchange.request.kept_spans + len(exchange.request.spans)


def _decode(raw: bytes) -> Any:  # noqa: ANN401 - JSON as decoded
    """JSON as decoded; `None` where there is none or it is malformed."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw)
    except ValueError:
        return None
