import asyncio
import time

import pytest
from tests.node.nodes import HASTY, a_runner, begun, remote_nodes, task, until, where

from bridle.errors import ConfigError, EngineError, NodeLostError, StoreError
from bridle.node.base import RoomChanged


async def ended(runner, remotes, run_id, **answer):
    (await begun(remotes, run_id)).node.let(run_id, **answer)


async def test_sessions_are_spread_evenly_over_nodes_and_results_name_their_node():
    async with remote_nodes("a", "b", capacity=2) as remotes, a_runner(*remotes) as runner:
        assert (runner.capacity, runner.free) == (4, 4)
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(runner.run(task(), k, run_id=f"s{k}")) for k in range(4)]
            await begun(remotes, "s0", "s1", "s2", "s3")
            assert [len(remote.node.living) for remote in remotes] == [2, 2]
            assert runner.free == 0
            for k in range(4):
                await ended(runner, remotes, f"s{k}")
        assert {run.result().status for run in runs} == {"COMPLETED"}
        assert {run.result().node_id for run in runs} == {"id-a", "id-b"}
        assert runner.session_ids() == ()
        assert runner.free == 4


async def test_a_session_beyond_the_capacity_waits_until_a_slot_is_free():
    async with remote_nodes("a", capacity=1) as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(runner.run(task(), run_id="s0"))
            await begun(remotes, "s0")
            second = group.create_task(runner.run(task(), run_id="s1"))
            await asyncio.sleep(0.05)
            assert where(remotes, "s1") is None
            assert runner.session_ids() == ("s0", "s1")
            await ended(runner, remotes, "s0")
            await ended(runner, remotes, "s1")
        assert first.result().status == second.result().status == "COMPLETED"


async def test_a_session_waiting_for_a_resource_does_not_block_other_sessions():
    async with (
        remote_nodes("plain", capacity=2) as remotes,
        a_runner(*remotes) as runner,
        asyncio.TaskGroup() as group,
    ):
        picky = task(runtime={"resources": {"gpu_of_ours": 1.0}})
        waits = group.create_task(runner.run(picky, run_id="picky"))
        await until(lambda: runner.capacity == 3)
        group.create_task(runner.run(task(), run_id="s0"))
        await ended(runner, remotes, "s0")
        async with remote_nodes("able", offers={"gpu_of_ours": 1.0}) as able:
            runner.join(able[0])
            await ended(runner, able, "picky")
            assert (await waits).node_id == "id-able"
            runner.gone("able", "the test is over")


async def test_a_run_is_placed_on_a_node_outside_its_avoid_set():
    async with (
        remote_nodes("a", "b") as remotes,
        a_runner(*remotes) as runner,
        asyncio.TaskGroup() as group,
    ):
        one = runner.run(task(), run_id="s0", avoid=frozenset({"id-a"}))
        group.create_task(one)
        assert await begun(remotes, "s0") is remotes[1]
        await ended(runner, remotes, "s0")


async def test_a_run_refused_by_a_full_node_is_started_again_later():
    async with remote_nodes("a") as remotes, a_runner(*remotes) as runner:
        remotes[0].refusals = 1
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(task(), run_id="s0"))
            await ended(runner, remotes, "s0")
        assert remotes[0].calls.count("start") == 2


async def test_the_error_of_a_run_is_raised_unchanged():
    async with remote_nodes("a") as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(trying(runner.run(task(), run_id="s0")))
            (await begun(remotes, "s0")).node.living["s0"].set_result(StoreError("disk full"))
        assert str(run.result()) == "disk full"
        async with asyncio.TaskGroup() as group:
            run = group.create_task(runner.run(task(), run_id="s1"))
            await begun(remotes, "s1")
            with pytest.raises(ConfigError, match="is running already"):
                await runner.run(task(), run_id="s1")
            await ended(runner, remotes, "s1")


async def trying(run):
    """The error that it raises."""
    with pytest.raises(Exception) as caught:
        await run
    return caught.value


@pytest.mark.parametrize("failure", ["silent", "away", "its machine is gone"])
async def test_runs_of_an_unreachable_node_are_lost(failure):
    async with (
        remote_nodes("a", "b") as remotes,
        a_runner(*remotes, timeouts=HASTY) as runner,
        asyncio.TaskGroup() as group,
    ):
        run = group.create_task(trying(runner.run(task(), run_id="s0")))
        dead = await begun(remotes, "s0")
        dead.failure = failure
        error = await run
        assert isinstance(error, NodeLostError)
        assert dead.host.node_id in str(error)
        await until(lambda: runner.free == 4)


async def test_a_node_that_answers_again_cancels_orphaned_runs_and_rejoins():
    async with remote_nodes("a") as remotes, a_runner(*remotes, timeouts=HASTY) as runner:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(trying(runner.run(task(), run_id="s0")))
            await begun(remotes, "s0")
            remotes[0].failure = "silent"
            assert isinstance(await run, NodeLostError)
            remotes[0].failure = None
            await until(lambda: not remotes[0].node.living)
            await until(lambda: runner.free == 4)
            group.create_task(runner.run(task(), run_id="s0.r2"))
            await ended(runner, remotes, "s0.r2")
        await until(lambda: remotes[0].host.result("s0") is None)
        assert "s0" in remotes[0].gateway.forgotten


async def test_a_short_node_outage_loses_no_session():
    async with remote_nodes("a") as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(runner.run(task(), run_id="s0"))
            await begun(remotes, "s0")
            remotes[0].failure = "away"
            await until(lambda: runner.members()[0].state == "away")
            assert runner.free == 0
            remotes[0].node.let("s0")
            remotes[0].failure = None
        assert run.result().status == "COMPLETED"


async def test_a_stalled_event_loop_loses_no_session():
    async with remote_nodes("a", "b") as remotes, a_runner(*remotes, timeouts=HASTY) as runner:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(runner.run(task(), run_id=f"s{k}")) for k in range(2)]
            await begun(remotes, "s0", "s1")
            calls = [len(remote.calls) for remote in remotes]
            time.sleep(2 * HASTY["lost_after_s"])  # noqa: ASYNC251 - the stall
            await until(
                lambda: all(len(remote.calls) > n for remote, n in zip(remotes, calls, strict=True))
            )
            await until(lambda: {one.state for one in runner.members()} == {"live"})
            await ended(runner, remotes, "s0")
            await ended(runner, remotes, "s1")
        assert {run.result().status for run in runs} == {"COMPLETED"}


async def test_finished_runs_survive_a_node_restart_and_running_ones_are_lost():
    async with remote_nodes("a") as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            done = group.create_task(runner.run(task(), run_id="done"))
            lost = group.create_task(trying(runner.run(task(), run_id="lost")))
            await begun(remotes, "done", "lost")
            remotes[0].failure = "away"
            remotes[0].node.let("done")
            await until(lambda: remotes[0].host.result("done"))
            remotes[0].disk["done"] = remotes[0].host.result("done")
            await remotes[0].restart()
            remotes[0].failure = None
        assert done.result().status == "COMPLETED"
        assert "restarted" in str(lost.result())


async def test_a_late_node_with_the_result_of_the_first_run_cancels_the_repeated_run():
    async with remote_nodes("a", "late") as remotes, a_runner(remotes[0]) as runner:
        first, late = remotes
        async with asyncio.TaskGroup() as group:
            again = runner.run(task(), run_id="s.r2")
            run = group.create_task(again)
            await begun([first], "s.r2")
            late.disk["s"] = result_of("s")
            runner.join(late)
            assert (await run).session_id == "s"
        await until(lambda: not first.node.living)


def result_of(run_id):
    from tests.server.house import result

    return result(run_id, task(), 0)


async def test_cancel_ends_a_running_or_waiting_run_with_status_cancelled():
    async with remote_nodes("a", capacity=1) as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            living = group.create_task(runner.run(task(), run_id="living"))
            await begun(remotes, "living")
            waiting = group.create_task(runner.run(task(), run_id="waiting"))
            await until(lambda: len(runner.session_ids()) == 2)
            assert runner.cancel("waiting")
            assert runner.cancel("living")
            assert not runner.cancel("unknown")
        assert living.result().status == waiting.result().status == "CANCELLED"
        assert remotes[0].node.ran == ["living"]


async def test_a_cancelled_caller_ends_its_run_on_the_node():
    async with remote_nodes("a") as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(runner.run(task(), run_id="s0"))
            await begun(remotes, "s0")
            run.cancel()
        assert remotes[0].node.living == {}
        assert runner.session_ids() == ()


# ---- lives of who asks


async def test_a_run_that_outlives_its_caller_is_joined_by_the_next_process_and_not_repeated():
    async with remote_nodes("a", "b") as remotes:
        async with a_runner(*remotes, outlive=True) as runner, asyncio.TaskGroup() as group:
            runs = [group.create_task(runner.run(task(), run_id=f"s{k}")) for k in (0, 1)]
            await begun(remotes, "s0", "s1")
            for run in runs:
                run.cancel()
        await ended(None, remotes, "s0")
        async with a_runner(*remotes, outlive=True, settled=False) as runner:
            assert runner.expect("s0")
            assert runner.expect("s1")
            assert not runner.expect("s2")
            async with asyncio.TaskGroup() as group:
                first = group.create_task(runner.run(task(), run_id="s0"))
                second = group.create_task(runner.run(task(), run_id="s1"))
                await runner.settle()
                assert (await first).status == "COMPLETED"
                await ended(runner, remotes, "s1")
            assert second.result().status == "COMPLETED"
        assert sorted(remotes[0].node.ran + remotes[1].node.ran) == ["s0", "s1"]


async def test_runs_that_the_next_process_does_not_expect_are_cancelled():
    async with remote_nodes("a") as remotes:
        async with a_runner(*remotes, outlive=True) as runner, asyncio.TaskGroup() as group:
            runs = [group.create_task(runner.run(task(), run_id=f"s{k}")) for k in (0, 1)]
            await begun(remotes, "s0", "s1")
            for run in runs:
                run.cancel()
        await ended(None, remotes, "s0")
        async with a_runner(*remotes, outlive=True):
            await until(lambda: not remotes[0].node.living)
            await until(lambda: sorted(remotes[0].gateway.forgotten) == ["s0", "s1"])
            assert [remotes[0].host.result(one) for one in ("s0", "s1")] == [None, None]


async def test_two_owners_share_nodes_and_do_not_see_each_others_runs():
    async with (
        remote_nodes("a", capacity=2) as remotes,
        a_runner(*remotes) as mine,
        a_runner(*remotes, owner="you") as yours,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(mine.run(task(), run_id="m"))
        group.create_task(yours.run(task(), run_id="y"))
        await begun(remotes, "m", "y")
        await until(lambda: (mine.free, yours.free) == (0, 0))
        assert mine.session_ids() == ("m",)
        await ended(mine, remotes, "m")
        await ended(yours, remotes, "y")


async def test_a_node_keeps_a_result_until_it_is_released():
    async with remote_nodes("a") as remotes, a_runner(*remotes) as runner:
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(task(), run_id="s0"))
            await ended(runner, remotes, "s0")
        assert remotes[0].host.result("s0") is not None
        runner.release("s0")
        runner.release("unknown")
        await until(lambda: remotes[0].host.result("s0") is None)
        assert remotes[0].gateway.forgotten == ["s0"]


async def test_a_result_of_an_earlier_process_is_recalled_from_any_node():
    async with remote_nodes("a", "b") as remotes, a_runner(*remotes) as runner:
        remotes[1].disk["s"] = result_of("s")
        assert (await runner.recall("s")).session_id == "s"
        remotes[0].failure = "away"
        assert await runner.recall("other") is None


# ---- nodes come and go


async def test_capacity_events_follow_nodes_that_join_drain_and_leave():
    slots = []
    async with remote_nodes("a", "b") as remotes, a_runner(remotes[0]) as runner:

        def hear(event):
            if isinstance(event, RoomChanged):
                slots.append(event.slots)

        with runner.events.listening(hear):
            runner.join(remotes[1])
            runner.join(remotes[1])
            await until(lambda: slots == [8])
            async with asyncio.TaskGroup() as group:
                run = group.create_task(runner.run(task(), run_id="s0"))
                at = await begun(remotes, "s0")
                await runner.drain_node(at.name)
                await until(lambda: runner.free == 4)
                at.node.let("s0")
            assert run.result().status == "COMPLETED"
            await until(lambda: slots[-1] == 4)
            runner.gone("a", "it left")
            runner.gone("b", "it left")
            assert slots[-1] == 0
        with pytest.raises(ConfigError, match="no node 'a'"):
            await runner.drain_node("a")


async def test_start_error_names_a_node_if_no_node_opens():
    async with remote_nodes("a", opening=EngineError("no logprobs")) as remotes:
        with pytest.raises(
            ConfigError, match=r"no node of the cluster could be opened; a failed with: no logprobs"
        ):
            async with a_runner(*remotes):
                raise AssertionError


async def test_a_node_that_fails_to_open_is_tried_again():
    async with remote_nodes("a", "b") as remotes:
        remotes[1].opening = EngineError("its engine is loading")
        async with a_runner(*remotes, timeouts=HASTY) as runner:
            states = {one.slots.name: one.json() for one in runner.members()}
            assert states["b"]["error"] == "its engine is loading"
            assert runner.free == 4
            remotes[1].opening = None
            await until(lambda: runner.free == 8)
            assert [one.json()["state"] for one in runner.members()] == ["live", "live"]
