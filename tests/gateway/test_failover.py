"""Real engine processes, killed, stopped and restarted under real clients: one clean reply each."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import types as genai_types
from tests.gateway.house import house, scripted, user

from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import RoutingSettings, make_replica
from bridle.engines.vllm import VllmEngine
from bridle.scripted.server import EngineServer
from bridle.trajectory import rebuild

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
TEXT = " ".join(f"word{number}" for number in range(60))
SETTINGS = {
    "backoff_s": 0.05,
    "max_backoff_s": 0.1,
    "health_every_s": 30,
    "health_timeout_s": 2,
    "patience_s": 40,
}


class Process:
    """`bridle engine` with a paced script."""

    def __init__(self, stack: ExitStack, folder: Path, port: int = 0) -> None:
        script = folder / "script.json"
        script.write_text(json.dumps({"conversations": [{"turns": [{"content": TEXT}]}]}))
        command = [sys.executable, "-m", "bridle.cli", "engine", "--port", str(port)]
        self.popen = stack.enter_context(
            subprocess.Popen(
                [*command, f"tests.engines.paced:Paced:{script}"],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            )
        )
        stack.callback(self.signal, signal.SIGKILL)
        self.url = ""

    def wait(self) -> "Process":
        assert self.popen.stderr is not None
        line = self.popen.stderr.readline()
        (self.url,) = re.findall(r"at (http://\S+?);", line)
        return self

    def signal(self, number: int) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)


class Processes:
    """Starts engine processes; their calls stop in mid-reply while the gate is shut."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder

    def start(self, count: int = 2, port: int = 0) -> list[Process]:
        begun = [Process(self._stack, self._folder, port) for _ in range(count)]
        return [one.wait() for one in begun]

    def gate(self, *, opened: bool) -> None:
        path = self._folder / "go"
        if opened:
            path.touch()
        else:
            path.unlink()


@pytest.fixture
def processes(tmp_path):
    """All of them are gone afterwards."""
    with ExitStack() as stack:
        yield Processes(stack, tmp_path)


@asynccontextmanager
async def gateway(engines, **settings):
    """A gateway over these processes, and its pool."""
    routing = RoutingSettings(**{**SETTINGS, **settings})
    pool = EnginePool([make_replica(one.url, VllmEngine) for one in engines], settings=routing)
    async with house(engine=pool, stream="live") as home:
        yield home, pool


# ---- the official clients


async def chat(caller, *, stream) -> Any:
    async with openai.AsyncOpenAI(
        base_url=caller.handle.base_urls["openai"], api_key=caller.handle.key, max_retries=0
    ) as client:
        if not stream:
            whole = await client.chat.completions.create(model="m", messages=[user("go")])
            return whole.choices[0].message.content
        chunks = await client.chat.completions.create(model="m", messages=[user("go")], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def responses(caller, *, stream) -> Any:
    async with openai.AsyncOpenAI(
        base_url=caller.handle.base_urls["openai"], api_key=caller.handle.key, max_retries=0
    ) as client:
        if not stream:
            return (await client.responses.create(model="m", input="go")).output_text
        async with client.responses.stream(model="m", input="go") as events:
            seen = [event async for event in events]
        assert seen[-1].type in {"response.completed", "response.incomplete"}
        return "".join(event.delta for event in seen if event.type == "response.output_text.delta")


async def messages(caller, *, stream) -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key, max_retries=0
    ) as client:
        asked: Any = {"model": "m", "max_tokens": 4000, "messages": [user("go")]}
        if not stream:
            return (await client.messages.create(**asked)).content[0].text
        async with client.messages.stream(**asked) as events:
            return await events.get_final_text()


async def google(caller, *, stream) -> Any:
    http = httpx2.AsyncClient()
    base = caller.handle.base_urls["google"]
    options = genai_types.HttpOptions(base_url=base, httpx_async_client=http)
    client = genai.Client(api_key=caller.handle.key, http_options=options)
    try:
        if not stream:
            return (await client.aio.models.generate_content(model="m", contents="go")).text
        chunks = await client.aio.models.generate_content_stream(model="m", contents="go")
        return "".join([chunk.text or "" async for chunk in chunks])
    finally:
        await http.aclose()


DIALECTS = (chat, responses, messages, google)


async def each_dialect(home, pool, meanwhile):
    """Every dialect as a stream and as JSON on every replica, all in the middle of their replies
    while `meanwhile` happens; what was captured of each, by dialect and form."""
    asked = []
    for ask in DIALECTS:
        for stream in (True, False):
            for replica in pool.each():
                caller = await home.session()
                pool._router.pick(caller.session_id, [replica])
                asked.append((ask, stream, caller))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(caller, stream=stream)) for ask, stream, caller in asked]
        await under_way(pool, len(tasks), streams=len(tasks) // 2)
        await meanwhile()
    assert [task.result() for task in tasks] == [TEXT] * len(tasks)
    assert all(len(caller.exchanges) == 1 for *_, caller in asked)
    for *_, caller in asked:
        stats = rebuild(home.store.read(caller.session_id)).metadata["stats"]
        assert stats["tokens_captured"] == stats["tokens_trained"] > 0
    return [(ask.__name__, stream, caller.exchanges[0]) for ask, stream, caller in asked]


async def under_way(pool, calls, streams):
    """Wait until so many calls run, and so many of them have given tokens."""

    def running():
        found = [call for one in pool.each() for call in one.running.values()]
        return len(found) == calls and sum(call.given > 0 for call in found) == streams

    async with asyncio.timeout(60):
        while not running():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


async def test_over_an_update_and_a_kill_in_mid_reply_every_dialect_reads_one_clean_reply(
    processes,
):
    engines = processes.start()
    async with gateway(engines) as (home, pool):

        async def update():
            assert (await home.control("POST", "/policy", {"hold": "abort"}))[0] == 200
            for engine in engines:
                answer = {"new_version": "7"}
                async with home.client.post(
                    f"{engine.url}/update_weight_version", json=answer
                ) as ok:
                    assert ok.status == 200
            processes.gate(opened=True)
            body = {"version": 7, "hold": False}
            assert (await home.control("POST", "/policy", body))[0] == 200

        for *_, exchange in await each_dialect(home, pool, update):
            assert [span.version for span in exchange.versions] == [0, 7]
            assert exchange.versions[-1].end == len(exchange.output_ids)
            assert exchange.extra["resumed"] == 1
        processes.gate(opened=False)

        async def kill():
            engines[0].signal(signal.SIGKILL)
            processes.gate(opened=True)

        seen = await each_dialect(home, pool, kill)
        moved = [(name, stream) for name, stream, exchange in seen if exchange.extra.get("resumed")]
        # Streams go on from their tokens; JSON replies are sampled anew, before any token.
        assert sorted(moved) == sorted((ask.__name__, True) for ask in DIALECTS)
        assert [one["state"] for one in pool.replicas()] == ["down", "live"]


async def test_a_hanging_replica_is_marked_down_and_its_calls_move_to_another(processes):
    engines = processes.start()
    looks = {"health_every_s": 0.3, "health_timeout_s": 2, "health_failures": 2}
    async with gateway(engines, **looks) as (home, pool):

        async def hang():
            engines[1].signal(signal.SIGSTOP)
            processes.gate(opened=True)

        seen = await each_dialect(home, pool, hang)
        assert sum(1 for *_, exchange in seen if exchange.extra.get("resumed")) >= len(DIALECTS)
        assert pool.replicas()[1]["state"] == "down"


async def test_an_engine_that_is_started_again_finds_its_callers_waiting(processes):
    (engine,) = processes.start(1)
    port = int(engine.url.rpartition(":")[2])
    async with gateway([engine]) as (home, pool):
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(await home.session(), stream=True)) for ask in DIALECTS]
            await under_way(pool, 4, streams=4)
            engine.signal(signal.SIGKILL)
            await asyncio.to_thread(engine.popen.wait)
            processes.gate(opened=True)
            await asyncio.to_thread(processes.start, 1, port)
        assert [task.result() for task in asked] == [TEXT] * 4
        assert pool.replicas()[0]["losses"] == 1


async def test_without_any_engine_every_dialect_gets_its_own_error_shape():
    async with EngineServer(scripted({"content": "a"})) as server:
        pool = EnginePool(
            [make_replica(server.url, VllmEngine)],
            settings=RoutingSettings(patience_s=0.1, backoff_s=0.01),
        )
        await pool.start()
    async with house(engine=pool) as home:
        for ask in DIALECTS:
            with pytest.raises(Exception, match="overloaded") as raised:
                await ask(await home.session(), stream=False)
            status = getattr(raised.value, "status_code", None) or getattr(
                raised.value, "code", None
            )
            assert status in {503, 529}
