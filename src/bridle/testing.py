"""Shipped fakes: small real implementations for tests and benchmarks, ours and yours.

Nothing in Bridle imports this file.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bridle.engines.base import Engine, EngineInfo, GenerateChunk, GenerateRequest
from bridle.engines.script import make_script
from bridle.engines.scripted import ScriptedEngine, scripted_logprobs
from bridle.engines.tokenizer import load_tokenizer
from bridle.types import JSON, FinishReason, LogprobMode, VersionSpan

if TYPE_CHECKING:
    from bridle.types import Ids

T = TypeVar("T")


def scripted_engine(
    turns: Sequence[JSON] = (),
    *,
    conversations: Sequence[JSON] = (),
    tokenizer: str | None = None,
    **fields: object,
) -> ScriptedEngine:
    """A scripted engine from Python values in place of a file.

    `turns` play for every request that none of `conversations` fits; `fields` are the script's
    other fields (`model`, `context_length`). Raises `ConfigError` as a file would.
    """
    rest = [{"turns": list(turns)}] if turns else []
    script = make_script({"conversations": [*conversations, *rest], **fields}, "script")
    return ScriptedEngine(script, tokenizer=load_tokenizer(tokenizer))


class InstantEngine:
    """Answers every prompt at once with the same ids, and looks at nothing: a benchmark's engine.

    Implements `bridle.engines.base.Engine`. Its reply is `tokens` ids long, end token included,
    and its text is what a real tokenizer makes of it.
    """

    def __init__(
        self, tokens: int = 128, *, tokenizer: str | None = None, context_length: int = 1_000_000
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self._context_length = context_length
        word = self._tokenizer.encode(" word")
        body = np.resize(word, tokens - 1)
        self.output_ids: Ids = np.append(body, np.int32(self._tokenizer.end_id)).astype(np.int32)
        self._logprobs = scripted_logprobs(self.output_ids)

    async def start(self) -> EngineInfo:
        return EngineInfo(
            model="instant",
            context_length=self._context_length,
            logprob_mode=LogprobMode.RAW,
            token_in=True,
            version=0,
            eos_token_ids=(self._tokenizer.end_id,),
            tokenizer_dir=str(self._tokenizer.folder),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """One chunk, whole, at once."""
        yield GenerateChunk(
            output_ids=self.output_ids,
            logprobs=self._logprobs,
            finish_reason=FinishReason.STOP,
            versions=(VersionSpan(0, 0, len(self.output_ids)),),
            prompt_ids_json=request.prompt.json(),
        )

    async def abort(self, request_id: str) -> None:
        """Too late: every call has ended."""

    async def health(self) -> None:
        """Always well."""

    async def aclose(self) -> None:
        """Nothing is held."""


def instant_engine(tokens: int = 128, *, tokenizer: str | None = None) -> InstantEngine:
    """An engine that answers at once with `tokens` ids; see `InstantEngine`."""
    return InstantEngine(tokens, tokenizer=tokenizer)


class RecordingEngine:
    """Passes every call on to another engine and keeps the requests, oldest first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.closed_early: list[str] = []
        """Request ids whose iterator was closed before its last chunk."""

    async def start(self) -> EngineInfo:
        return await self.engine.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The other engine's chunks."""
        self.requests.append(request)
        ended = False
        try:
            async for chunk in self.engine.generate(request):
                ended = chunk.finish_reason is not None
                yield chunk
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                self.closed_early.append(request.request_id)

    async def abort(self, request_id: str) -> None:
        """Noted and passed on."""
        self.aborted.append(request_id)
        await self.engine.abort(request_id)

    async def health(self) -> None:
        """The other engine's."""
        await self.engine.health()

    async def aclose(self) -> None:
        """Closes the other engine."""
        await self.engine.aclose()


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can jump to the next timer in place of waiting for it.

    Within `jumping` hours of waiting take as long as the work between them, and every run sees the
    same times. What would run in a thread runs at once, on the loop. Only for code that waits for
    timers alone: time would jump past the answer of another process or machine.

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(simulation())
    """

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Seconds; stands still while code runs within `jumping`."""
        return self._jumps.now if self._jumps.on else super().time() + self._jumps.ahead

    @contextmanager
    def jumping(self) -> Iterator[None]:
        """Jump from timer to timer inside."""
        jumps, began = self._jumps, self.time()
        self.set_default_executor(_AtOnce())
        jumps.now, jumps.on = began, True
        try:
            yield
        finally:
            jumps.ahead += jumps.now - self._real()
            jumps.on = False

    def _real(self) -> float:
        return super().time() + self._jumps.ahead


class _Jumps(selectors.DefaultSelector):
    """Takes note of how long it would have waited, and does not wait."""

    on = False
    now = 0.0
    ahead = 0.0
    """How far the loop's clock is before the machine's, seconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.on or timeout is None:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += max(timeout, 0)
        return ready


class _AtOnce(ThreadPoolExecutor):
    """Does what it is given before `submit` returns; starts no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401 - as the base
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)
        return done
