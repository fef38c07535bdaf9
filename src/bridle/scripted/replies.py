"""Replies in vLLM's form: one writer per route, for whole replies and for streams.

Prompt ids are spliced in as the bytes that came; only sampled ids are encoded. A chat reply's text
is read into reasoning, content and tool calls by `ReplyReader`. Field names are in
`bridle.engines.vllm_schemas`.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import orjson

from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.engines.ids import ids_json
from bridle.experts import KEY, npy_text
from bridle.scripted.script import CALL, CALL_END, THINK, THINK_END
from bridle.scripted.tokenizer import ChatTokenizer, TextStream
from bridle.types import JSON, FinishReason, Ids, Logprobs, one_line

LEAST = -9999.0
"""vLLM's substitute for minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class Wants:
    """Fields that a call requests for its reply."""

    ids: bool = False
    """Ids of the sampled tokens."""
    prompt_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    """1 or more: the sampled token is its own only alternative; engines report no others."""
    tokens_as_ids: bool = False
    versions: bool = False
    usage: bool = False
    """A usage chunk at the end of a stream."""
    tools: bool = False
    """True if tool calls are parsed from the text."""
    named_tool: bool = False
    thinking: bool = False
    """True if the prompt left a thinking block open."""
    reasoning: bool = True
    """`False`: reasoning, and with it all ids and logprobs, is withheld, as vLLM does."""


class ReplyWriter(ABC):
    """Writer of the reply to one call, in pieces or at once."""

    prefix: str
    """Prefix of the reply's id on this route, as in vLLM."""
    object: str
    chunk_object: str

    def __init__(
        self,
        call: GenerateRequest,
        model: str,
        wants: Wants,
        tokenizer: ChatTokenizer,
    ) -> None:
        self.id = self.prefix + call.request_id
        self._model = model
        self._prompt = call.prompt
        self._wants = wants
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._text = TextStream(tokenizer)
        self._shown = ""
        """Text held back because a stop string may begin in it."""
        self._hold = max((len(stop) - 1 for stop in call.sampling.stop), default=0)
        self._reader = ReplyReader(tools=wants.tools, thinking=wants.thinking)
        self._calls = 0

    # ---- defined by each route

    @abstractmethod
    def whole_body(self, text: str, choice: JSON) -> JSON:
        """Return the body of a whole reply; `choice` has the fields that all routes share."""

    @abstractmethod
    def piece_body(self, text: str, choice: JSON, *, last: bool) -> JSON:
        """Return the body of one stream chunk; `choice` has the fields that all routes share."""

    def opening(self) -> list[bytes]:
        """Return the events of a stream before its first token."""
        return []

    # ---- shared by all routes

    def whole(self, chunks: Sequence[GenerateChunk]) -> bytes:
        """Return a whole reply as JSON, from all its chunks."""
        ids = np.concatenate([chunk.output_ids for chunk in chunks])
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        last = chunks[-1]
        self._count(ids, last)
        text = self._tokenizer.visible(ids)
        if last.stop_text is not None:
            text = text.partition(last.stop_text)[0]
        return _ENCODER.encode(self.whole_body(text, self._choice(ids, logprobs, last)))

    def piece(self, chunk: GenerateChunk) -> bytes:
        """Return one chunk as an event of a stream; the last one has the finish reason."""
        last = chunk.finish_reason is not None
        self._count(chunk.output_ids, chunk)
        text = self._text.feed(chunk.output_ids) + (self._text.finish() if last else "")
        body = self.piece_body(
            self._given_out(text, chunk),
            self._choice(chunk.output_ids, chunk.logprobs, chunk),
            last=last,
        )
        return event(body)

    def _given_out(self, text: str, chunk: GenerateChunk) -> str:
        self._shown += text
        if chunk.finish_reason is not None:
            given = self._shown
            return given.partition(chunk.stop_text)[0] if chunk.stop_text else given
        cut = max(len(self._shown) - self._hold, 0)
        given, self._shown = self._shown[:cut], self._shown[cut:]
        return given

    def closing(self) -> list[bytes]:
        """Return the events of a stream after its last token."""
        done = [b"data: [DONE]\n\n"]
        if not self._wants.usage:
            return done
        return [
            event({**self._head(self.chunk_object), "choices": [], "usage": self.usage()}),
            *done,
        ]

    def usage(self) -> JSON:
        prompt = len(self._prompt)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._completion_tokens,
            "completion_tokens": self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _count(self, ids: Ids, chunk: GenerateChunk) -> None:
        self._completion_tokens += len(ids)
        self._cached_tokens = max(self._cached_tokens, chunk.cached_tokens)

    def _head(self, name: str) -> JSON:
        return {"id": self.id, "object": name, "created": self._created, "model": self._model}

    def _prompt_ids(self) -> msgspec.Raw | None:
        return msgspec.Raw(self._prompt.json()) if self._wants.prompt_ids else None

    def _choice(self, ids: Ids, logprobs: Logprobs, last: GenerateChunk) -> JSON:
        shown = self._wants.reasoning
        choice: JSON = {
            "index": 0,
            "logprobs": self.logprobs(ids, logprobs) if self._wants.logprobs and shown else None,
            "finish_reason": None,
            "token_ids": msgspec.Raw(ids_json(ids)) if self._wants.ids and shown else None,
        }
        if last.finish_reason is not None:
            choice["finish_reason"] = str(last.finish_reason)
            choice["stop_reason"] = self._stop_reason(ids, last)
            if self._wants.versions:
                choice["weight_versions"] = [
                    {"version": str(span.version), "start": span.start, "end": span.end}
                    for span in last.versions
                ]
            if KEY in last.extra:
                choice[KEY] = npy_text(last.extra[KEY].rows)
        return choice

    def _stop_reason(self, ids: Ids, last: GenerateChunk) -> str | int | None:
        """Return the stop string, or a stop token other than the end token; else null, as vLLM."""
        if last.stop_text is not None or last.finish_reason is not FinishReason.STOP:
            return last.stop_text
        final = int(ids[-1]) if len(ids) else None
        return None if final == self._tokenizer.end_id else final

    def logprobs(self, ids: Ids, logprobs: Logprobs) -> Any:  # noqa: ANN401 - JSON
        """Return logprobs in this route's form: a list under `content`."""
        values = _texts(np.maximum(logprobs, np.float32(LEAST)))
        named = zip(ids.tolist(), values, strict=True)
        entries = ",".join([self._entry(self._name(id_), value) for id_, value in named])
        return msgspec.Raw(f'{{"content":[{entries}]}}'.encode())

    def _entry(self, name: str, logprob: str) -> str:
        top = f'{{{name},"logprob":{logprob}}}' if self._wants.top_logprobs else ""
        return f'{{{name},"logprob":{logprob},"top_logprobs":[{top}]}}'

    def _name(self, token_id: int) -> str:
        if self._wants.tokens_as_ids:
            return f'"token":"token_id:{token_id}","bytes":null'
        text = self._tokenizer.decode([token_id])
        return f'"token":{json.dumps(text)},"bytes":{json.dumps(list(text.encode()))}'


class ChatReplyWriter(ReplyWriter):
    """`/v1/chat/completions`: the text is read into reasoning, content and tool calls."""

    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_body(self, text: str, choice: JSON) -> JSON:
        """Return the body of a whole chat completion with its message and tool calls."""
        delta = self._reader.feed(text, last=True)
        calls = self._called(delta.calls)
        choice["message"] = {
            "role": "assistant",
            "content": None if calls and not delta.content else delta.content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({"tool_calls": calls} if calls else {}),
            "reasoning": (delta.reasoning or None) if self._wants.reasoning else None,
        }
        self._mark_calls(choice)
        return {
            **self._head(self.object),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(),
            "kv_transfer_params": None,
        }

    def opening(self) -> list[bytes]:
        """Return the first event of a stream, with the role and, if asked for, the prompt's ids."""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        body = {**self._head(self.chunk_object), "choices": [choice]}
        if self._wants.prompt_ids:
            body["prompt_token_ids"] = self._prompt_ids()
        return [event(body)]

    def piece_body(self, text: str, choice: JSON, *, last: bool) -> JSON:
        """Return the body of one chunk of a chat completion."""
        delta = self._reader.feed(text, last=last)
        written: JSON = {}
        if delta.reasoning and self._wants.reasoning:
            written["reasoning"] = delta.reasoning
        if delta.content:
            written["content"] = delta.content
        first = self._calls
        if calls := self._called(delta.calls):
            written["tool_calls"] = [{"index": first + i, **c} for i, c in enumerate(calls)]
        choice["delta"] = written
        if last:
            self._mark_calls(choice)
        return {**self._head(self.chunk_object), "choices": [choice]}

    def _called(self, calls: Sequence[tuple[str, str]]) -> list[JSON]:
        self._calls += len(calls)
        return [
            {
                "id": f"chatcmpl-tool-{uuid4().hex}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in calls
        ]

    def _mark_calls(self, choice: JSON) -> None:
        if self._calls and choice["finish_reason"] == "stop" and not self._wants.named_tool:
            choice["finish_reason"] = "tool_calls"


class TokenReplyWriter(ReplyWriter):
    """`/inference/v1/generate`: ids only."""

    prefix = ""
    object = ""
    chunk_object = ""
    _opened = False

    def _head(self, name: str) -> JSON:  # noqa: ARG002 - this route names no object
        return {"request_id": self.id, "output_mode": "tokens"}

    def whole_body(self, text: str, choice: JSON) -> JSON:
        """Return the body of a whole reply of token ids."""
        body = self.piece_body(text, choice, last=True)
        return {**body, "model": self._model, "created": self._created, "usage": self.usage()}

    def piece_body(self, text: str, choice: JSON, *, last: bool) -> JSON:  # noqa: ARG002
        """Return the body of one chunk of token ids; the first one has the prompt's ids."""
        body = {**self._head(""), "choices": [choice]}
        if not self._opened:
            body["prompt_token_ids"] = self._prompt_ids()
            self._opened = True
        return body

    def _name(self, token_id: int) -> str:
        return f'"token_id":{token_id},"rank":null'


_ENCODER = msgspec.json.Encoder()


def _texts(values: Logprobs) -> list[str]:
    """Write each value as the shortest text that parses to the same float32."""
    text = orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)
    return text[1:-1].decode().split(",") if len(values) else []


def event(body: JSON) -> bytes:
    """Return a JSON body as one server-sent event."""
    return b"data: " + one_line(_ENCODER.encode(body)) + b"\n\n"


@dataclass(slots=True)
class ParsedDelta:
    """Parsed text of a chunk."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and argument JSON of each completed call."""


class ReplyReader:
    """Incremental parser of a reply's text: reasoning, content and tool calls.

    It removes exactly the line breaks that `spell_turn` adds, so a script's text is returned
    unchanged. Text that only looks like a tool call stays content.

    `tools` says whether tool calls are parsed (engines parse none where none are offered);
    `thinking`, whether the prompt left a thinking block open.
    """

    def __init__(self, *, tools: bool, thinking: bool = False) -> None:
        self._tools = tools
        self._thinking = thinking
        self._text = ""
        self._given = ParsedDelta()

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Take more of a reply's text; return the parts that can be parsed for certain.

        With `last`, all of the rest.
        """
        self._text += text
        read, given = self._read(last=last), self._given
        self._given = read
        return ParsedDelta(
            read.reasoning[len(given.reasoning) :],
            read.content[len(given.content) :],
            read.calls[len(given.calls) :],
        )

    def _read(self, *, last: bool) -> ParsedDelta:
        """Parse all text so far; more text can only append to the result."""
        lead = self._text.lstrip("\n")
        if not self._thinking and not lead.startswith(THINK):
            if not last and THINK.startswith(lead):
                return ParsedDelta()
            return self._read_content(ParsedDelta(), self._text, last=last)
        inside = self._text if self._thinking else lead.removeprefix(THINK)
        reasoning, marker, after = inside.partition(THINK_END)
        reasoning = reasoning.removeprefix("\n")
        if not marker:
            return ParsedDelta(reasoning if last else _certain(reasoning, THINK_END))
        content = after.removeprefix("\n").removeprefix("\n")
        return self._read_content(ParsedDelta(reasoning.removesuffix("\n")), content, last=last)

    def _read_content(self, delta: ParsedDelta, text: str, *, last: bool) -> ParsedDelta:
        while self._tools and CALL in text:
            before, _, after = text.partition(CALL)
            inside, closed, text = after.partition(CALL_END)
            call = _read_call(inside) if closed else None
            if call is None and (closed or last):
                delta.content += f"{before}{CALL}{inside}{closed}"
                continue
            delta.content += before.removesuffix("\n")
            if call is None:
                return delta
            delta.calls.append(call)
        delta.content += text if last or not self._tools else _certain(text, CALL)
        return delta


def _certain(text: str, marker: str) -> str:
    """Return `text` without a suffix that may begin a line break and `marker`."""
    for start in range(max(len(text) - len(marker), 0), len(text)):
        if f"\n{marker}".startswith(text[start:]) or marker.startswith(text[start:]):
            return text[:start]
    return text


def _read_call(inside: str) -> tuple[str, str] | None:
    try:
        read = json.loads(inside)
    except json.JSONDecodeError:
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return None
    arguments = read.get("arguments", {})
    if isinstance(arguments, str):
        return read["name"], arguments
    return read["name"], json.dumps(arguments, ensure_ascii=False)
