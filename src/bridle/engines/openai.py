"""Adapter for any server of OpenAI's chat completions: text, and no training.

It is for data from a hosted model, for judges and side calls. Messages are sent as they came; the
server renders, samples and parses. Ids and logprobs are kept if a server reports them (vLLM's
fields are requested until it refuses them), but nothing proves under which prompt they were
sampled, so the engine reports no token input and no logprob mode, and trajectories count its tokens
as excluded. The key comes from the environment and goes into one header: it is in no record, log or
error.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Self

import msgspec
import numpy as np

from bridle.engines.base import CutError, EngineInfo, GenerateChunk, GenerateRequest, spans_of
from bridle.engines.connection import AbortedError, HttpCall
from bridle.engines.http import EngineClient
from bridle.engines.probe import Finding, ProbeReport
from bridle.engines.vllm_routes import MessageText, read_answer, response_format
from bridle.errors import ContextOverflowError, EngineError
from bridle.types import JSON, FinishReason, LogprobMode, Logprobs

KEY_VARIABLES = ("BRIDLE_ENGINE_API_KEY", "OPENAI_API_KEY")
"""Environment variables of the key; the first that is set is used."""

ATTEMPTS = 5
"""Attempts of a call on a server that cannot be reached."""

UNKNOWN_CONTEXT = 1 << 20
"""Context of a server that reports none: larger than any, so nothing is refused."""

_ENCODER = msgspec.json.Encoder()
_PLAIN = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
_BEYOND = ("top_k", "min_tokens", "stop_token_ids", "repetition_penalty", "min_p")
"""Sampling fields beyond OpenAI's own API."""
_IDS: JSON = {"return_token_ids": True, "logprobs": True}
_REFUSALS = frozenset({400, 404, 422})


class HostedClient(EngineClient):
    """`EngineClient` for a remote server: connects are retried, and its base path may differ."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        super().__init__(base_url, api_key=api_key, timeout_s=timeout_s, attempts=ATTEMPTS)
        self.root = "/v1" if base_url.rstrip("/").endswith("/v1") else ""
        """Prefix of each route's path."""


class OpenAIEngine:
    """Adapter for one server with OpenAI's API; an `Engine`.

    `model` None uses the server's only one, unless each request names its own. `timeout_s` is how
    long it may be silent within one call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._client = HostedClient(base_url, api_key=api_key, timeout_s=timeout_s)
        self._model = model
        self._context_length = UNKNOWN_CONTEXT
        self._calls: dict[str, HttpCall] = {}
        self._beyond = True
        """True if it takes fields beyond OpenAI's API; they are sent until it refuses them."""
        self._budget = "max_tokens"
        self._info: EngineInfo | None = None
        self.report: ProbeReport | None = None

    @classmethod
    def open(
        cls,
        target: str,
        *,
        tokenizer: str | None = None,  # noqa: ARG003 - the server has its own
        allow_untokenized: bool = False,  # noqa: ARG003 - it always gives text only
    ) -> Self:
        """Return an adapter for `URL` or `URL#MODEL`, with the API key of the environment
        (`KEY_VARIABLES`).

        Raises `ConfigError` unless it is a URL.
        """
        url, _, model = target.partition("#")
        keys = [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)]
        return cls(url, api_key=keys[0] if keys else None, model=model or None)

    # ---- life

    async def start(self) -> EngineInfo:
        """Connect to the server and list its models. Raises `EngineError`."""
        if self._info is None:
            self._info = await self._connect()
        return self._info

    async def _connect(self) -> EngineInfo:
        path = f"{self._client.root}/models"
        listed = (await self._client.get(path, optional=True)).get("data") or []
        models = {one["id"]: one for one in listed if isinstance(one, dict) and "id" in one}
        if self._model is None and len(models) == 1:
            self._model = next(iter(models))
        if self._model is None:
            names = ", ".join(sorted(models)[:8])
            has = "has several models" if names else "lists no model"
            raise EngineError(
                f"the server {self._client.base_url} {has}: name one, as in openai:URL#MODEL"
                f"{names and f' ({names})'}"
            )
        length = models.get(self._model, {}).get("max_model_len")
        self._context_length = length if isinstance(length, int) else UNKNOWN_CONTEXT
        self.report = self._findings(length)
        return EngineInfo(
            model=self._model,
            context_length=self._context_length,
            logprob_mode=LogprobMode.NONE,
            token_in=False,
            version=0,
            grammar=True,
            remote=True,
        )

    def _findings(self, context: object) -> ProbeReport:
        untrainable = Finding(
            "token in",
            ok=False,
            needed=True,
            found="a server of text",
            means="Nothing proves under which prompt its tokens were sampled.",
            fix="To train on vLLM or SGLang name the server itself: --engine URL, sglang:URL.",
        )
        found = str(context) if isinstance(context, int) else "not reported"
        notes = Finding.note("model", self._model or ""), Finding.note("context length", found)
        return ProbeReport((*notes, untrainable), LogprobMode.NONE, token_in=False, duration_s=0.0)

    async def health(self) -> None:
        """Check the server by listing its models; raises `EngineError` if that fails."""
        await self._client.get(f"{self._client.root}/models", optional=True)

    async def aclose(self) -> None:
        """End all calls and close all connections."""
        for call in list(self._calls.values()):
            call.abort()
        await self._client.aclose()

    async def abort(self, request_id: str) -> None:
        """End a call by closing its connection."""
        if request_id in self._calls:
            self._calls[request_id].abort()

    # ---- sampling

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Sample one reply from the request's messages; in one chunk unless asked to stream.

        Raises `EngineError` (400 without messages), and `CutError` for a reply that breaks off.
        """
        if not request.messages:
            raise EngineError(
                "an engine `openai:URL` takes messages, and this request has only token ids",
                status=400,
            )
        call = self._calls[request.request_id] = HttpCall()
        text, count = MessageText(), 0
        held: GenerateChunk | None = None
        try:
            async with aclosing(self._answers(request, call)) as answers:
                async for answer in answers:
                    read = read_answer(answer)
                    if read.chunk is None:
                        continue
                    chunk = replace(read.chunk, delta=text.add(read), logprobs=_NO_LOGPROBS)
                    count += len(chunk.output_ids)
                    if chunk.finish_reason is None:
                        yield chunk
                    elif held is None:
                        held = chunk
            yield self._last(held, text, count)
        except AbortedError:
            yield self._last(GenerateChunk.aborted(()), text, count)
        except EngineError as error:
            error.args = (self._client.hidden(str(error)),)
            raise error from None
        finally:
            del self._calls[request.request_id]

    def _last(self, held: GenerateChunk | None, text: MessageText, count: int) -> GenerateChunk:
        if held is None or held.finish_reason is None:
            raise CutError("the engine closed the stream without a finish reason")
        aborted = held.finish_reason is FinishReason.ABORT
        reply = None if aborted else text.reply(held.finish_reason)
        return replace(held, versions=spans_of(0, count), reply=reply)

    async def _answers(
        self, request: GenerateRequest, call: HttpCall
    ) -> AsyncGenerator[bytes, None]:
        """Yield the reply's JSON, or that of each chunk; retries once without each refused field.

        Refusals come before the first token, so a retried call was never answered.
        """
        path = f"{self._client.root}/chat/completions"
        while True:
            body = self._body(request)
            answered = False
            try:
                async with aclosing(self._asked(path, body, request, call)) as answers:
                    async for answer in answers:
                        answered = True
                        yield answer
            except ContextOverflowError:
                if answered or request.sampling.max_tokens is None:
                    raise
                # The budget was counted on a prompt of ours; without one the server takes its rest.
                request = replace(request, sampling=replace(request.sampling, max_tokens=None))
            except EngineError as error:
                if answered or not self._gives_way(error):
                    raise
            else:
                return

    async def _asked(
        self, path: str, body: bytes, request: GenerateRequest, call: HttpCall
    ) -> AsyncGenerator[bytes, None]:
        if not request.stream:
            yield await self._client.post(path, body, call, prompt_tokens=len(request.prompt))
            return
        stream = self._client.stream(path, body, call, prompt_tokens=len(request.prompt))
        async with aclosing(stream) as events:
            async for several in events:
                for data in several:
                    yield data

    def _gives_way(self, error: EngineError) -> bool:
        """Return whether a retry without extensions may succeed; later calls then omit them too."""
        if error.status not in _REFUSALS:
            return False
        if self._budget == "max_tokens" and "max_completion_tokens" in str(error):
            self._budget = "max_completion_tokens"
            return True
        if self._beyond:
            self._beyond = False
            return True
        return False

    def _body(self, request: GenerateRequest) -> bytes:
        sampling = request.sampling
        fields: JSON = {"model": request.model or self._model, "messages": request.messages}
        if request.tools:
            fields["tools"] = request.tools
            if not request.calls:
                fields["tool_choice"] = "none"
        if request.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if sampling.max_tokens is not None:
            fields[self._budget] = sampling.max_tokens
        if sampling.stop:
            fields["stop"] = list(sampling.stop)[:4]
        names = (*_PLAIN, *_BEYOND) if self._beyond else _PLAIN
        given = {name: getattr(sampling, name) for name in names}
        fields |= {name: value for name, value in given.items() if value not in (None, ())}
        if self._beyond:
            fields |= _IDS
        if request.grammar is not None:
            schema = {"json_schema": request.grammar.get("json_schema")}
            fields["response_format"] = response_format(schema)
        return _ENCODER.encode(fields)


_NO_LOGPROBS: Logprobs = np.empty(0, np.float32)
