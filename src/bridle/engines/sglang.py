"""Adapter for an SGLang server, or any server with its API.

The features of a server are found by asking it: its routes, its vocabulary, whether it knows seeds,
whether its streams repeat themselves. Prompts are checked against the vocabulary before they are
sent, because an id beyond it kills the server (0.5.23). Routes and replies are in `sglang_routes`.

Its health is asked at `/server_info`, which its scheduler answers: for `/health` SGLang samples a
token, unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is false.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack
from uuid import uuid4

from bridle.aio import Nursery
from bridle.engines.adapter import (
    ROUTER,
    ServerAdapter,
    ServerOptions,
    as_version,
    read_config,
    tokenizer_dir,
)
from bridle.engines.base import (
    CutError,
    EngineInfo,
    GarbledError,
    GenerateChunk,
    GenerateRequest,
    PauseMode,
    is_adapter,
    join_chunks,
    spans_of,
)
from bridle.engines.connection import AbortedError, HttpCall
from bridle.engines.ids import check_vocabulary
from bridle.engines.probe import Finding, probe
from bridle.engines.sglang_routes import (
    Ask,
    Reading,
    SglangRoute,
    call_body,
    experts_shape,
)
from bridle.errors import ContextOverflowError, EngineError
from bridle.types import JSON, FinishReason

ABORT_S = 5.0
"""Time that a server has to end an aborted call."""

_RANGE = re.compile(r"\[0, (\d+)[\])]")
_BEYOND = 2**31 - 1
"""An id that no vocabulary has."""


@dataclass(slots=True)
class _Running:
    rid: str
    call: HttpCall
    limit: asyncio.TimerHandle | None = None


class SglangEngine(ServerAdapter):
    """Adapter for one SGLang server; an `Engine`, `Versioned`, `Pausable` and `Updatable`.

    It samples by `/generate`, and from messages with images by the chat route. A server that was
    started with `--enable-return-routed-experts` is asked for them.
    """

    def __init__(self, base_url: str, **options: Unpack[ServerOptions]) -> None:
        super().__init__(base_url, **options)
        self._experts = False
        """True if the server reports the experts of each token."""
        self._calls: dict[str, _Running] = {}
        self._nursery = Nursery(on_error=lambda _error: None)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held = False
        self._closed = False
        self._probing = False
        self._experts_shape: tuple[int, int] | None = None
        self._asks_prompt = False
        """True if the next call requests its prompt's ids at the cost of the prefix cache."""
        self._seeds = True
        self._incremental = False
        self._health_path = "/server_info"
        self.vocab_size: int | None = None
        """Number of ids that the server takes; `None` = not reported."""

    # ---- life

    async def _connect(self) -> EngineInfo:
        about = await self._first("/model_info", "/get_model_info")
        if "model_path" not in about:
            raise EngineError(
                f"the server {self._client.base_url} has no /model_info: is this SGLang, or "
                f"{ROUTER}"
            )
        for self._health_path in ("/server_info", "/get_server_info", "/model_info"):
            if served := await self._client.get(self._health_path, optional=True):
                break
        self.server_version = served.get("version")
        self._incremental = bool(
            served.get("incremental_streaming_output") or served.get("stream_output")
        )
        self._experts = served.get("enable_return_routed_experts") is True
        self._context_length = await self._find_context(served)
        self.version = as_version(about.get("weight_version", "default"), unnamed=self.version)
        await self._find_limits()
        self._probing = self._asks_prompt = True
        try:
            found = await probe(self, assume=self._assumed_mode)
        finally:
            self._probing = False
        report = replace(found, findings=(*self._server_findings(about), *found.findings))
        folder = tokenizer_dir(about.get("tokenizer_path")) or tokenizer_dir(about["model_path"])
        self._experts_shape = experts_shape(read_config(folder))
        info = self._accept(report, folder)
        return replace(info, vocab_size=self.vocab_size or info.vocab_size)

    async def _first(self, *paths: str) -> JSON:
        for path in paths:
            if found := await self._client.get(path, optional=True):
                return found
        return {}

    async def _find_context(self, served: JSON) -> int:
        listed = (await self._client.get("/v1/models", optional=True)).get("data") or []
        models = {str(one.get("id")): one for one in listed if isinstance(one, dict)}
        if self._model and self._model not in models:
            raise EngineError(f"the engine has no model {self._model!r}; it has: {list(models)}")
        self._model = self._model or next(iter(models), "default")
        for length in (models.get(self._model, {}).get("max_model_len"),
                       served.get("context_length"), served.get("max_req_input_len")):  # fmt: skip
            if isinstance(length, int):
                return length
        raise EngineError(
            f"the SGLang server {self._client.base_url} reports no context length of its model"
        )

    async def _find_limits(self) -> None:
        """Find the vocabulary size, and whether seeds are known, by calls that must be refused."""
        bias = {"max_new_tokens": 1, "logit_bias": {str(_BEYOND): 0.0}}
        refused = await self._refusal(bias)
        found = _RANGE.search(refused)
        if found is not None:
            self.vocab_size = int(found[1]) + refused[found.end() - 1 : found.end()].count("]")
        refused = await self._refusal({"max_new_tokens": 1, "top_p": 2.0, "sampling_seed": 1})
        self._seeds = "sampling_seed" not in refused

    async def _refusal(self, sampling: JSON) -> str:
        try:
            await self._client.command(
                "/generate", {"input_ids": [0], "sampling_params": sampling, "stream": False}
            )
        except EngineError as error:
            return str(error)
        return ""

    def _server_findings(self, about: JSON) -> tuple[Finding, ...]:
        streams = "send only new tokens" if self._incremental else "repeat earlier tokens"
        parsers = [about.get("reasoning_parser"), about.get("tool_call_parser")]
        versioned = "weight_version" in about
        return (
            Finding.note("server", f"SGLang {self.server_version or 'of unknown version'}"),
            Finding.note("route", SglangRoute.GENERATE.path),
            Finding.note("context length", str(self._context_length)),
            Finding.check(
                "vocabulary", ok=self.vocab_size is not None,
                found=f"{self.vocab_size or 'unknown'} ids",
                means="An id beyond the vocabulary ends the server.",
                fix="Check that --tokenizer is the model's own.",
            ),
            Finding.check(
                "streams", ok=self._incremental, found=f"they {streams}",
                means="Long streams come in fewer, larger pieces.",
                fix="Start with --incremental-streaming-output.",
            ),
            Finding.check(
                "version route", ok=versioned,
                found=str(about.get("weight_version")) if versioned else "not reported",
                means="Tokens carry the version that POST /policy set.",
                fix="Use SGLang 0.5 or later.",
            ),
            Finding.note("parsers", "reasoning {}, tools {}".format(*parsers)),
        )  # fmt: skip

    async def health(self) -> None:
        """Check by its own route that the server's scheduler answers, without sampling.

        Raises `EngineError`.
        """
        await self._client.get(self._health_path)

    async def settled(self) -> None:
        """Return when the server has been sent the aborts of all calls whose callers went away."""
        await self._nursery.ended()

    async def aclose(self) -> None:
        """End all calls and close all connections."""
        self._closed = True
        for running in list(self._calls.values()):
            running.call.abort()
        await self._nursery.cancel()
        await self._client.aclose()

    async def abort(self, request_id: str) -> None:
        """Send the server an abort of a call, whose sampled tokens are kept.

        Closes the connection after `ABORT_S`.
        """
        running = self._calls.get(request_id)
        if running is None:
            return
        loop = asyncio.get_running_loop()
        if not await self._tell_abort(running.rid):
            running.call.abort()
        elif running.limit is None and self._calls.get(request_id) is running:
            running.limit = loop.call_later(ABORT_S, running.call.abort)

    async def _tell_abort(self, rid: str) -> bool:
        try:
            async with asyncio.timeout(ABORT_S):
                return await self._client.command("/abort_request", {"rid": rid})
        except (EngineError, TimeoutError):
            return False

    # ---- weights

    async def pause(self, mode: PauseMode) -> bool:
        """Pause the server's sampling; `False` if it has no route for that.

        `keep` is SGLang's `retract`: caches of the old weights are recomputed. `wait` waits for the
        calls of this adapter only.
        """
        self._open.clear()
        try:
            if mode == "wait":
                await self._idle.wait()
            theirs = {"abort": "abort", "keep": "retract", "wait": "retract"}[mode]
            self._held = await self._client.command("/pause_generation", {"mode": theirs})
        finally:
            if not self._held:
                self._open.set()
        return self._held

    async def resume(self) -> None:
        """Continue the server's sampling after a pause."""
        await self._client.command("/continue_generation", {})
        self._held = False
        self._open.set()

    async def update_weights(self, source: str | Path, version: int) -> None:
        """Load the weights of a folder on the server's machine; see `Updatable.update_weights`.

        Sampling is paused meanwhile, unless it already is. Raises `EngineError` if the server
        refuses them.
        """
        if is_adapter(source):
            raise EngineError(
                f"{source} is a LoRA adapter, and Bridle loads none into SGLang: sample with vLLM "
                "or the embedded engine, or train all weights"
            )
        held = self._held or not await self.pause("keep")
        body = {"model_path": str(source), "weight_version": str(version)}
        try:
            if not await self._client.command("/update_weights_from_disk", body):
                raise EngineError(
                    f"the SGLang server {self._client.base_url} takes no weights: it has no route "
                    "/update_weights_from_disk"
                )
            self.version = version
        finally:
            if not held:
                await self.resume()

    # ---- sampling

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Sample one reply; in one chunk unless asked to stream, or on the chat route.

        Errors are those of `VllmEngine.generate`.
        """
        self._check(request)
        await self._open.wait()
        # A prefix of another call's id would abort that call as well.
        running = _Running(f"{request.request_id}-{uuid4().hex}", HttpCall())
        self._calls[request.request_id] = running
        self._idle.clear()
        length = len(request.prompt) if self._token_in and not request.by_messages else None
        reading = Reading(
            length,
            self.version,
            strict=self._strict,
            experts_from=request.experts_from if self._experts else 0,
            experts_shape=self._experts_shape,
        )
        ended = False
        try:
            async with aclosing(self._answers(request, running)) as answers:
                async for several in answers:
                    for chunk in join_chunks(self._read(several, reading)):
                        ended = chunk.finish_reason is not None
                        yield chunk
                        if ended:
                            return
            raise CutError("the engine closed the stream without a finish reason")
        except AbortedError:
            ended = True
            yield self._aborted(reading)
        finally:
            self._forget(request.request_id, running, ended=ended)

    def _check(self, request: GenerateRequest) -> None:
        size, room = len(request.prompt), self._context_length - len(request.prompt)
        if room < (request.sampling.max_tokens or 1):
            raise ContextOverflowError(size, self._context_length, request.sampling.max_tokens)
        if self.vocab_size is not None:
            check_vocabulary(request.prompt.array(), self.vocab_size)

    def _ask(self, request: GenerateRequest) -> Ask:
        return Ask(
            model=self._model,
            room=self._context_length - len(request.prompt),
            seeds=self._seeds,
            incremental=self._incremental,
            prompt=self._asks_prompt,
            experts=self._experts and not self._probing,
        )

    async def _answers(
        self, request: GenerateRequest, running: _Running
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the JSON of the reply's pieces, those that arrived together as one list."""
        route = SglangRoute.CHAT if request.by_messages else SglangRoute.GENERATE
        body = call_body(route, request, running.rid, self._ask(request))
        size = len(request.prompt)
        if not request.stream or route is SglangRoute.CHAT:
            yield [await self._client.post(route.path, body, running.call, prompt_tokens=size)]
            return
        stream = self._client.stream(route.path, body, running.call, prompt_tokens=size)
        async with aclosing(stream) as events:
            async for several in events:
                yield several

    def _read(self, answers: list[bytes], reading: Reading) -> Iterator[GenerateChunk]:
        """Yield the pieces that have tokens, prompt ids or an end."""
        for answer in answers:
            chunk = self._checked(reading.read(answer), reading)
            ended = chunk.finish_reason is not None
            if ended or len(chunk.output_ids) or chunk.prompt_ids_json is not None:
                yield chunk

    def _checked(self, chunk: GenerateChunk, reading: Reading) -> GenerateChunk:
        """Check a chunk; drops the server's text unless it is wanted. Raises `GarbledError` without
        ids.
        """
        stopped = chunk.finish_reason is FinishReason.STOP
        if self._strict and stopped and not reading.has_ids:
            raise GarbledError("the engine's reply has no token ids")
        return chunk if self.gives_text else replace(chunk, reply=None)

    def _aborted(self, reading: Reading) -> GenerateChunk:
        return GenerateChunk.aborted(spans_of(self.version, reading.count))

    def _forget(self, request_id: str, running: _Running, *, ended: bool) -> None:
        self._asks_prompt = False  # the probe's later calls ask for what every call asks
        del self._calls[request_id]
        if running.limit is not None:
            running.limit.cancel()
        if not self._calls:
            self._idle.set()
        if not ended and not self._closed:
            # The server looks for clients that went away only every few seconds.
            self._nursery.start(self._tell_abort(running.rid), name=f"abort {running.rid}")
