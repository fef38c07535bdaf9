"""A released engine belongs to its trainer: anything that is sent to it is its end."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from tests.engines.fakes import QUICK, Fake, call, one_running, pooled, said, state, until

from bridle.engines.pool_replica import Replica
from bridle.errors import ConfigError, EngineError
from bridle.types import FinishReason

IMPATIENT = {**QUICK, "health_every_s": 0.001, "backoff_s": 0.001, "max_backoff_s": 0.001}


class Sleeper(Fake):
    """Is dead for good once it is touched while its memory is released."""

    awake = True
    touched = 0
    slow_s = 0.0
    """How long its server takes for a command."""
    late: asyncio.Task[None] | None = None
    """What a call that has ended still sends to it."""

    def touch(self):
        self.touched += not self.awake

    async def start(self):
        self.touch()
        return await super().start()

    async def generate(self, request):
        self.touch()
        async for one in super().generate(request):
            self.touch()
            yield one

    async def health(self):
        self.touch()
        await asyncio.sleep(0)
        self.touch()
        await super().health()

    async def abort(self, request_id):
        self.touch()
        await super().abort(request_id)
        await asyncio.sleep(self.slow_s)
        self.touch()

    async def update_weights(self, source, version):
        self.touch()
        await asyncio.sleep(self.slow_s)
        self.touch()

    async def template(self, messages, tools, arguments):
        self.touch()
        await asyncio.sleep(self.slow_s)
        self.touch()
        return np.arange(3)

    async def is_paused(self):
        return False

    async def pause(self, mode):
        self.touch()
        await asyncio.sleep(self.slow_s)
        self.touch()
        return True

    async def resume(self):
        self.touch()

    async def settled(self):
        if self.late is not None:
            await self.late

    async def touch_late(self):
        await asyncio.sleep(0.05)
        self.touch()


@pytest.mark.parametrize("cycles", [20, pytest.param(1000, marks=pytest.mark.long)])
async def test_nothing_touches_a_released_engine_and_no_token_is_lost_over_cycles(cycles):
    engines = [Sleeper(tokens=8), Sleeper(tokens=8)]
    async with pooled(*engines, **IMPATIENT) as pool:
        ended = asyncio.Event()
        whole = version = 0

        async def sample(name):
            nonlocal whole
            number = 0
            while not ended.is_set():
                number += 1
                tokens, last = await said(pool, call(f"{name}.{number}", name))
                if last.finish_reason is FinishReason.STOP:
                    assert tokens == list(range(8))
                    assert {one.version for one in last.versions} == {version}
                    whole += 1
                else:  # ended by a release, with a part of its tokens
                    assert tokens == list(range(len(tokens)))

        async with asyncio.TaskGroup() as group:
            for name in "pqrs":
                group.create_task(sample(name))
            for number in range(1, cycles + 1):
                before = whole
                await pool.give_up(abort=number % 2 == 0)
                version = number
                for one in engines:
                    one.awake = False
                assert {state(pool, "a"), state(pool, "b")} == {"released"}
                await pool.health()
                await asyncio.sleep(0.003)  # three health checks would be due
                for one in engines:
                    one.awake = True
                await pool.set_version(version)
                await pool.take_back()
                await until(lambda before=before: whole > before)
            ended.set()
    assert [one.touched for one in engines] == [0, 0]
    assert max(len(one.asked) for one in engines) > cycles / 2


async def test_a_call_waits_for_released_engines_longer_than_for_dead_ones():
    async with pooled(Fake(), patience_s=0.01, hold_patience_s=15) as pool:
        await pool.give_up()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(said(pool))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await pool.take_back()
        assert waiting.result()[0] == [0, 1, 2, 3]


async def test_calls_of_a_released_replica_continue_elsewhere_and_it_gets_no_weights():
    a, b = Sleeper(), Sleeper()
    async with pooled(a, b) as pool:
        await pool.give_up(["a"])
        a.awake = False
        for number in range(4):
            assert (await said(pool, call(str(number), str(number))))[0] == [0, 1, 2, 3]
        await pool.hold("abort")
        await pool.release()
        assert (len(a.asked), a.touched, len(b.asked)) == (0, 0, 4)


@pytest.mark.parametrize(
    "send",
    [
        lambda pool: pool.update_weights("dir", 1),
        lambda pool: pool.template([], None, {}),
        lambda pool: pool.hold("abort"),
        lambda pool: pool.abort("r"),
        lambda pool: pool.each()[0].abort("r"),
    ],
    ids=["weights", "template", "hold", "abort", "move"],
)
async def test_a_release_waits_for_requests_in_flight(send):
    a = Sleeper(tokens=100)
    a.slow_s = 0.05
    async with pooled(a) as pool, asyncio.TaskGroup() as group:
        group.create_task(said(pool))
        await until(lambda: a.asked)

        async def sending():
            with suppress(EngineError):  # an update says that the engine was released meanwhile
                await send(pool)

        group.create_task(sending())
        await asyncio.sleep(0)
        await pool.give_up(["a"], abort=False)
        a.awake = False
        await asyncio.sleep(0.1)
        assert a.touched == 0
        a.awake = True
        await pool.release()
        await pool.take_back()


async def test_a_command_that_begins_during_the_last_health_check_delays_a_release():
    a = Sleeper()
    a.slow_s = 0.05
    async with pooled(a) as pool, asyncio.TaskGroup() as group:
        replica = pool.each()[0]
        async with replica.checking:
            giving = group.create_task(pool.give_up())
            await until(lambda: state(pool, "a") == "draining")
            await asyncio.sleep(0.01)
            touching = group.create_task(replica_touched(replica, a))
            await until(lambda: replica.touches)
        await giving
        assert touching.done()
        await pool.take_back()


async def replica_touched(replica, engine):
    """A command that takes its time."""
    with replica.touching():
        await asyncio.sleep(engine.slow_s)


async def test_a_release_waits_for_late_requests_of_ended_calls():
    a = Sleeper()
    async with pooled(a) as pool, asyncio.TaskGroup() as group:
        a.late = group.create_task(a.touch_late())
        await pool.give_up()
        a.awake = False
        await asyncio.sleep(0.1)
        assert a.touched == 0


async def test_a_replica_added_while_all_are_released_is_released_too():
    a, b = Sleeper(), SlowStart()
    async with pooled(a) as pool, asyncio.TaskGroup() as group:
        group.create_task(pool.add(Replica("b", b)))
        await asyncio.sleep(0)
        await pool.give_up()
        a.awake = b.awake = False
        assert (state(pool, "a"), state(pool, "b")) == ("released", "released")
        await asyncio.sleep(0.1)
        assert (a.touched, b.touched) == (0, 0)
        a.awake = b.awake = True


class SlowStart(Sleeper):
    async def start(self):
        await asyncio.sleep(0.05)
        return await super().start()


async def test_a_release_that_takes_too_long_releases_nothing():
    a = Fake()
    async with pooled(a) as pool:
        async with one_running(pool, a) as running:
            with pytest.raises(EngineError, match="no replica was released"):
                await pool.give_up(abort=False, timeout_s=0.01)
            assert state(pool, "a") == "live"
        assert running.result()[0] == [0, 1, 2, 3]
        with pytest.raises(ConfigError, match="the engine has no replica 'z'; it has: \\['a'\\]"):
            await pool.give_up(["z"])


async def test_a_release_that_is_cancelled_or_fails_changes_no_replica():
    a, b = Sleeper(), Sleeper()
    async with pooled(a, b) as pool:
        await pool.give_up(["a"])
        a.awake = False
        async with asyncio.TaskGroup() as group, one_running(pool, b) as running:
            with pytest.raises(EngineError, match="no replica was released"):
                await pool.give_up(abort=False, timeout_s=0.01)
            assert (state(pool, "a"), state(pool, "b")) == ("released", "live")
            giving = group.create_task(pool.give_up(abort=False))
            await until(lambda: state(pool, "b") == "draining")
            giving.cancel()
            await until(giving.done)
            assert (state(pool, "a"), state(pool, "b")) == ("released", "live")
        assert running.result()[0] == [0, 1, 2, 3]
    assert a.touched == 0


async def test_a_replica_that_is_being_drained_is_not_taken_back():
    a = Fake()
    async with pooled(a) as pool:
        async with asyncio.TaskGroup() as group, one_running(pool, a) as running:
            draining = group.create_task(pool.drain("a", timeout_s=15))
            await until(lambda: state(pool, "a") == "draining")
            await pool.take_back()
            assert state(pool, "a") == "draining"
            a.gate.set()
            await draining
        assert running.result()[0] == [0, 1, 2, 3]


async def test_a_dead_replica_that_was_released_is_probed_when_it_is_taken_back():
    a = Sleeper()
    async with pooled(a, reopen=lambda fake: fake) as pool:
        a.sick = EngineError("gone", retryable=True)
        await until(lambda: state(pool, "a") == "down" and pool.each()[0].gone)
        await pool.give_up()
        a.awake, a.sick, before = False, None, a.started
        await asyncio.sleep(0.05)
        assert (a.touched, a.started) == (0, before)
        a.awake = True
        await pool.take_back()
        await until(lambda: state(pool, "a") == "live")
        assert a.started > before
