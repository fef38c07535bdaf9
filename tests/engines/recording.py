"""Engines of tests: one that answers at once, and one that keeps what it was asked."""

from collections.abc import AsyncGenerator

import numpy as np

from bridle.engines.base import Engine, EngineInfo, GenerateChunk, GenerateRequest
from bridle.scripted.engine import scripted_logprobs
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import FinishReason, LogprobMode, VersionSpan


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
        self.output_ids = np.append(body, np.int32(self._tokenizer.end_id)).astype(np.int32)
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


class RecordingEngine:
    """Passes every call on to another engine and keeps the requests, oldest first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.closed_early: list[str] = []
        """Request ids whose iterator was closed before its last chunk."""
        self.ended: list[str] = []
        """Request ids whose iterator has ended, in any way."""

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
            self.ended.append(request.request_id)
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
