"""vLLM's control routes for training, and the calls that they act on.

Source: vLLM 0.33.0, `rl/online/api_router.py` (served there in development mode only): pause,
resume, abort, new weights from a folder and their version. Engines of ours drop what they computed
with old weights by themselves. A pause is kept here, before the engine: new calls
wait, running ones are ended (`abort`), awaited (`wait`) or held where they are (`keep`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias, cast

import msgspec
from aiohttp import web

from bridle.engines import wire
from bridle.engines.base import Engine, GenerateChunk, GenerateRequest, Updatable, Versioned
from bridle.engines.serving import as_version
from bridle.errors import EngineError

PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")
"""What replies put before a request id; accepted before the ids of calls to abort."""

MODES = ("abort", "wait", "keep")

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control:
    """Runs the calls of one engine and answers the routes that steer them.

    `posts` and `gets` are its routes. Single event loop, so no locks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        """Set: new calls may begin."""
        self._open.set()
        self._flowing = asyncio.Event()
        """Set: running calls go on."""
        self._flowing.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: dict[str, str] = {}
        """Engine's request id -> the id the caller gave."""
        self._served = 0
        self.posts: dict[str, Handler] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/update_weight_version": self._update_version,
            "/collective_rpc": self._reload_weights,
            "/reset_prefix_cache": self._nothing_to_reset,
        }
        self.gets: dict[str, Handler] = {
            "/is_paused": self._is_paused,
            "/weight_info": self._weight_info,
        }

    async def chunks(self, call: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The engine's chunks, held while a pause says so. Closing it aborts the call.

        The engine gets an id of its own for the call: two callers may give the same one.
        """
        await self._open.wait()
        self._served += 1
        request = replace(call, request_id=f"{call.request_id}-{self._served}")
        self._calls[request.request_id] = call.request_id
        self._idle.clear()
        try:
            async with aclosing(_closable(self._engine.generate(request))) as chunks:
                async for chunk in chunks:
                    await self._flowing.wait()
                    yield chunk
        finally:
            del self._calls[request.request_id]
            if not self._calls:
                self._idle.set()

    async def abort(self, caller_ids: list[str] | None) -> None:
        """End the calls with these ids; `None` = all."""
        wanted = None if caller_ids is None else {_bare(one) for one in caller_ids}
        for engine_id, caller_id in list(self._calls.items()):
            if wanted is None or caller_id in wanted:
                await self._engine.abort(engine_id)

    async def pause(self, mode: str) -> None:
        """Let new calls wait and do with the running ones as `mode`, one of `MODES`, says."""
        self._open.clear()
        if mode == "keep":
            self._flowing.clear()
        elif mode == "abort":
            await self.abort(None)
        if mode != "keep":
            await self._idle.wait()

    def resume(self) -> None:
        self._flowing.set()
        self._open.set()

    async def version(self, version: int) -> int:
        """Tell the engine the version of its weights; returns it. `EngineError` if it keeps one."""
        if not isinstance(self._engine, Versioned):
            raise EngineError("this engine keeps its own policy version", status=501)
        await self._engine.set_version(version)
        return version

    # ---- routes

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in MODES:
            raise EngineError(f"mode: {mode!r}; known: {', '.join(MODES)}", status=400)
        await self.pause(mode)
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        self.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        return web.json_response({"is_paused": not self._open.is_set()})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        body = await request.read() or b"{}"
        await self.abort(msgspec.json.decode(body, type=wire.AbortRequest).request_ids)
        return web.json_response({"status": "aborted"})

    async def _update_version(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=wire.VersionRequest)
        version = await self.version(as_version(body.new_version))
        return web.json_response({"status": "ok", "weight_version": str(version)})

    async def _reload_weights(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=wire.RpcRequest)
        folder = body.kwargs.get("weights_path")
        if body.method != "reload_weights" or not isinstance(folder, str):
            raise EngineError("only `reload_weights` with its `weights_path` is known", status=400)
        if not isinstance(self._engine, Updatable):
            raise EngineError("this engine takes no weights", status=501)
        info = await self._engine.start()
        await self._engine.update_weights(folder, info.version)
        return web.json_response({"results": [None]})

    async def _nothing_to_reset(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        info = await self._engine.start()
        return web.json_response({"weight_version": str(info.version)})


def _bare(request_id: str) -> str:
    for prefix in PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id


def _closable(chunks: AsyncIterator[GenerateChunk]) -> AsyncGenerator[GenerateChunk, None]:
    """The engine's iterator, which by contract can be closed early."""
    return cast("AsyncGenerator[GenerateChunk, None]", chunks)
