"""A scripted engine that stops in the middle of each reply until a file is there.

It is served by a process that a test can kill, stop or pause while every call is under way.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.scripted.engine import PROBE_PREFIX, ScriptedEngine
from bridle.types import FinishReason

FREE = 6
"""Pieces of a streamed reply that are given out before the stop."""


class Paced(ScriptedEngine):
    """Waits for `go` beside its script; `open` takes the script's path."""

    gate: Path

    @classmethod
    def open(cls, target: str, **options: object) -> "Paced":
        engine = super().open(target, **options)  # type: ignore[arg-type]  # passed on as they came
        engine.gate = Path(target).with_name("go")
        return engine

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        probed = request.request_id.startswith(PROBE_PREFIX)
        number = 0
        async for chunk in super().generate(request):
            if not probed and (number >= FREE or not request.stream):
                await self._stand(request.request_id)
            if not request.stream and self._aborted(request.request_id):
                # As vLLM does: what was sampled until then, and no more.
                yield replace(
                    chunk,
                    output_ids=chunk.output_ids[:8],
                    logprobs=chunk.logprobs[:8],
                    finish_reason=FinishReason.ABORT,
                    versions=(replace(chunk.versions[0], end=8),),
                )
                return
            yield chunk
            number += 1

    def _aborted(self, request_id: str) -> bool:
        return request_id in self._calls and self._calls[request_id].is_set()

    async def _stand(self, request_id: str) -> None:
        while not self.gate.exists() and not self._aborted(request_id):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.02)
