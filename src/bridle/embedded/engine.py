"""The asyncio face of the embedded engine.

All work happens in one thread (`bridle.embedded.batch`); here a call is checked, handed
over, and awaited. Logprobs are of the distribution that was sampled from (`LogprobMode.PROCESSED`);
at temperature 0 that is a single point and they are 0.0. Sampling fields that are `None` mean
temperature 1, all tokens, no penalty, no seed, and as many tokens as the context leaves.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.embedded.call import BatchedCall, Mailbox
from bridle.engines.base import EngineInfo, GenerateChunk, GenerateRequest
from bridle.engines.ids import check_vocabulary
from bridle.errors import ContextOverflowError, EngineError, install_extra
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import JSON, Ids, LogprobMode, Sampling

if TYPE_CHECKING:
    from bridle.embedded.batch import BatchScheduler
    from bridle.embedded.model import LoadedModel


class EmbeddedEngine:
    """Samples from the transformers model in `model_dir`, in this process.

    Implements `Engine` and `Versioned` of `bridle.engines.base`. One engine may be used from
    several event loops.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_batch: int = 64,
        max_context: int | None = None,
        cache_bytes: int | None = None,
        step_tokens: int = 512,
        version: int = 0,
    ) -> None:
        """Keep the options; `start` loads the model.

        Args:
            model_dir: Folder with config, weights and tokenizer, as `save_pretrained` writes it.
            device: `auto` (a GPU when there is one), `cpu`, `cuda`, `cuda:1`...
            dtype: `auto` (float32 on a CPU, the checkpoint's own elsewhere) or torch's name of one.
            max_batch: Most calls that are computed at once; more wait.
            max_context: Most tokens of one call, prompt and output; `None` = the model's own limit.
            cache_bytes: Memory for keys and values of running calls (3/4) and of the prefix cache
                (1/4); `None` = a quarter of the free memory of a CPU, 0.6 of a GPU's. It also
                limits the context.
            step_tokens: Most prompt tokens computed in one step; it bounds the delay of others.
            version: Policy version of the weights in `model_dir`.
        """
        self._folder = Path(model_dir)
        self._options = {
            "device": device,
            "dtype": dtype,
            "max_batch": max_batch,
            "max_context": max_context,
            "cache_bytes": cache_bytes,
        }
        self._max_batch = max_batch
        self._step_tokens = step_tokens
        self._version = version
        self._ready: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._loaded: LoadedModel | None = None
        self._batch: BatchScheduler | None = None
        self._calls: dict[str, BatchedCall] = {}
        self._failure: EngineError | None = EngineError("the embedded engine is not started")

    async def start(self) -> EngineInfo:
        """Load the model in the engine's thread; idempotent, also while it loads.

        Raises `EngineError` saying what is wrong with the folder or that torch is missing.
        """
        if self._ready is None:
            if importlib.util.find_spec("torch") is None:
                raise EngineError(
                    f"the embedded engine needs torch: run {install_extra('embedded')}"
                )
            self._ready = Future()
            self._thread = threading.Thread(target=self._main, name="bridle-embedded", daemon=True)
            self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._ready))
        return self.info

    @property
    def info(self) -> EngineInfo:
        """Return the engine's capabilities with the current version of its weights."""
        batch, loaded = self._working()
        return EngineInfo(
            model=self._folder.name,
            context_length=loaded.context_length,
            logprob_mode=LogprobMode.PROCESSED,
            token_in=True,
            version=batch.version,
            eos_token_ids=loaded.eos_token_ids,
            tokenizer_dir=str(self._folder),
        )

    def stats(self) -> JSON:
        """Return counters since the start (calls, steps, tokens) and the decoder's name."""
        batch, loaded = self._working()
        prefixes = loaded.decoder.prefixes
        return {
            **asdict(batch.counters),
            "remembered": len(prefixes),
            "remembered_bytes": prefixes.size_bytes,
            "decoder": loaded.decoder.name,
            "version": batch.version,
        }

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """Return the prompt ids that the model folder's own chat template makes of messages."""
        tokenizer = await asyncio.to_thread(load_tokenizer, str(self._folder))
        return await asyncio.to_thread(tokenizer.prompt_ids, messages, tools, arguments)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Sample one reply; see `Engine.generate`.

        Chunks come at the first token, every 20 ms, and at the end. Raises `EngineError` for a call
        that can't be sampled (status 400: an id beyond the vocabulary, a grammar, a value out of
        range; 500: logits that are not numbers; 507: no memory for this call alone),
        `ContextOverflowError` for a prompt that leaves no room, and `EngineError` without a status
        when the engine has failed or was closed.
        """
        batch, loaded = self._working()
        mailbox = Mailbox()
        call = self._checked(request, loaded, mailbox)
        self._calls[request.request_id] = call
        try:
            if not batch.post(partial(batch.submit, call)):
                self._working()
            while True:
                message = await mailbox.messages.get()
                if isinstance(message, EngineError):
                    raise message
                yield message
                if message.finish_reason is not None:
                    return
        finally:
            del self._calls[request.request_id]
            batch.post(partial(batch.abort, call, silently=True))

    def _checked(
        self, request: GenerateRequest, loaded: LoadedModel, mailbox: Mailbox
    ) -> BatchedCall:
        """Make the call of a request; raises the error that `generate` documents."""
        sampling = request.sampling
        if request.request_id in self._calls:
            raise EngineError(
                f"request {request.request_id!r} is already in flight; give each request an id of "
                "its own",
                status=400,
            )
        if request.grammar is not None:
            raise EngineError(
                "the embedded engine cannot constrain samples by a grammar: use another engine, "
                "such as vLLM",
                status=400,
            )
        prompt = request.prompt.array()
        if len(prompt) == 0:
            raise EngineError("the prompt is empty; it needs at least one token id", status=400)
        check_vocabulary(prompt, loaded.vocab_size)
        _check_sampling(sampling)
        room = loaded.context_length - len(prompt)
        if room < 1:
            raise ContextOverflowError(len(prompt), loaded.context_length, sampling.max_tokens)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return BatchedCall(
            request.request_id,
            prompt,
            sampling,
            experts_from=request.experts_from,
            limit=limit,
            stop_ids=frozenset(loaded.eos_token_ids).union(sampling.stop_token_ids),
            decode=loaded.decode,
            mailbox=mailbox,
        )

    async def abort(self, request_id: str) -> None:
        """End a call; unknown and finished ids are ignored."""
        call = self._calls.get(request_id)
        if call is not None and self._batch is not None:
            self._batch.post(partial(self._batch.abort, call, silently=False))

    async def update_weights(self, source: str | Path | Mapping[str, Any], version: int) -> None:
        """Replace the weights between two steps; returns when the new ones are in use.

        `source` is a state dict (tensors on any device, copied before this returns) or a model
        folder. Calls in flight continue: their later tokens are sampled under `version`, as the
        spans of their last chunk say, over keys and values that the old weights computed. The
        prefix cache is cleared, so every later call is computed under `version` alone. Raises
        `EngineError` if names or shapes do not fit; the old weights stay then.
        """
        batch, loaded = self._working()
        from bridle.embedded.model import weights_of

        if isinstance(source, str):
            source = Path(source)
        weights = await asyncio.to_thread(weights_of, source, loaded.model)
        await asyncio.wrap_future(batch.ask(partial(batch.update, weights, version)))

    async def set_version(self, version: int) -> None:
        """Set the policy version of the present weights."""
        batch, _ = self._working()
        await asyncio.wrap_future(batch.ask(partial(batch.update, {}, version)))

    async def health(self) -> None:
        """Raise `EngineError` with the reason unless the engine can sample now."""
        self._working()

    async def aclose(self) -> None:
        """End the thread and free the model; calls in flight get an `EngineError`. Idempotent."""
        if self._thread is None:
            return
        self._failure = EngineError("the embedded engine is closed")
        if self._batch is not None:
            self._batch.post(None)
        await asyncio.to_thread(self._thread.join)
        self._loaded = self._batch = self._thread = None

    def _working(self) -> tuple[BatchScheduler, LoadedModel]:
        if self._failure is not None:
            raise self._failure
        assert self._batch is not None
        assert self._loaded is not None
        return self._batch, self._loaded

    def _main(self) -> None:
        """Load, then sample until the end (the thread); an uncaught error fails all calls."""
        assert self._ready is not None
        try:
            from bridle.embedded.batch import BatchScheduler
            from bridle.embedded.model import load

            self._loaded = load(self._folder, **self._options)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - raised by `start`
            self._failure = _failure(error)
            self._ready.set_exception(self._failure)
            return
        batch = BatchScheduler(
            self._loaded,
            max_batch=self._max_batch,
            step_tokens=self._step_tokens,
            version=self._version,
        )
        self._batch, self._failure = batch, None
        self._ready.set_result(None)
        try:
            batch.run()
        except BaseException as error:  # noqa: BLE001 - sent to all callers and raised by `health`
            self._failure = _failure(error)
        finally:
            batch.end(self._failure or EngineError("the embedded engine is closed"))


def _failure(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the embedded engine has failed: {type(error).__name__}: {error}")


def _check_sampling(sampling: Sampling) -> None:
    """Refuse values that define no distribution."""
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise EngineError(
            f"temperature must be a number of at least 0, not {temperature}", status=400
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, not {top_p}", status=400)
    if top_k is not None and top_k < -1:
        raise EngineError(f"top_k must be -1, 0 or more, not {top_k}", status=400)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, not {sampling.max_tokens}", status=400)
