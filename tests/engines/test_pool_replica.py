"""One replica: its control calls, its facts, and the versions of its tokens."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from tests.engines.fakes import INFO, Fake, call, chunk, lost, one_running, pooled, said, until

from bridle.engines.base import ADAPTER, WeightsLostError
from bridle.engines.pool_replica import Replica, ReplicaState, RoutedCall, RoutingSettings
from bridle.engines.pool_replica import make_replica as made
from bridle.errors import EngineError
from bridle.types import FinishReason, VersionSpan

STOP = FinishReason.STOP


class Stubborn(Fake):
    """Takes no control calls."""

    async def abort(self, request_id):
        raise RuntimeError(request_id)

    async def is_paused(self):
        return False

    async def pause(self, mode):
        return mode == "keep"

    async def resume(self):
        raise EngineError("no")


def test_tokens_have_the_version_under_which_their_chunk_began():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    for version, ids in ((1, [5, 5]), (1, [5]), (2, []), (3, [5])):
        replica.version = version
        routed.took(chunk(ids), replica)
    last = routed.took(chunk([], STOP), replica)
    # The last piece began under 2.
    assert last.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))
    assert routed.cut().versions == last.versions
    assert last.mixed_versions
    assert routed.cut().mixed_versions


def test_only_the_first_message_of_a_joined_chunk_has_the_version_before():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    replica.version = 1
    routed.took(chunk([5]), replica)
    replica.version = 2
    routed.took(replace(chunk([5, 6, 7]), first=1), replica)
    assert routed.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 4))
    assert routed.mixed


@pytest.mark.parametrize("pieces", [[[5, 5]], [[5], [5]]], ids=["whole", "streamed"])
def test_a_reply_over_a_weight_update_keeps_its_first_version(pieces):
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    replica.version = 7
    replica.begin(routed)
    for ids in pieces[:-1]:
        routed.took(chunk(ids), replica)
    replica.version = 8
    reply = (VersionSpan(8, 0, 2),)
    last = routed.took(chunk(pieces[-1], STOP, versions=reply), replica)
    assert last.versions == (VersionSpan(7, 0, 2),)
    assert last.mixed_versions


def test_versions_that_the_engine_reports_override_the_replica_s_known_version():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    reply = (VersionSpan(8, 0, 1),)
    assert routed.took(chunk([5], STOP, versions=reply), replica).versions == reply
    assert replica.version == 8


def test_a_reply_without_a_token_has_no_versions():
    assert RoutedCall(call()).took(chunk([], STOP), Replica("a", Fake())).versions == ()


def test_prompt_tokens_and_those_from_the_cache_are_counted_once_a_call():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    routed.took(chunk([1], cached_tokens=2), replica)
    routed.took(chunk([1], STOP, cached_tokens=2), replica)
    reply = replica.status(0)
    assert (reply["prompt_tokens"], reply["cached_tokens"]) == (3, 2)


def test_a_replica_s_name_has_no_password():
    assert made("sglang:http://u:secret@a:1/v1", lambda _: Fake()).name == "sglang:http://a:1/v1"


async def test_an_engine_s_failure_to_abort_a_call_raises_nothing():
    replica = Replica("a", Stubborn())
    replica.begin(RoutedCall(call()))
    await replica.abort_all()
    assert replica.load == 1


async def test_hold_and_release_use_the_engine_s_pause_and_resume():
    replica = Replica("a", Stubborn())
    await replica.hold("keep")
    error = await replica.release()
    assert str(error) == "no"
    assert await Replica("b", Fake()).release() is None


def test_entering_the_same_state_again_keeps_its_since_time():
    replica = Replica("a", Fake())
    replica.enter(ReplicaState.LIVE)
    since = replica.since
    replica.enter(ReplicaState.LIVE)
    assert replica.since == since
    assert replica.status(4)["sessions"] == 4


@pytest.mark.parametrize(
    ("spec", "again"), [("http://a", True), ("sglang:http://a", True), ("scripted:x", False)]
)
def test_only_engine_servers_can_be_reopened(spec, again):
    replica = made(spec, lambda _: Fake())
    assert replica.name == spec
    assert (replica.reopen is not None) == again
    if replica.reopen is not None:
        assert replica.reopen() is not replica.engine


@pytest.mark.parametrize("bad", [{"load_factor": 0.5}, {"attempts": 0}, {"stick": True}])
def test_invalid_routing_settings_are_refused(bad):
    with pytest.raises(ValidationError):
        RoutingSettings(**bad)


def test_the_final_chunk_of_a_cut_call_has_no_ids():
    assert not len(RoutedCall(call()).cut().output_ids)
    assert RoutedCall(call()).cut().output_ids.dtype == np.int32


class Trained(Fake):
    """Takes weights, and notes what ran meanwhile."""

    def __init__(self, **more):
        super().__init__(**more)
        self.loaded = []
        self.loading = asyncio.Event()
        self.loading.set()
        self.fault: Exception | None = None

    async def update_weights(self, source, version):
        if self.fault is not None:
            raise self.fault
        await asyncio.sleep(0.01)
        await self.loading.wait()
        self.loaded.append((source, version, len(self.asked)))
        self.info = replace(self.info, version=version)


class Adapted(Trained):
    """Takes adapters: a call keeps the one that it began with, and its version."""

    loaded_at_abort = 0

    async def load_adapter(self, folder, version):
        await self.update_weights(folder, version)

    async def abort(self, request_id):
        self.loaded_at_abort = len(self.loaded)
        await super().abort(request_id)

    def adapted(self):
        return bool(self.loaded)

    def forget_adapters(self):
        self.loaded.clear()

    async def generate(self, request):
        version = self.info.version
        async for one in super().generate(request):
            reply = one.finish_reason is FinishReason.STOP
            yield replace(one, versions=(VersionSpan(version, 0, self.tokens),) if reply else ())


class Held(Trained):
    """Can be held, as a server can."""

    def __init__(self, **more):
        super().__init__(**more)
        self.paused: list[str] = []

    async def is_paused(self):
        return False

    async def pause(self, mode):
        self.paused.append(mode)
        if mode == "abort":
            self.aborted.update(request.request_id for request in self.asked)
        return True

    async def resume(self):
        self.paused.append("resume")


async def test_a_hold_ends_calls_and_new_ones_wait_for_its_end():
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        a.gate.clear()
        b.gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(said(pool))
            await until(lambda: a.asked or b.asked)
            await pool.hold("abort")
            assert running.done()
            a.gate.set()
            b.gate.set()
            waiting = group.create_task(said(pool, call("new")))
            await asyncio.sleep(0.02)
            assert len(a.asked) + len(b.asked) == 1
            assert pool.held == "abort"
            await pool.release()
        assert running.result()[1].finish_reason is FinishReason.ABORT
        assert waiting.result()[0] == [0, 1, 2, 3]
        assert pool.held is None


async def test_a_hold_in_wait_mode_lets_running_calls_finish():
    a = Fake()
    async with pooled(a) as pool:
        async with asyncio.TaskGroup() as group, one_running(pool, a) as running:
            holding = group.create_task(pool.hold("wait"))
            await asyncio.sleep(0.01)
            assert not holding.done()
        assert running.result()[1].finish_reason is FinishReason.STOP


async def test_a_hold_that_takes_too_long_holds_nothing():
    a = Fake()
    async with pooled(a) as pool:
        async with one_running(pool, a) as running:
            with pytest.raises(EngineError, match="still running"):
                await pool.hold("wait", timeout_s=0.01)
            assert pool.held is None
        assert running.result()[0] == [0, 1, 2, 3]


async def test_a_held_server_is_paused_and_resumed_once_each():
    a = Held()
    async with pooled(a) as pool:
        await pool.hold("keep")
        await pool.release()
        await pool.release()
        assert a.paused == ["keep", "resume"]


async def test_a_call_fails_if_a_hold_outlasts_hold_patience_s():
    async with pooled(Fake(), hold_patience_s=0.02) as pool:
        await pool.hold("keep")
        with pytest.raises(EngineError, match="still being updated"):
            await said(pool)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_all_replicas_take_new_weights_while_nothing_samples(mode):
    a, b = Held(), Trained()
    async with pooled(a, b) as pool:
        await said(pool)
        await pool.update_weights("folder", 5, mode=mode)
        assert [fake.loaded[0][:2] for fake in (a, b)] == [("folder", 5)] * 2
        assert (await said(pool, call("new")))[1].versions == (VersionSpan(5, 0, 4),)
        assert (await pool.start()).version == 5


async def test_nothing_samples_while_the_second_of_two_updates_at_once_loads():
    gates = {"five": asyncio.Event(), "six": asyncio.Event()}

    class Gated(Trained):
        async def update_weights(self, source, version):
            self.loaded.append((source, version, len(self.asked)))
            await gates[source].wait()

    a = Gated()
    async with pooled(a) as pool, asyncio.TaskGroup() as group:
        first = group.create_task(pool.update_weights("five", 5))
        second = group.create_task(pool.update_weights("six", 6))
        await until(lambda: a.loaded)
        gates["five"].set()
        await first
        await until(lambda: len(a.loaded) == 2)
        assert (pool.held, second.done()) == ("abort", False)
        gates["six"].set()
        await second
        assert (pool.held, pool.replicas()[0]["version"]) == (None, 6)


async def test_calls_are_served_during_a_rolling_weight_update():
    a, b = Trained(), Trained()
    async with pooled(a, b) as pool:
        async with asyncio.TaskGroup() as group:
            updating = group.create_task(pool.update_weights("folder", 5, rolling=True))
            await asyncio.sleep(0)
            calls = [group.create_task(said(pool, call(str(n), None))) for n in range(6)]
        assert updating.done()
        assert all(task.result()[0] == [0, 1, 2, 3] for task in calls)
        assert {one["version"] for one in pool.replicas()} == {5}
        assert {one["state"] for one in pool.replicas()} == {"live"}


async def test_a_rolling_update_of_a_single_replica_loads_in_place():
    a = Trained()
    async with pooled(a) as pool:
        await pool.update_weights("folder", 5, rolling=True)
        assert a.loaded == [("folder", 5, 0)]


async def test_weights_in_memory_go_to_an_engine_in_this_process_only():
    a, b = Trained(), Trained()
    async with pooled(a, b) as pool:
        served = pool.each()[1]
        served.reopen = Trained  # as replicas of servers have
        with pytest.raises(EngineError, match=f"{served.name} is in another process"):
            await pool.update_weights({"weight": 1}, 5)
        assert [one[0] for one in a.loaded] == [{"weight": 1}]
        assert not b.loaded


@pytest.mark.parametrize("rolling", [True, False])
async def test_replicas_that_did_not_take_the_weights_are_named_and_keep_their_version(rolling):
    a, b, c = Trained(), Trained(), Fake(info=replace(INFO, version=1))
    b.fault = RuntimeError("disk full")
    async with pooled(a, b, c) as pool:
        with pytest.raises(EngineError, match="did not load everywhere") as raised:
            await pool.update_weights("folder", 5, rolling=rolling)
        assert "b: loading: RuntimeError: disk full" in str(raised.value)
        assert "c takes no weights" in str(raised.value)
        assert [one["version"] for one in pool.replicas()] == [5, 0, 1]
        assert pool.held is None
        assert (await said(pool))[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("anew", [True, False])
async def test_a_replica_that_was_down_gets_the_weights_before_it_serves_again(anew):
    """Run it for a server that restarted meanwhile and for one that did not."""
    a, b, late = Trained(), Trained(), Trained()
    async with pooled(a, b, patience_s=15) as pool:
        b.sick = lost()
        await until(lambda: pool.each()[1].gone)
        await pool.update_weights("folder", 5)
        assert ([one[:2] for one in a.loaded], b.loaded) == ([("folder", 5)], [])
        pool.each()[1].reopen = (lambda: b) if anew else None
        b.fault = EngineError("busy")
        b.sick = None
        await until(lambda: pool.replicas()[1]["error"] == "busy")
        assert pool.replicas()[1]["state"] == "down"
        b.fault = None
        await until(lambda: [one["state"] for one in pool.replicas()] == ["live", "live"])
        await pool.add(Replica("late", late))
        assert [one.loaded[-1][:2] for one in (b, late)] == [("folder", 5)] * 2
        assert [one["version"] for one in pool.replicas()] == [5, 5, 5]


async def test_a_replica_that_comes_back_in_the_middle_of_an_update_is_updated_too():
    a, b = Trained(), Trained()
    async with pooled(a, b, patience_s=15) as pool:
        b.sick = lost()
        await until(lambda: pool.replicas()[1]["state"] == "down")
        a.loading.clear()
        async with asyncio.TaskGroup() as group:
            updating = group.create_task(pool.update_weights("folder", 5, mode="wait"))
            await until(lambda: pool.held)
            b.sick = None
            await until(lambda: pool.replicas()[1]["state"] == "live")
            assert not updating.done()
            assert b.loaded == []
            a.loading.set()
        assert [one.loaded[-1][:2] for one in (a, b)] == [("folder", 5)] * 2
        assert pool.held is None


async def test_weights_that_no_replica_loaded_are_not_loaded_by_an_added_one():
    a, late = Trained(), Trained()
    async with pooled(a) as pool:
        a.fault = RuntimeError("disk full")
        with pytest.raises(EngineError, match="did not load everywhere"):
            await pool.update_weights("folder", 5)
        await pool.add(Replica("late", late))
        assert late.loaded == []


async def test_a_weight_update_without_a_live_replica_is_an_error():
    a = Trained()
    async with pooled(a) as pool:
        a.sick = lost()
        await pool._look(pool.each()[0], failures=1)
        with pytest.raises(EngineError, match="no replica is live"):
            await pool.update_weights("folder", 5)
        assert pool.held is None


async def test_a_replica_that_lost_its_weights_gets_no_calls_until_it_was_started_anew():
    a, b, anew = Trained(), Trained(), Trained()
    async with pooled(a, b) as pool:
        b.fault = WeightsLostError("gone", status=500)
        pool.each()[1].reopen = lambda: anew
        anew.sick = EngineError("it has no weights")
        with pytest.raises(EngineError, match="b: gone"):
            await pool.update_weights("folder", 5)
        assert [one["state"] for one in pool.replicas()] == ["live", "down"]
        assert pool.held is None
        await until(lambda: anew.started)
        assert (await said(pool))[0] == [0, 1, 2, 3]
        anew.sick = None
        await until(lambda: pool.replicas()[1]["state"] == "live")
        assert anew.loaded[0][:2] == ("folder", 5)


async def test_an_update_under_a_hold_keeps_the_hold():
    a, b = Held(), Held()
    async with pooled(a, b) as pool:
        await pool.hold("keep")
        await pool.update_weights("folder", 5, only={"a"})
        assert ([one[:2] for one in a.loaded], b.loaded) == ([("folder", 5)], [])
        assert pool.held == "keep"
        assert a.paused == ["keep"]
        await pool.release()
        assert a.paused == b.paused == ["keep", "resume"]


async def test_a_replica_that_fails_to_resume_is_down():
    a, b = Held(), Fake()
    async with pooled(a, b) as pool:
        a.resume = failing  # type: ignore[method-assign]  # its server does not answer
        await pool.hold("keep")
        a.sick = EngineError("gone")
        await pool.release()
        assert pool.replicas()[0]["state"] == "down"
        assert (await said(pool))[0] == [0, 1, 2, 3]


async def failing():
    raise EngineError("gone", retryable=True)


# ---- whole replies


SERVER = replace(INFO, remote=True)


@pytest.mark.parametrize(
    ("infos", "streams"),
    [
        ([SERVER], False),
        ([replace(SERVER, tells_versions=True)], False),
        ([INFO], True),  # in this process a piece costs nothing
        ([SERVER, SERVER], True),  # the other one could go on from the tokens
    ],
)
async def test_a_call_that_keeps_its_tokens_is_streamed_only_where_a_whole_reply_loses_them(
    infos, streams
):
    fakes = [Fake(info=info) for info in infos]
    async with pooled(*fakes) as pool:
        await said(pool, call(keeps=True))
        await said(pool, call("b"))
        await said(pool, call("c", keeps=True, grammar={"json_schema": {}}))
        asked = {one.request_id: one.stream for fake in fakes for one in fake.asked}
        assert asked == {"r": streams, "b": False, "c": False}


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("update", ["hold", "version", "weights"])
async def test_after_an_update_calls_are_streamed_unless_the_engine_reports_versions(update, tells):
    a = Fake(info=replace(SERVER, tells_versions=tells))
    async with pooled(a) as pool:
        if update == "hold":
            await pool.hold("wait")
            await pool.release()
        elif update == "version":
            await pool.set_version(3)
        else:
            pool.remember("folder", 3)
        await said(pool, call(keeps=True))
        assert [request.stream for request in a.asked] == [not tells]


@pytest.fixture
def adapter(tmp_path):
    """A folder that holds an adapter."""
    (tmp_path / ADAPTER).touch()
    return tmp_path


async def test_an_adapter_is_loaded_beside_running_calls_which_keep_their_version(adapter):
    a = Adapted()
    async with pooled(a) as pool:
        await pool.update_weights(adapter, 1)
        async with one_running(pool, a) as running:
            await pool.update_weights(adapter, 2)
            assert pool.held is None
            assert a.loaded[-1] == (adapter, 2, 1)
        ids, last = running.result()
        assert ids == [0, 1, 2, 3]
        assert last.versions == (VersionSpan(1, 0, 4),)
        assert not last.mixed_versions
        assert pool.replicas()[0]["version"] == 2
        assert (await said(pool))[1].versions == (VersionSpan(2, 0, 4),)


async def test_a_call_that_is_two_adapters_behind_is_ended_to_be_resumed(adapter):
    a = Adapted()
    async with pooled(a) as pool:
        await pool.update_weights(adapter, 1)
        async with one_running(pool, a) as running:
            await pool.update_weights(adapter, 2)
            assert not a.aborted
            await pool.update_weights(adapter, 3)
            assert a.aborted == {"r"}
            assert a.loaded_at_abort == 3  # resumed earlier, it would be under the second one
        last = running.result()[1]
        assert last.finish_reason is FinishReason.ABORT
        assert last.moved


async def test_where_an_engine_cannot_keep_calls_an_adapter_is_loaded_under_a_hold(adapter):
    a, b = Adapted(), Trained()
    async with pooled(a, b) as pool, asyncio.TaskGroup() as group:
        b.loading.clear()
        updating = group.create_task(pool.update_weights(adapter, 1))
        await until(lambda: pool.held)
        b.loading.set()
        await updating
        assert [one["version"] for one in pool.replicas()] == [1, 1]
    async with pooled(Fake()) as pool:
        with pytest.raises(EngineError, match="takes no weights"):
            await pool.update_weights(adapter, 1)


async def test_a_replica_that_joins_loads_the_newest_adapter(adapter):
    late = Adapted()
    async with pooled(Adapted()) as pool:
        await pool.update_weights(adapter, 4)
        await pool.add(Replica("late", late))
        assert late.loaded == [(adapter, 4, 0)]
        assert pool.replicas()[1]["version"] == 4
