"""Engines that a file or a URL names join and leave by themselves."""

import asyncio
import json
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs
from tests.node.nodes import a_runner, remote_nodes
from tests.server.house import FakeWorkers, until

from bridle.errors import ConfigError, EngineError
from bridle.server import scheduler
from bridle.server.scheduler import engines_in, engines_named, first_named, follow

PROMETHEUS = """global:
  evaluation_interval: 10s
scrape_configs:
- file_sd_configs:
  - files:
    - /tmp/ray/prom_metrics_service_discovery.json
  job_name: ray
- job_name: rollout
  static_configs:
  - targets:
    - 10.0.0.1:8000
    - '[fd00::1]:8001'
"""


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        ("http://a:1\nsglang:http://b:2 http://a:1\n", ["http://a:1", "sglang:http://b:2"]),
        ('["http://a:1", "b:2"]', ["http://a:1", "http://b:2"]),
        ('[{"targets":["a:1","b:2"],"labels":{"job":"x"}}]', ["http://a:1", "http://b:2"]),
        (PROMETHEUS, ["http://10.0.0.1:8000", "http://[fd00::1]:8001"]),
        ("no engine yet", []),
    ],
)
def test_engines_are_read_from_lines_json_and_prometheus_targets(text, engines):
    assert engines_in(text) == engines


async def test_engine_kind_before_a_source_applies_to_the_workers_that_a_router_lists(tmp_path):
    workers = tmp_path / "list_workers"
    workers.write_text('{"urls": ["http://a:1", "sglang:http://b:2", "openai:http://c:3#m"]}')
    engines = ["sglang:http://a:1", "sglang:http://b:2", "openai:http://c:3#m"]
    assert await engines_named(f"sglang:{workers}") == engines
    workers.write_text('{"workers": [{"id": "x", "url": "http://a:1", "is_healthy": true}]}')
    assert await engines_named(f"sglang:{workers}") == ["sglang:http://a:1"]


@pytest.mark.parametrize("text", ["a" * 100_000, "-a" * 50_000, "http:" * 20_000, "[:" * 50_000])
def test_a_text_that_names_no_engine_is_read_in_linear_time(text):
    began = time.thread_time()
    assert engines_in(text) == []
    assert time.thread_time() - began < 1


async def test_an_endless_engine_list_is_read_up_to_a_limit_and_gives_no_engine(tmp_path):
    long = tmp_path / "long"
    long.write_text("http://a:1\n" + " " * scheduler.MOST_BYTES)
    assert await engines_named(str(long)) == await engines_named("/dev/zero") == []
    sent = 0

    async def endless(request):
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"http://a:1\n" * 10_000)
            sent += 110_000

    app = web.Application()
    app.router.add_get("/", endless)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        assert await engines_named(f"http://127.0.0.1:{runner.addresses[0][1]}/") == []
    finally:
        await runner.cleanup()
    assert sent < 100 << 20


async def test_engines_are_read_from_a_url_and_an_unreadable_source_gives_none(tmp_path):
    app = web.Application()

    async def engines(request):
        return web.json_response(["http://a:1"])

    app.router.add_get("/engines", engines)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        assert await engines_named(f"{url}/engines") == ["http://a:1"]
        assert await engines_named(f"{url}/other") == []
    finally:
        await runner.cleanup()
    assert await engines_named(f"{url}/engines") == []
    assert await engines_named(str(tmp_path)) == []


async def test_a_server_waits_for_the_first_listed_engine_within_its_patience(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(scheduler, "READ_EVERY_S", 0.01)
    source = tmp_path / "engines"
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(first_named(str(source), asyncio.Event()))
        await asyncio.sleep(0)
        source.write_text("a:1")
    assert waiting.result() == ["http://a:1"]
    monkeypatch.setattr(scheduler, "PATIENCE_S", 0.02)
    with pytest.raises(ConfigError, match="named no engine"):
        await first_named(str(tmp_path / "none"), asyncio.Event())


class Late(FakeWorkers):
    """Workers whose engine `late` cannot serve at first."""

    tries = 0

    async def add_replica(self, engine):
        self.tries += engine == "http://late:1"
        if self.tries == 1 and engine == "http://late:1":
            raise EngineError("it loads")
        await super().add_replica(engine)


async def test_engines_join_and_leave_as_the_source_lists_them():
    workers, named, answered = Late(), "a:1 late:1", []

    async def engines(_):
        answered.append(named)
        return web.Response(text=named)

    workers.replicas.append("http://a:1")
    app = web.Application()
    app.router.add_get("/engines", engines)
    with capture_logs() as logs:
        async with TestServer(app) as server:
            source = str(server.make_url("/engines"))
            task = asyncio.ensure_future(follow(source, workers, ["http://a:1"], every_s=0.01))  # noqa: TID251
            try:
                await until(lambda: "http://late:1" in workers.replicas)
                named = json.dumps(["b:1", "late:1"])
                await until(lambda: workers.replicas == ["http://late:1", "http://b:1"])
                named = "none now"  # changes nothing
                await until(lambda: answered.count(named) == 2)
                assert len(workers.replicas) == 2
                named = "b:1"
                await until(lambda: workers.replicas == ["http://b:1"])
            finally:
                task.cancel()
    assert workers.tries == 2
    assert [one["engine"] for one in logs if one["event"] == "engine_cannot_join"] == [
        "http://late:1"
    ]


class Few(FakeWorkers):
    """Workers that keep their only engine, as a gateway does; until `ready` no other can join."""

    ready = False

    async def add_replica(self, engine):
        if not self.ready:
            raise EngineError("it loads")
        await super().add_replica(engine)

    async def remove_replica(self, name, drain_s):
        if self.replicas == [name]:
            raise ConfigError(f"{name!r} is the only one")
        await super().remove_replica(name, drain_s)


async def test_the_only_engine_stays_until_its_listed_replacement_has_joined(tmp_path):
    workers, source = Few(), tmp_path / "engines"
    workers.replicas.append("http://old:1")
    source.write_text("new:1")
    with capture_logs() as logs:
        task = asyncio.ensure_future(follow(str(source), workers, ["http://old:1"], every_s=0.01))  # noqa: TID251
        try:
            await until(lambda: {"engine_cannot_leave"} <= {one["event"] for one in logs})
            assert not task.done()
            workers.ready = True
            await until(lambda: workers.replicas == ["http://new:1"])
        finally:
            task.cancel()
    assert [one["event"] for one in logs] == ["engine_cannot_join", "engine_cannot_leave"]


async def test_an_engine_that_a_node_of_a_cluster_cannot_remove_now_is_removed_later(tmp_path):
    source = tmp_path / "engines"
    source.write_text("a:1")
    async with remote_nodes("x") as remotes, a_runner(*remotes) as runner:
        gateway = remotes[0].gateway
        task = asyncio.ensure_future(follow(str(source), runner, [], every_s=0.01))  # noqa: TID251
        try:
            await until(lambda: "http://a:1" in gateway.replicas)
            remotes[0].failure = "away"
            source.write_text("b:1")
            await until(lambda: "http://a:1" not in runner.replicas)
            remotes[0].failure = None
            await until(lambda: gateway.replicas == ["http://engine", "http://b:1"])
        finally:
            task.cancel()


class BehindWorkers(FakeWorkers):
    """Their policy lists the engines of an earlier moment, and they remove none while `away`."""

    away = True

    def policy(self):
        return {**super().policy(), "engines": [{"name": "http://old:1", "state": "serving"}]}

    async def remove_replica(self, name, drain_s):
        if self.away:
            raise EngineError("away", retryable=True)
        return await super().remove_replica(name, drain_s)


async def test_an_engine_that_no_policy_lists_yet_is_removed_once_its_node_answers(tmp_path):
    workers, source = BehindWorkers(), tmp_path / "engines"
    source.write_text("a:1")
    with capture_logs() as logs:
        task = asyncio.ensure_future(follow(str(source), workers, [], every_s=0.01))  # noqa: TID251
        try:
            await until(lambda: workers.replicas == ["http://a:1"])
            source.write_text("b:1")
            await until(lambda: "http://b:1" in workers.replicas)
            await until(lambda: "engine_cannot_leave" in [one["event"] for one in logs])
            workers.away = False
            await until(lambda: workers.replicas == ["http://b:1"])
        finally:
            task.cancel()


async def test_an_engine_removed_by_hand_joins_again_once_the_source_lists_it(tmp_path):
    workers, source = FakeWorkers(), tmp_path / "engines"
    workers.replicas.append("http://a:1")
    source.write_text("a:1")
    task = asyncio.ensure_future(  # noqa: TID251
        follow(str(source), workers, ["http://a:1", "http://b:1"], every_s=0.01)
    )
    try:
        source.write_text("a:1 c:1")
        await until(lambda: workers.replicas == ["http://a:1", "http://c:1"])
        source.write_text("a:1 b:1 c:1")
        await until(lambda: "http://b:1" in workers.replicas)
    finally:
        task.cancel()
