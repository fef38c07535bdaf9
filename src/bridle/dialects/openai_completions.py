"""OpenAI's legacy completions: a text or token ids in, the text that follows out.

A prompt is sampled under as it is, without a chat template, and is a root of its own. For the
record it is one user message with one block, `{"type": "prompt", "prompt": ...}`: the request reads
as a chat request of this dialect when it is brought back, and no chat is taken for a repeat of it.
Logprobs are those of the sampled tokens only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridle.dialects.base import ReplyHead, SpanMemo, content_digest
from bridle.dialects.media import block_part
from bridle.dialects.openai_chat_write import usage_json
from bridle.dialects.openai_options import read_sampling
from bridle.dialects.reading import (
    an_object,
    decode,
    encode,
    flag_at,
    missing,
    name_at,
    object_at,
    split_object,
    whole_at,
    without_lone_surrogates,
    wrong,
)
from bridle.dialects.sse import DONE, event_bytes
from bridle.dialects.streaming import PiecewiseEncoder
from bridle.errors import RequestError
from bridle.types import (
    JSON,
    Dialect,
    FinishReason,
    Message,
    ModelRequest,
    Reply,
    Role,
    Sampling,
    Usage,
)

COMPLETIONS = "completions"
"""`Route.resource` of this route, and the key of `ModelRequest.extra` that marks its requests."""

BUDGET = 16
"""`max_tokens` where a request names none, as the API defines."""

_LARGEST_ID = 2**31 - 1


def read_completion(body: bytes, memo: SpanMemo) -> ModelRequest:
    """Normalise a request. `RequestError` names what is wrong or is not served."""
    del memo  # nothing is sent twice
    fields = split_object(body)
    raw = fields.pop("prompt", None)
    if raw is None:
        raise missing("prompt")
    head_bytes = encode(fields)
    head = an_object(decode(head_bytes, ""), "")
    _refuse_unserved(head)
    prompt = _read_prompt(decode(raw, "prompt"))
    shown = list(prompt) if isinstance(prompt, tuple) else prompt
    block: JSON = {"type": "prompt", "prompt": shown}
    span = encode({"role": "user", "content": [block]})
    options = object_at(head, "stream_options", "") or {}
    sampling = read_sampling(head)
    return ModelRequest(
        dialect=Dialect.OPENAI_CHAT,
        model=name_at(head, "model", ""),
        messages=(Message(Role.USER, (block_part(block),)),),
        tools=(),
        sampling=_with_budget(sampling),
        stream=flag_at(head, "stream", "") or False,
        head=head_bytes,
        message_spans=(span,),
        span_digests=(content_digest(span),),
        span_lengths=(1,),
        raw_prompt=prompt,
        logprobs=whole_at(head, "logprobs", "", least=0, most=20) is not None,
        include_usage=flag_at(options, "include_usage", "stream_options") or False,
        extra={COMPLETIONS: True},
    )


def _with_budget(sampling: Sampling) -> Sampling:
    return sampling if sampling.max_tokens is not None else replace(sampling, max_tokens=BUDGET)


def _refuse_unserved(head: JSON) -> None:
    for key in ("n", "best_of"):
        value = head.get(key)
        if value is not None and (value != 1 or isinstance(value, bool)):
            raise RequestError(f"Only one choice is sampled: '{key}' must be 1.", param=key)
    for key in ("echo", "suffix"):
        if head.get(key):
            raise RequestError(f"'{key}' is not available here.", param=key)


def _read_prompt(value: Any) -> str | tuple[int, ...]:
    """One text or one list of ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    match value:
        case str():
            if not value:
                raise RequestError("'prompt' is empty.", param="prompt")
            return without_lone_surrogates(value)
        case []:
            raise RequestError("'prompt' is empty.", param="prompt")
        case [str() | list(), *_]:
            message = "Only one prompt is sampled: 'prompt' must be one text or one list of ids."
            raise RequestError(message, param="prompt")
        case list():
            return tuple(_read_id(item, f"prompt[{place}]") for place, item in enumerate(value))
        case _:
            raise wrong("prompt", "a string or an array of token ids", value)


def _read_id(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(path, "a token id", value)
    if not 0 <= value <= _LARGEST_ID:
        raise RequestError(f"Invalid value for '{path}': {value} is no token id.", param=path)
    return value


# ---- replies


def completion_json(
    head: ReplyHead, reply: Reply | None, usage: Usage | None, text: str = ""
) -> JSON:
    """A `text_completion` object: the whole reply, or a piece of it where `reply` is `None`."""
    choice: JSON = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    if reply is not None:
        ended = reply.finish_reason is FinishReason.STOP
        choice["finish_reason"] = "stop" if ended else "length"
        choice["logprobs"] = _logprobs_json(reply)
    shown = {
        "id": f"cmpl-{head.reply_id}",
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice],
    }
    return shown if usage is None else {**shown, "usage": usage_json(usage)}


def _logprobs_json(reply: Reply) -> JSON | None:
    """Parallel lists over the sampled tokens; offsets count characters of the tokens' texts."""
    if reply.token_logprobs is None:
        return None
    offsets, length = [], 0
    for token, _ in reply.token_logprobs:
        offsets.append(length)
        length += len(token)
    return {
        "tokens": [token for token, _ in reply.token_logprobs],
        "token_logprobs": [logprob for _, logprob in reply.token_logprobs],
        "top_logprobs": [{token: logprob} for token, logprob in reply.token_logprobs],
        "text_offset": offsets,
    }


class CompletionStream(PiecewiseEncoder):
    """One reply as `text_completion` pieces; the finish, usage and `[DONE]` leave together."""

    def __init__(self, head: ReplyHead, *, include_usage: bool) -> None:
        super().__init__()
        self._head = head
        self._include_usage = include_usage

    def open(self) -> bytes:
        """Nothing."""
        return b""

    def write_reasoning(self, text: str) -> bytes:
        """Nothing: a completion has no reasoning."""
        del text
        return b""

    def write_text(self, text: str) -> bytes:
        """A piece of text."""
        return self._event(completion_json(self._head, None, None, text))

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """Nothing: a completion has no calls."""
        del index, call_id, name, arguments
        return b""

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        """Nothing before; the finish reason with the logprobs, usage if asked for, `[DONE]`."""
        last = self._event(completion_json(self._head, reply, None))
        if self._include_usage:
            counted = {**completion_json(self._head, None, usage), "choices": []}
            last += self._event(counted)
        return b"", last + DONE

    def keepalive(self) -> bytes:
        """A piece without text."""
        return self._event(completion_json(self._head, None, None))

    def error(self, error: RequestError) -> bytes | None:
        """None: cut, as Chat's."""
        del error
        return None

    def _event(self, value: JSON) -> bytes:
        return event_bytes(encode(value))
