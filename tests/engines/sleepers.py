"""Servers of both engines' shapes that crash when they are touched while their memory is released.

A request while it sleeps ends a server. SGLang's `/release_memory_occupation` also ends it while a
request is under way (`weight_updater.py` of 0.5.23). vLLM's `/sleep` ends such requests before
(`v1/engine/core.py` of 0.32), which matters because a call is aborted by closing its connection.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from aiohttp import web
from tests.engines.sglang_server import SglangServer

from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings
from bridle.engines.sglang import SglangEngine
from bridle.engines.vllm import VllmEngine
from bridle.engines.vllm_routes import VllmRoute
from bridle.scripted.engine import PROBE_PREFIX, ScriptedEngine
from bridle.scripted.script import make_script
from bridle.scripted.server import EngineServer


class Marked(ScriptedEngine):
    """Its tokens' logprobs tell the version v of the weights that sampled them: -v - 0.5."""

    weights = 0

    async def set_version(self, version):
        self.weights = version
        await super().set_version(version)

    async def update_weights(self, _source, version):
        await self.set_version(version)

    async def generate(self, request):
        probed = request.request_id.startswith(PROBE_PREFIX)
        async for chunk in super().generate(request):
            reply = np.full_like(chunk.logprobs, -self.weights - 0.5)
            yield chunk if probed else replace(chunk, logprobs=reply)


class Sleeper(EngineServer):
    """A server that its trainer can put to sleep."""

    asleep = dead = False
    running = 0

    def __init__(self, engine):
        super().__init__(engine)
        self.engine = engine

    def _app(self):
        app = super()._app()
        app.middlewares.append(self._guarded)
        self.touches = []
        return app

    @web.middleware
    async def _guarded(self, request, handler):
        if self.asleep:
            self.touch(request.path)
        if self.dead:
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        self.running += 1
        try:
            return await handler(request)
        finally:
            self.running -= 1

    def touch(self, what):
        self.touches.append(what)
        self.dead = True

    async def sleep(self):
        if self.running:
            self.touch(f"{self.running} requests under way")
        self.asleep = True

    async def wake(self, version):
        """Have new weights, loaded by the trainer, and serve again."""
        await self.engine.set_version(version)
        self.asleep = False


class VllmSleeper(Sleeper):
    async def sleep(self):
        self.asleep = True
        for _ in range(100):
            if self.running:
                await asyncio.sleep(0.002)
        await super().sleep()


class SglangSleeper(Sleeper, SglangServer):
    pass


@dataclass(frozen=True)
class Kind:
    """A shape of sleeping servers, and how it is read."""

    server: type
    adapter: type
    reading: dict = field(default_factory=dict)


KINDS = {
    # Its replies tell no versions: they are those that the trainer named.
    "vllm chat": Kind(VllmSleeper, VllmEngine, {"route": VllmRoute.CHAT}),
    "vllm generate": Kind(VllmSleeper, VllmEngine, {"route": VllmRoute.GENERATE}),
    "sglang": Kind(SglangSleeper, SglangEngine),
}
QUICK = {"backoff_s": 0.01, "max_backoff_s": 0.02, "health_every_s": 0.02, "patience_s": 15}


@asynccontextmanager
async def asleep_servers(kind, *turns, count=2):
    """Servers of a kind that play these turns in every conversation."""
    script = make_script({"conversations": [{"turns": list(turns)}]}, "test")
    servers = [KINDS[kind].server(Marked(script)) for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        for one in servers:
            group.create_task(one.__aenter__())
    try:
        yield servers
    finally:
        for one in servers:
            await one.__aexit__(None, None, None)


def spec(kind, url):
    return f"sglang:{url}" if kind == "sglang" else url


def pool_of(kind, servers, **settings):
    """A pool of these servers, as a gateway opens one."""

    def replica(url):
        def reopen():
            return KINDS[kind].adapter(url, **KINDS[kind].reading)

        return Replica(spec(kind, url), reopen(), reopen)

    replicas = [replica(one.url) for one in servers]
    return EnginePool(replicas, settings=RoutingSettings(**{**QUICK, **settings}))


def sampled_under(exchange):
    """The version whose weights sampled each token, and the one that the exchange says."""
    said = [0] * len(exchange.output_ids)
    for span in exchange.versions:
        said[span.start : span.end] = [span.version] * (span.end - span.start)
    return [int(-one) for one in exchange.logprobs.tolist()], said
