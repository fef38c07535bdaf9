"""An engine that samples token by token and waits for a sign, so what a client reads is live."""

import asyncio
from typing import Any

import numpy as np
from tests.gateway.house import scripted

from bridle.engines.base import GenerateChunk

CALL = {"name": "bash", "arguments": {"command": "ls"}}
OTHER = {"name": "bash", "arguments": {"command": "pwd"}}
TURN = {"reasoning": "I need both.", "content": "I look.", "tool_calls": [CALL, OTHER]}


class Gated:
    """A scripted engine, one token per chunk; token `gate` (from the end if negative) waits.

    A reply that has no such token is not held. `error` is raised in its place. `sign` lets it go
    on; `waits` tells that a call stands there, `closed` that its caller has left.
    """

    def __init__(self, *turns: Any, gate: int = -1, error: Exception | None = None, **script: Any):
        self._inner = scripted(*turns, **script)
        self._gate = gate
        self.error = error
        self.sign = asyncio.Event()
        self.waits = asyncio.Event()
        self.closed = asyncio.Event()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request):
        self.asked += 1
        whole = [chunk async for chunk in self._inner.generate(request)]
        ids = np.concatenate([chunk.output_ids for chunk in whole])
        logprobs = np.concatenate([chunk.logprobs for chunk in whole])
        gate = self._gate if self._gate >= 0 else len(ids) + self._gate
        try:
            for i in range(len(ids)):
                if i == gate:
                    self.waits.set()
                    await self.sign.wait()
                    if self.error is not None:
                        raise self.error
                last = whole[-1] if i == len(ids) - 1 else None
                yield GenerateChunk(
                    ids[i : i + 1],
                    logprobs[i : i + 1],
                    finish_reason=last.finish_reason if last else None,
                    stop_text=last.stop_text if last else None,
                    versions=last.versions if last else (),
                )
                await asyncio.sleep(0)
        finally:
            self.closed.set()
