"""`POST /policy` and `/replicas`: weights and replicas change while sessions go on."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest
from tests.gateway.house import TOKEN, house, scripted, user
from tests.gateway.test_steering import Trained as Waiting
from tests.gateway.test_steering import under_way

from bridle.config import builtin_tokenizer_dir
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings, make_replica
from bridle.engines.vllm import VllmEngine
from bridle.errors import ConfigError, EngineError
from bridle.gateway.weights import WEIGHTS_FILE, kept_releases
from bridle.scripted.engine import PROBE_PREFIX
from bridle.scripted.server import EngineServer
from bridle.types import VersionSpan

LONG = {"content": "one two three four five six seven eight nine ten"}


class Trained:
    """A scripted engine that takes weights."""

    def __init__(self, *turns):
        self._inner = scripted(*turns)
        self.loaded = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def set_version(self, version):
        await self._inner.set_version(version)

    async def update_weights(self, source, version):
        if source == "nowhere":
            raise FileNotFoundError(source)
        self.loaded.append(source)
        await self._inner.set_version(version)


def versions(caller):
    return [exchange.versions for exchange in caller.exchanges]


async def replicas(home):
    return (await home.control("GET", "/replicas"))[1]["replicas"]


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_calls_across_a_hold_and_a_version_change_complete_without_errors(mode):
    engine = Waiting(LONG)
    engine.gate.clear()
    async with house(engine=engine) as home:
        caller = await home.session()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(caller.ask([user("go")]))
            await under_way(home)
            hold = group.create_task(home.control("POST", "/policy", {"hold": mode}))
            if mode == "wait":
                await caller.until(lambda: home.gateway.policy()["hold"] == mode)
                assert not hold.done()
                engine.gate.set()
                await call
            status, answer = await hold
            assert (status, answer["hold"]) == (200, mode)
            assert call.done() == (mode == "wait")
            engine.gate.set()
            waiting = group.create_task((await home.session()).ask([user("go")]))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            _, answer = await home.control("POST", "/policy", {"version": 7, "hold": False})
            assert (answer["version"], answer["hold"]) == (7, None)
        assert call.result() == waiting.result()
        ((span,),) = versions(caller)
        assert span.version == (7 if mode == "abort" else 0)


async def test_a_trainer_in_this_process_hands_its_weights_over():
    engine = Trained({"content": "a"})
    async with house(engine=EnginePool([Replica("0", engine)])) as home:
        await home.gateway.update_weights({"weight": 1}, 4)
        assert engine.loaded == [{"weight": 1}]
        caller = await home.session()
        await caller.ask([user("go")])
        assert versions(caller) == [(VersionSpan(4, 0, len(caller.exchanges[0].output_ids)),)]


async def test_one_request_loads_new_weights_into_all_replicas():
    engines = [Trained({"content": "a"}) for _ in range(2)]
    pool = EnginePool([Replica(str(n), engine) for n, engine in enumerate(engines)])
    async with house(engine=pool) as home:
        status, answer = await home.control("POST", "/policy", {"weights": "dir", "version": 4})
        assert (status, answer["version"]) == (200, 4)
        assert [engine.loaded for engine in engines] == [["dir"], ["dir"]]
        caller = await home.session()
        await caller.ask([user("go")])
        assert versions(caller) == [(VersionSpan(4, 0, len(caller.exchanges[0].output_ids)),)]
        body = {"weights": "other", "version": 5, "rolling": True}
        assert (await home.control("POST", "/policy", body))[0] == 200
        assert [engine.loaded for engine in engines] == [["dir", "other"]] * 2


async def test_weights_that_did_not_load_are_an_error_and_sampling_continues():
    async with house(engine=Trained({"content": "a"})) as home:
        status, answer = await home.control("POST", "/policy", {"weights": "nowhere", "version": 4})
        assert status == 500
        assert "did not load everywhere" in answer["error"]["message"]
        assert (await home.control("GET", "/policy"))[1]["version"] == 0
        assert (await (await home.session()).ask([user("go")]))["content"] == "a"


@pytest.mark.parametrize(
    "body", [{"weights": "d"}, {"weights": "d", "version": 1, "hold": "abort"}]
)
async def test_weights_without_a_version_are_refused(body):
    async with house(engine=Trained({"content": "a"})) as home:
        status, answer = await home.control("POST", "/policy", body)
        assert status == 400
        assert "needs `version`" in answer["error"]["message"]


async def test_a_hold_that_times_out_is_a_500_and_leaves_no_hold():
    engine = Waiting({"content": "a"})
    engine.gate.clear()
    async with house(engine=engine) as home:
        async with asyncio.TaskGroup() as group:
            call = group.create_task((await home.session()).ask([user("go")]))
            await under_way(home)
            body = {"hold": "wait", "timeout_s": 0.01}
            status, _ = await home.control("POST", "/policy", body)
            assert status == 500
            assert (await home.control("GET", "/policy"))[1]["hold"] is None
            engine.gate.set()
        assert call.result()["content"] == "a"


async def test_a_server_joins_and_leaves():
    async with (
        EngineServer(scripted({"content": "a"})) as first,
        EngineServer(scripted({"content": "b"})) as second,
        house({"content": "a"}) as home,
    ):
        assert [one["name"] for one in await replicas(home)] == ["engine"]
        named = first.url.replace("://", "://name:secret@")
        for url in (named, second.url):
            status, _ = await home.control("POST", "/replicas", {"engine": url})
            assert status == 200, _
        assert [one["name"] for one in await replicas(home)] == ["engine", first.url, second.url]
        assert (await home.control("POST", "/replicas", {"engine": first.url}))[0] == 400
        for name in ("engine", named):
            assert (await home.control("DELETE", f"/replicas?name={name}"))[0] == 200
        assert (await (await home.session()).ask([user("go")]))["content"] == "b"
        for query in (f"name={second.url}", "name=none", f"name={second.url}&drain_s=x"):
            assert (await home.control("DELETE", f"/replicas?{query}"))[0] == 400


def other_tokenizer(folder):
    """The shipped tokenizer, that joins nothing to words; returns `folder`."""
    shutil.copytree(builtin_tokenizer_dir(), folder)
    path = folder / "tokenizer.json"
    read = json.loads(path.read_text())
    read["model"]["merges"] = []
    path.write_text(json.dumps(read))
    return folder


async def test_a_server_with_another_tokenizer_cannot_join(tmp_path):
    folder = other_tokenizer(tmp_path / "tokenizer")
    async with (
        EngineServer(scripted({"content": "b"}), tokenizer=str(folder)) as server,
        house({"content": "a"}) as home,
    ):
        status, answer = await home.control("POST", "/replicas", {"engine": server.url})
        assert status == 500
        assert "other ids for" in answer["error"]["message"]
        assert [one["name"] for one in await replicas(home)] == ["engine"]


@pytest.mark.parametrize("engine", ["scripted:x", "file:///etc/passwd", ""])
async def test_only_servers_join_over_http(engine):
    async with house({"content": "a"}) as home:
        assert (await home.control("POST", "/replicas", {"engine": engine}))[0] == 400


async def test_metrics_have_labels_for_each_replica():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        _, text = await home.control("GET", "/metrics", token=TOKEN)
        for line in (
            'bridle_replica_up{model="policy",replica="engine"} 1.0',
            'bridle_replica_calls_total{model="policy",replica="engine"} 1.0',
            'bridle_replica_sessions{model="policy",replica="engine"} 1.0',
            'bridle_routed_calls_total{how="first",model="policy"} 1.0',
        ):
            assert line in text
        await home.gateway.seal(caller.session_id)
        assert (await replicas(home))[0]["sessions"] == 0


def kept(folder):
    path = folder / WEIGHTS_FILE
    return json.loads(path.read_text()) if path.exists() else None


async def test_an_engine_that_was_started_anew_has_the_last_weights_before_it_serves(tmp_path):
    async with house(engine=Trained({"content": "a"}), data_dir=tmp_path) as home:
        await home.control("POST", "/policy", {"weights": "dir", "version": 4})
        assert kept(tmp_path) == {"weights": "dir", "version": 4}
    anew = Trained({"content": "a"})
    async with house(engine=anew, data_dir=tmp_path) as home:
        assert anew.loaded == ["dir"]
        assert (await home.control("GET", "/policy"))[1]["version"] == 4
        caller = await home.session()
        await caller.ask([user("go")])
        assert versions(caller) == [(VersionSpan(4, 0, len(caller.exchanges[0].output_ids)),)]


async def test_an_engine_that_says_that_it_has_newer_weights_keeps_them(tmp_path):
    async with house(engine=Trained({"content": "a"}), data_dir=tmp_path) as home:
        await home.control("POST", "/policy", {"weights": "dir", "version": 4})
    ahead = Trained({"content": "a"})
    await ahead.set_version(6)
    async with house(engine=ahead, data_dir=tmp_path) as home:
        assert ahead.loaded == []
        assert (await home.control("GET", "/policy"))[1]["version"] == 6


async def test_a_version_published_without_weights_clears_the_weights_to_reload(tmp_path):
    async with house(engine=Trained({"content": "a"}), data_dir=tmp_path) as home:
        await home.control("POST", "/policy", {"weights": "dir", "version": 4})
        await home.control("POST", "/policy", {"version": 4})
        assert kept(tmp_path) is not None
        await home.control("POST", "/policy", {"version": 5})
        assert kept(tmp_path) is None


async def test_a_gateway_whose_last_weights_are_missing_does_not_start_and_says_what_to_remove(
    tmp_path,
):
    (tmp_path / WEIGHTS_FILE).write_text('{"weights": "nowhere", "version": 4}')
    with pytest.raises(EngineError, match=r"version 4, of nowhere; .* remove .*weights\.json"):
        async with house(engine=Trained({"content": "a"}), data_dir=tmp_path):
            pass
    (tmp_path / WEIGHTS_FILE).write_text('{"weights": ')
    with pytest.raises(ConfigError, match=r"weights\.json: cannot be read"):
        async with house(engine=Trained({"content": "a"}), data_dir=tmp_path):
            pass


async def test_weights_that_cannot_be_written_down_may_be_published_again(
    tmp_path,
):
    engine = Trained({"content": "a"})
    async with house(engine=engine, data_dir=tmp_path) as home:
        blocked = tmp_path / f"{WEIGHTS_FILE}.part"
        blocked.symlink_to("/dev/full")
        body = {"weights": "dir", "version": 4}
        status, answer = await home.control("POST", "/policy", body)
        assert (status, "No space left" in answer["error"]["message"]) == (503, True)
        assert (await home.control("GET", "/policy"))[1]["version"] == 4
        assert (engine.loaded, kept(tmp_path)) == (["dir"], None)
        blocked.unlink()
        assert (await home.control("POST", "/policy", body))[0] == 200
        assert kept(tmp_path) == body


async def test_only_older_loads_weights_on_engines_with_an_older_version():
    old, new = Trained({"content": "a"}), Trained({"content": "a"})
    await new.set_version(5)
    async with house(engine=EnginePool([Replica("old", old), Replica("new", new)])) as home:
        body = {"weights": "dir", "version": 4, "only_older": True}
        assert (await home.control("POST", "/policy", body))[0] == 200
        assert (old.loaded, new.loaded) == (["dir"], [])


class Halting:
    """A scripted engine that samples piece by piece, however it is asked, and halts in between."""

    def __init__(self, *turns):
        self._inner = scripted(*turns)
        self.streamed = []
        self.halted, self.gate = asyncio.Event(), asyncio.Event()
        self._ended = set()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def generate(self, request):
        probed = request.request_id.startswith(PROBE_PREFIX)
        if not probed:
            self.streamed.append(request.stream)
        given = 0
        async for chunk in self._inner.generate(replace(request, stream=True)):
            yield chunk
            given += len(chunk.output_ids)
            if not probed and given >= 6 and not self.gate.is_set():
                self.halted.set()
                while not self.gate.is_set() and request.request_id not in self._ended:  # noqa: ASYNC110 - either may come
                    await asyncio.sleep(0.005)

    async def abort(self, request_id):
        self._ended.add(request_id)
        await self._inner.abort(request_id)

    async def set_version(self, version):
        await self._inner.set_version(version)


async def streamed_over_an_update(mode, keep):
    """Events, record and delivery of a streamed reply; weights change in its middle by `mode`."""
    engine = Halting(LONG, {"content": "And on."})
    async with EngineServer(engine) as server:
        routing = RoutingSettings(keep_tokens=keep)
        pool = EnginePool([make_replica(server.url, VllmEngine)], settings=routing)
        async with house(engine=pool) as home:
            caller = await home.session()
            async with asyncio.TaskGroup() as group:
                call = group.create_task(caller.stream([user("go")]))
                await engine.halted.wait()
                if mode == "wait":
                    engine.gate.set()
                await pool.hold(mode)
                await engine.set_version(4)
                await pool.set_version(4)
                engine.gate.set()
                await pool.release()
            await caller.ask([user("go"), {"role": "assistant", "content": LONG["content"]}])
            await caller.until(lambda: caller.delivery(0) is not None)
            (one, _), streamed = caller.exchanges, engine.streamed
            text = "".join(
                event["choices"][0]["delta"].get("content", "") for event in call.result()[:-1]
            )
            facts = (
                one.output_ids.tolist(),
                one.logprobs.tolist(),
                one.versions,
                one.finish_reason,
            )
            answer = (one.extra.get("resumed"), one.extra.get("discarded"), caller.delivery(0))
            return streamed, (text, *facts, *answer)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_whole_stream_is_recorded_alike_from_one_reply_of_the_engine_and_from_pieces(mode):
    (streamed, pieces), (asked, whole) = [
        await streamed_over_an_update(mode, keep) for keep in (True, False)
    ]
    assert all(streamed)
    assert not any(asked)
    assert whole == pieces
    if mode in {"abort", "keep"}:
        assert [span.version for span in whole[3]] == [0, 4]


@pytest.mark.parametrize("keep", [True, False])
async def test_calls_wait_for_the_end_of_a_pause_by_somebody_else_in_which_the_engine_refuses_them(
    keep,
):
    engine = Halting(LONG)
    async with EngineServer(engine) as server:
        routing = RoutingSettings(keep_tokens=keep)
        pool = EnginePool([make_replica(server.url, VllmEngine)], settings=routing)
        async with house(engine=pool) as home:

            async def command(path):
                async with home.client.post(f"{server.url}{path}") as response:
                    assert response.status == 200

            callers = [await home.session() for _ in range(3)]
            async with asyncio.TaskGroup() as group:
                begun = group.create_task(callers[0].ask([user("go")]))
                await engine.halted.wait()
                await command("/pause?mode=abort")
                asked = group.create_task(callers[1].ask([user("go")]))
                streamed = group.create_task(callers[2].stream([user("go")]))
                while (await replicas(home))[0]["state"] != "paused":  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.005)
                await engine.set_version(4)
                engine.gate.set()
                await command("/resume")
            assert begun.result()["content"] == asked.result()["content"] == LONG["content"]
            assert streamed.result()
            assert [[span.version for span in one.exchanges[0].versions] for one in callers] == [
                [0, 4],
                [4],
                [4],
            ]
            assert (await replicas(home))[0]["losses"] == 0


async def test_engines_that_are_released_at_once_are_all_written_down(tmp_path):
    """Each of 16 trainers releases its own engine, and has it serve again, eight times."""
    engines = [Trained({"content": "a"}) for _ in range(17)]
    servers = [(f"http://e{n}", one) for n, one in enumerate(engines)]
    pool = EnginePool([Replica(name, one, reopen=Trained) for name, one in servers])
    async with house(engine=pool, data_dir=tmp_path) as home:

        async def steer(name, state):
            return await home.control("POST", f"/engines/{name}", {"state": state, "by": name})

        for _ in range(8):
            for state, written in (("released", 16), ("resumed", 0)):
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(steer(f"e{n}", state)) for n in range(16)]
                assert [one.result() for one in asked if one.result()[0] != 200] == []
                assert len(kept_releases(tmp_path)) == written
