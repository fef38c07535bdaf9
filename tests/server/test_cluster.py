import asyncio

import pytest
from tests.node.nodes import HASTY, a_runner, begun, remote_nodes, task
from tests.server.house import a_service, ended, result, submission, until

from bridle.errors import EngineError
from bridle.gateway.weights import SetPolicy
from bridle.node.fleet import earlier_runs


def test_earlier_run_ids_are_derived_from_a_run_id():
    assert earlier_runs("t.0") == ()
    assert earlier_runs("t.0.r3") == ("t.0", "t.0.r2")
    assert earlier_runs("task.rest.0") == ()


async def let_all(remotes, wanted):
    """Let runs end until so many sessions have begun anywhere."""
    while sum(len(remote.node.ran) for remote in remotes) < wanted or any(
        remote.node.living for remote in remotes
    ):
        for remote in remotes:
            for run_id in list(remote.node.living):
                remote.node.let(run_id)
        await asyncio.sleep(0.005)


async def test_a_server_spreads_the_sessions_of_a_task_over_its_nodes(tmp_path):
    async with (
        remote_nodes("a", "b", capacity=2) as remotes,
        a_runner(*remotes, outlive=True) as runner,
        a_service(tmp_path, runner) as service,
    ):
        await service.submit([submission(samples=10)], owner="o")
        await let_all(remotes, 10)
        row = await ended(service, "t")
        assert (row["state"], row["usable"]) == ("completed", 10)
        assert min(len(remote.node.ran) for remote in remotes) > 0
        await until(
            lambda: not any(one.host.result(run_id) for one in remotes for run_id in one.node.ran)
        )
        assert (await service.status())["slots"] == 4


async def test_sessions_of_a_lost_node_are_run_again_elsewhere_at_once(tmp_path):
    async with (
        remote_nodes("a", "b") as remotes,
        a_runner(*remotes, outlive=True, timeouts=HASTY) as runner,
        a_service(tmp_path, runner) as service,
    ):
        await service.submit([submission(samples=4, max_attempts=1)], owner="o")
        await until(lambda: sum(len(remote.node.living) for remote in remotes) == 4)
        dead, well = remotes
        lost = set(dead.node.living)
        dead.failure = "its machine is gone"
        again = await begun([well], *(f"{one}.r2" for one in lost))
        assert again is well
        await let_all([well], 4)
        assert (await ended(service, "t"))["usable"] == 4


async def test_a_restarted_server_joins_running_runs_and_runs_nothing_twice(tmp_path):
    async with remote_nodes("a") as remotes:
        async with (
            a_runner(*remotes, outlive=True) as runner,
            a_service(tmp_path, runner) as service,
        ):
            await service.submit([submission(samples=3)], owner="o")
            await begun(remotes, "t.0", "t.1", "t.2")
            assert await service.drain() == 3
        remotes[0].node.let("t.0")
        async with (
            a_runner(*remotes, outlive=True, settled=False) as runner,
            a_service(tmp_path, runner) as service,
        ):
            await runner.settle()
            remotes[0].node.let("t.1")
            remotes[0].node.let("t.2")
            assert (await ended(service, "t"))["usable"] == 3
        assert sorted(remotes[0].node.ran) == ["t.0", "t.1", "t.2"]


async def test_a_restarted_server_recalls_results_from_the_disk_of_a_node(tmp_path):
    async with remote_nodes("a") as remotes:
        async with (
            a_runner(*remotes, outlive=True) as runner,
            a_service(tmp_path, runner) as service,
        ):
            await service.submit([submission()], owner="o")
            await begun(remotes, "t.0")
        remotes[0].disk["t.0"] = result("t.0", submission().split()[0], 0)
        await remotes[0].restart()
        async with (
            a_runner(*remotes, outlive=True, settled=False) as runner,
            a_service(tmp_path, runner) as service,
        ):
            assert (await ended(service, "t"))["usable"] == 1
            assert remotes[0].node.ran == []


async def test_set_policy_reaches_every_node_and_names_a_node_that_refuses():
    async with remote_nodes("a", "b") as remotes, a_runner(*remotes) as runner:
        await runner.set_policy(SetPolicy(version=3, paused=False))
        assert [remote.gateway.version for remote in remotes] == [3, 3]
        assert runner.policy() == {
            "version": 3, "paused": False, "hold": None, "model": "m",
            "engines": [{"name": "http://engine", "state": "serving"}],
        }  # fmt: skip
        remotes[1].gateway.refuses = "no such folder"
        with pytest.raises(EngineError, match="node id-b: no such folder"):
            await runner.set_policy(SetPolicy(version=4))


async def test_weights_of_a_shared_engine_are_loaded_once_while_all_nodes_hold():
    async with remote_nodes("a", "b") as remotes, a_runner(*remotes) as runner:
        await runner.set_policy(SetPolicy(weights="/w", version=5))
        asked = [[one.weights for one in remote.gateway.asked if one.weights] for remote in remotes]
        assert sorted(asked) == [[], ["/w"]]
        assert all(remote.gateway.asked[0].hold == "abort" for remote in remotes)
        assert all(remote.gateway.asked[-1].hold is False for remote in remotes)


async def test_set_policy_without_a_node_is_an_engine_error():
    async with a_runner() as runner:
        with pytest.raises(EngineError, match="no node"):
            await runner.set_policy(SetPolicy(version=1))
        assert runner.policy()["version"] == 0


async def test_a_late_node_gets_the_current_policy_and_engines():
    async with remote_nodes("a", "late") as remotes, a_runner(remotes[0]) as runner:
        await runner.set_policy(SetPolicy(version=7))
        await runner.set_policy(SetPolicy(paused=True))
        await runner.add_replica("http://new")
        await runner.add_replica("http://new")
        runner.join(remotes[1])
        await until(lambda: len(runner.live()) == 2)
        assert remotes[1].gateway.asked == [SetPolicy(version=7, paused=True)]
        wanted = ["http://engine", "http://new"]
        assert [remote.gateway.replicas for remote in remotes] == [wanted, wanted]
        assert [one["state"] for one in runner.nodes()] == ["live", "live"]
        await runner.remove_replica("http://new", 0)
        assert [remote.gateway.replicas for remote in remotes] == [wanted[:1], wanted[:1]]
        remotes[0].gateway.refuses = "it has no logprobs"
        with pytest.raises(EngineError, match="node id-a: it has no logprobs"):
            await runner.add_replica("http://bad")
        assert runner.replicas == []


async def test_a_late_node_is_asked_to_load_the_last_weights_if_its_own_are_older():
    async with remote_nodes("a", "late", "later") as remotes, a_runner(remotes[0]) as runner:
        await runner.set_policy(SetPolicy(weights="/w", version=7))
        runner.join(remotes[1])
        await until(lambda: len(runner.live()) == 2)
        assert remotes[1].gateway.asked == [SetPolicy(weights="/w", version=7, only_older=True)]
        await runner.set_policy(SetPolicy(version=8))
        runner.join(remotes[2])
        await until(lambda: len(runner.live()) == 3)
        assert remotes[2].gateway.asked == [SetPolicy(version=8)]


async def test_a_node_is_drained_by_its_name_or_its_id():
    async with remote_nodes("a", "b") as remotes, a_runner(*remotes) as runner:
        await runner.drain_node("a")
        await runner.drain_node("id-b")
        await until(lambda: all(one.host.connect("other").room.draining for one in remotes))
        assert runner.free == 0
        assert all(member.idle for member in runner.members())


async def test_artifacts_of_a_run_are_found_and_removed_on_any_node():
    async with remote_nodes("a", "b") as remotes, a_runner(*remotes) as runner:
        remotes[1].disk["s"] = result("s", task(), 0)
        assert await runner.artifact("s", "x.log") == b"id-b s x.log"
        assert await runner.kept_bytes() == 200
        await runner.remove("s")
        assert await runner.artifact("s", "x.log") is None
        remotes[1].failure = "away"
        assert await runner.kept_bytes() == 100


async def test_metrics_of_reachable_nodes_are_keyed_by_node_name():
    async with remote_nodes("a", "b", "c") as remotes, a_runner(*remotes) as runner:
        remotes[1].gateway.version = 3
        remotes[2].failure = "away"
        outcome = await runner.metrics()
        assert sorted(outcome) == ["a", "b"]
        assert outcome["b"].endswith("bridle_sessions_open 3\n")
