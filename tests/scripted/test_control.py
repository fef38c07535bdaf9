import asyncio
import json

import aiohttp
import numpy as np
import pytest
from tests.engines.recording import InstantEngine, RecordingEngine

from bridle.engines.adapter import as_version
from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.engines.vllm import VllmEngine
from bridle.errors import EngineError
from bridle.scripted.server import Control, EngineServer
from bridle.testing import scripted_engine
from bridle.types import FinishReason, Sampling


@pytest.fixture
async def served():
    """Makes (server, post) pairs for engines; all end with the test."""
    opened = []

    async def make(engine):
        server = EngineServer(engine)
        await server.__aenter__()
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        opened.append((server, session))

        async def ask(path, body=None, method="POST"):
            data = None if body is None else json.dumps(body).encode()
            async with session.request(method, server.url + path, data=data) as response:
                return response.status, await response.json()

        return server, ask

    yield make
    for server, session in opened:
        await session.close()
        await server.__aexit__()


def request(name="r", **fields):
    return GenerateRequest(name, ArrayIds(np.array([1, 2, 3])), Sampling(), **fields)


async def collect(chunks):
    return [chunk async for chunk in chunks]


async def running(engine, count=1):
    """Wait until `count` calls have reached the engine."""
    async with asyncio.timeout(15):
        while len(engine.requests) < count:  # noqa: ASYNC110 - the far side has no event
            await asyncio.sleep(0.005)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_pause_with_mode_abort_aborts_running_calls_and_refuses_new_ones(served):
    engine = RecordingEngine(
        scripted_engine(
            [{"content": "late", "delay_s": 60}],
            conversations=[{"when": {"user_contains": "quick"}, "turns": [{"content": "quick"}]}],
        )
    )
    _, ask = await served(engine)
    quick = {"messages": [{"role": "user", "content": "quick"}]}
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask("/v1/chat/completions", CHAT))
        await running(engine)
        assert await ask("/pause?mode=abort") == (200, {"status": "paused"})
        assert await ask("/is_paused", method="GET") == (200, {"is_paused": True})
        status, refusal = await ask("/v1/chat/completions", quick)
        assert (status, refusal["error"]["type"]) == (503, "ServiceUnavailable")
        assert len(engine.requests) == 1
        assert await ask("/resume") == (200, {"status": "resumed"})
    assert first.result()[1]["choices"][0]["finish_reason"] == "abort"
    assert (await ask("/v1/chat/completions", quick))[1]["choices"][0]["finish_reason"] == "stop"
    assert await ask("/is_paused", method="GET") == (200, {"is_paused": False})


async def test_pause_with_mode_wait_returns_when_all_calls_have_ended(served):
    engine = RecordingEngine(scripted_engine([{"content": "x", "delay_s": 0.1}]))
    _, ask = await served(engine)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(ask("/v1/chat/completions", CHAT))
        await running(engine)
        assert (await ask("/pause?mode=wait"))[0] == 200
        assert len(engine.ended) == 1
    assert call.result()[1]["choices"][0]["finish_reason"] == "stop"


async def test_pause_with_mode_keep_stops_a_stream_between_chunks():
    engine = scripted_engine([{"content": "word " * 40}])
    control = Control(engine)
    chunks = control.chunks(request(stream=True))
    first = await anext(chunks)
    await control.pause("keep")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(chunks)
    assert len(first.output_ids) == 8


class Waiting:
    """A scripted engine whose calls wait for its sign."""

    def __init__(self):
        self._inner = scripted_engine([{"content": "x"}])
        self.sign = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def generate(self, request):
        await self.sign.wait()
        async for chunk in self._inner.generate(request):
            yield chunk


async def test_a_call_completes_after_pause_with_mode_keep_and_resume(served):
    inside = Waiting()
    engine = RecordingEngine(inside)
    _, ask = await served(engine)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(ask("/v1/chat/completions", CHAT))
        await running(engine)
        await ask("/pause?mode=keep")
        inside.sign.set()
        await asyncio.sleep(0.1)
        assert not call.done()
        await ask("/resume")
    assert call.result()[1]["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize("ids", [["mine"], ["chatcmpl-mine"], None])
async def test_abort_requests_aborts_calls_by_request_id_or_all(served, ids):
    engine = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    _, ask = await served(engine)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(ask("/v1/chat/completions", {**CHAT, "request_id": "mine"}))
        await running(engine)
        await ask("/abort_requests", {"request_ids": ["another"]})
        assert engine.aborted == []
        await ask("/abort_requests", None if ids is None else {"request_ids": ids})
    reply = call.result()[1]
    assert reply["id"] == "chatcmpl-mine"
    assert reply["choices"][0]["finish_reason"] == "abort"


async def test_two_calls_with_one_request_id_get_different_engine_ids(served):
    inside = Waiting()
    engine = RecordingEngine(inside)
    _, ask = await served(engine)
    body = {**CHAT, "request_id": "same"}
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(ask("/v1/chat/completions", body)) for _ in range(2)]
        await running(engine, 2)
        inside.sign.set()
    assert [call.result()[0] for call in calls] == [200, 200]
    assert len({one.request_id for one in engine.requests}) == 2


async def test_the_weight_version_is_read_and_set_over_http(served):
    _, ask = await served(scripted_engine([{"content": "x"}]))
    assert await ask("/weight_info", method="GET") == (200, {"weight_version": "0"})
    assert (await ask("/update_weight_version", {"new_version": "5"}))[0] == 200
    assert await ask("/weight_info", method="GET") == (200, {"weight_version": "5"})
    body = {**CHAT, "return_weight_versions": True}
    _, reply = await ask("/v1/chat/completions", body)
    assert reply["choices"][0]["weight_versions"][0]["version"] == "5"


async def test_setting_the_version_of_an_unversioned_engine_gives_501(served):
    _, ask = await served(InstantEngine())
    assert (await ask("/update_weight_version", {"new_version": 1}))[0] == 501


class Trained:
    """An engine that takes weights, for the routes that tell it to."""

    def __init__(self):
        self._inner = scripted_engine([{"content": "x"}])
        self.loaded = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def set_version(self, version):
        await self._inner.set_version(version)

    async def update_weights(self, source, version):
        self.loaded.append((source, version))


async def test_weights_are_loaded_from_a_folder_by_vllm_s_reload_weights_rpc(served, tmp_path):
    engine = Trained()
    server, ask = await served(engine)
    load = {"method": "reload_weights", "kwargs": {"weights_path": "folder"}}
    assert (await ask("/collective_rpc", load))[0] == 200
    assert engine.loaded == [("folder", 0)]
    for body in ({"method": "reload_weights"}, {**load, "method": "sleep"}):
        assert (await ask("/collective_rpc", body))[0] == 400
    (tmp_path / "model.safetensors").touch()
    # The adapter does all of it.
    adapter = VllmEngine(server.url)
    try:
        await adapter.start()
        assert await adapter.pause("abort")
        await adapter.update_weights(tmp_path, 3)
        await adapter.resume()
        assert engine.loaded[-1] == (str(tmp_path), 0)
        assert (engine.version, (await adapter.start()).version) == (3, 3)
        chunks = await collect(adapter.generate(request()))
        assert {span.version for span in chunks[-1].versions} == {3}
    finally:
        await adapter.aclose()


async def test_loading_weights_into_an_engine_without_weights_gives_501(served):
    server, ask = await served(scripted_engine([{"content": "x"}]))
    load = {"method": "reload_weights", "kwargs": {"weights_path": "folder"}}
    assert (await ask("/collective_rpc", load))[0] == 501
    adapter = VllmEngine(server.url)
    try:
        with pytest.raises(EngineError, match="takes no weights"):
            await adapter.update_weights("folder", 1)
    finally:
        await adapter.aclose()


async def test_closing_a_call_s_stream_early_closes_the_engine_s_iterator():
    engine = RecordingEngine(scripted_engine([{"content": "word " * 40}]))
    control = Control(engine)
    chunks = control.chunks(request("r", stream=True))
    await anext(chunks)
    await chunks.aclose()
    assert engine.closed_early == ["r-1"]
    async with asyncio.timeout(15):
        await control.pause("wait")
    control.resume()
    (chunk,) = await collect(control.chunks(request("s")))
    assert chunk.finish_reason is FinishReason.STOP


def test_a_weight_version_that_is_no_number_is_refused():
    assert (as_version("12"), as_version(3)) == (12, 3)
    with pytest.raises(EngineError, match="'v2' is not a number"):
        as_version("v2")


def test_vllm_s_version_default_is_read_as_the_caller_s_known_version():
    """vLLM calls its weights `default` until it gets a version (seen on 0.32.0)."""
    assert as_version("default", unnamed=4) == 4
    assert as_version("5", unnamed=4) == 5
    with pytest.raises(EngineError, match="number the versions"):
        as_version("default")
    with pytest.raises(EngineError, match="'v2' is not a number"):
        as_version("v2", unnamed=4)
