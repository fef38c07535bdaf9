"""An engine whose streamed replies end only after their clients were sent a part of them.

So a program that does its work with it has read its replies as they were sampled, and not whole.
"""

import asyncio
from dataclasses import replace
from typing import Any

from bridle.engines.base import Engine, GenerateRequest
from bridle.gateway.app import GatewayServer
from bridle.gateway.live import LiveReply

PATIENCE_S = 60
"""After this a reply that nobody was sent a part of fails."""
GLANCE_S = 0.01


class Shown:
    """Passes everything on to another engine, but holds the last token of each live reply."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gateway: GatewayServer | None = None
        """Whose replies they are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Any:
        async for chunk in self._engine.generate(request):
            live = self._reply(request)
            if live is None or chunk.finish_reason is None:
                yield chunk
                continue
            ids, logprobs = chunk.output_ids, chunk.logprobs
            begun = replace(chunk, output_ids=ids[:-1], logprobs=logprobs[:-1], finish_reason=None)
            yield replace(begun, stop_text=None, versions=())
            async with asyncio.timeout(PATIENCE_S):
                while not live.sent.text:  # noqa: ASYNC110 - a test only looks
                    await asyncio.sleep(GLANCE_S)
            yield replace(chunk, output_ids=ids[-1:], logprobs=logprobs[-1:], prompt_ids_json=None)

    def _reply(self, request: GenerateRequest) -> LiveReply | None:
        """The reply to be; `None` = it is not live."""
        if self.gateway is None or request.session_id is None:
            return None
        session = self.gateway._registry.get(request.session_id)
        return None if session is None else session.calls[request.request_id].live
