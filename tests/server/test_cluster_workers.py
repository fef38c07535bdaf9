import asyncio

import pytest
from tests.executors.house import HASTY, a_runner, begun, some_links, task
from tests.server.house import a_service, ended, result, submission, until

from bridle.errors import EngineError
from bridle.gateway.weights import SetPolicy
from bridle.server.cluster_workers import ClusterWorkers, earlier_runs


def test_the_runs_before_one_are_known_from_its_id():
    assert earlier_runs("t.0") == ()
    assert earlier_runs("t.0.r3") == ("t.0", "t.0.r2")
    assert earlier_runs("task.rest.0") == ()


async def let_all(links, wanted):
    """Let runs end until so many sessions have begun anywhere."""
    while sum(len(link.node.ran) for link in links) < wanted or any(
        link.node.living for link in links
    ):
        for link in links:
            for run_id in list(link.node.living):
                link.node.let(run_id)
        await asyncio.sleep(0.005)


async def test_server_runs_sessions_on_several_nodes(tmp_path):
    async with some_links("a", "b", capacity=2) as links, a_runner(*links, outlive=True) as runner:
        workers = ClusterWorkers(runner)
        async with a_service(tmp_path, workers) as service:
            await service.submit([submission(samples=10)], owner="o")
            await let_all(links, 10)
            row = await ended(service, "t")
            assert (row["state"], row["usable"]) == ("completed", 10)
            assert min(len(link.node.ran) for link in links) > 0
            await until(lambda: all(not link.host._runs for link in links))
            assert (await service.status())["slots"] == 4


async def test_sessions_of_a_lost_node_are_run_again_elsewhere_at_once(tmp_path):
    async with (
        some_links("a", "b") as links,
        a_runner(*links, outlive=True, patience=HASTY) as runner,
        a_service(tmp_path, ClusterWorkers(runner)) as service,
    ):
        await service.submit([submission(samples=4, max_attempts=1)], owner="o")
        await until(lambda: sum(len(link.node.living) for link in links) == 4)
        dead, well = links
        lost = set(dead.node.living)
        dead.failure = "its machine is gone"
        again = await begun([well], *(f"{one}.r2" for one in lost))
        assert again is well
        await let_all([well], 4)
        assert (await ended(service, "t"))["usable"] == 4


async def test_the_next_life_of_a_server_takes_up_what_goes_on_and_runs_nothing_twice(tmp_path):
    async with some_links("a") as links:
        async with (
            a_runner(*links, outlive=True) as runner,
            a_service(tmp_path, ClusterWorkers(runner)) as service,
        ):
            await service.submit([submission(samples=3)], owner="o")
            await begun(links, "t.0", "t.1", "t.2")
            assert await service.drain() == 3
        links[0].node.let("t.0")
        async with a_runner(*links, outlive=True, settled=False) as runner:
            workers = ClusterWorkers(runner)
            async with a_service(tmp_path, workers) as service:
                await workers.settle()
                links[0].node.let("t.1")
                links[0].node.let("t.2")
                assert (await ended(service, "t"))["usable"] == 3
        assert sorted(links[0].node.ran) == ["t.0", "t.1", "t.2"]


async def test_ended_run_on_disk_is_recalled_after_a_restart(tmp_path):
    async with some_links("a") as links:
        async with (
            a_runner(*links, outlive=True) as runner,
            a_service(tmp_path, ClusterWorkers(runner)) as service,
        ):
            await service.submit([submission()], owner="o")
            await begun(links, "t.0")
        links[0].disk["t.0"] = result("t.0", submission().split()[0], 0)
        await links[0].restart()
        async with (
            a_runner(*links, outlive=True, settled=False) as runner,
            a_service(tmp_path, ClusterWorkers(runner)) as service,
        ):
            assert (await ended(service, "t"))["usable"] == 1
            assert links[0].node.ran == []


async def test_every_node_is_steered_and_one_that_refuses_is_named():
    async with some_links("a", "b") as links, a_runner(*links) as runner:
        workers = ClusterWorkers(runner)
        await workers.set_policy(SetPolicy(version=3, paused=False))
        assert [link.gateway.version for link in links] == [3, 3]
        assert workers.policy() == {"version": 3, "paused": False, "hold": None, "model": "m"}
        links[1].gateway.refuses = "no such folder"
        with pytest.raises(EngineError, match="node id-b: no such folder"):
            await workers.set_policy(SetPolicy(version=4))


async def test_an_engine_that_all_nodes_use_loads_weights_once_while_all_hold():
    async with some_links("a", "b") as links, a_runner(*links) as runner:
        await ClusterWorkers(runner).set_policy(SetPolicy(weights="/w", version=5))
        asked = [[one.weights for one in link.gateway.asked if one.weights] for link in links]
        assert sorted(asked) == [[], ["/w"]]
        assert all(link.gateway.asked[0].hold == "abort" for link in links)
        assert all(link.gateway.asked[-1].hold is False for link in links)


async def test_without_a_node_there_is_nothing_to_steer():
    async with a_runner() as runner:
        with pytest.raises(EngineError, match="no node"):
            await ClusterWorkers(runner).set_policy(SetPolicy(version=1))
        assert ClusterWorkers(runner).policy()["version"] == 0


async def test_a_node_that_joins_late_samples_under_the_same_policy_on_the_same_engines():
    async with some_links("a", "late") as links, a_runner(links[0]) as runner:
        workers = ClusterWorkers(runner)
        await workers.set_policy(SetPolicy(version=7))
        await workers.set_policy(SetPolicy(paused=True))
        await workers.add_replica("http://new")
        await workers.add_replica("http://new")
        runner.join(links[1])
        await until(lambda: len(workers._live()) == 2)
        assert links[1].gateway.asked == [SetPolicy(version=7, paused=True)]
        wanted = ["http://engine", "http://new"]
        assert [link.gateway.replicas for link in links] == [wanted, wanted]
        assert [one["state"] for one in workers.nodes()] == ["live", "live"]
        await workers.remove_replica("http://new", 0)
        assert [link.gateway.replicas for link in links] == [wanted[:1], wanted[:1]]
        links[0].gateway.refuses = "it has no logprobs"
        with pytest.raises(EngineError, match="node id-a: it has no logprobs"):
            await workers.add_replica("http://bad")
        assert runner.replicas == []


async def test_a_node_that_joins_late_loads_the_last_weights_where_its_own_are_older():
    async with some_links("a", "late", "later") as links, a_runner(links[0]) as runner:
        workers = ClusterWorkers(runner)
        await workers.set_policy(SetPolicy(weights="/w", version=7))
        runner.join(links[1])
        await until(lambda: len(workers._live()) == 2)
        assert links[1].gateway.asked == [SetPolicy(weights="/w", version=7, only_older=True)]
        await workers.set_policy(SetPolicy(version=8))
        runner.join(links[2])
        await until(lambda: len(workers._live()) == 3)
        assert links[2].gateway.asked == [SetPolicy(version=8)]


async def test_a_node_is_drained_by_either_of_its_names():
    async with some_links("a", "b") as links, a_runner(*links) as runner:
        workers = ClusterWorkers(runner)
        await workers.drain_node("a")
        await workers.drain_node("id-b")
        await until(lambda: all(link.host._draining for link in links))
        assert runner.free == 0
        assert all(member.idle for member in runner.nodes())


async def test_what_is_kept_of_a_run_is_found_and_removed_wherever_it_is():
    async with some_links("a", "b") as links, a_runner(*links) as runner:
        workers = ClusterWorkers(runner)
        links[1].disk["s"] = result("s", task(), 0)
        assert await workers.artifact("s", "x.log") == b"b s x.log"
        assert await workers.kept_bytes() == 200
        await workers.remove("s")
        assert await workers.artifact("s", "x.log") is None
        links[1].failure = "away"
        assert await workers.kept_bytes() == 100


async def test_the_numbers_of_every_node_that_answers_are_told_by_its_name():
    async with some_links("a", "b", "c") as links, a_runner(*links) as runner:
        workers = ClusterWorkers(runner)
        links[1].gateway.version = 3
        links[2].failure = "away"
        told = await workers.metrics()
        assert sorted(told) == ["a", "b"]
        assert told["b"].endswith("bridle_sessions_open 3\n")
