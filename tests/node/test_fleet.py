import pytest
from tests.node.nodes import a_runner, remote_nodes
from tests.server.house import until

from bridle.errors import EngineError
from bridle.gateway.weights import SetPolicy
from bridle.node.fleet import all_of

A, B = "http://a", "http://name:secret@b"


async def test_listed_engines_join_all_nodes_and_unlisted_ones_leave():
    async with remote_nodes("x", "y") as remotes, a_runner(*remotes) as runner:
        await runner.add_replica("http://by-hand")
        await runner.follow_engines([A, B, "no URL"], drain_s=0)
        assert runner.replicas == ["http://by-hand", A, B]
        await runner.follow_engines([B], drain_s=0)
        await runner.follow_engines([B], drain_s=0)
        wanted = ["http://engine", "http://by-hand", "http://b"]
        assert [remote.gateway.replicas for remote in remotes] == [wanted, wanted]


async def test_an_engine_that_cannot_join_is_tried_again():
    async with remote_nodes("x") as remotes, a_runner(*remotes) as runner:
        remotes[0].gateway.refuses = "it is loading"
        await runner.follow_engines([A], drain_s=0)
        assert runner.replicas == []
        remotes[0].gateway.refuses = None
        await runner.follow_engines([A], drain_s=0)
        assert runner.replicas == [A]
        remotes[0].failure = "away"
        await runner.follow_engines([], drain_s=0)
        remotes[0].failure = None
        await runner.follow_engines([], drain_s=0)
        assert remotes[0].gateway.replicas == ["http://engine"]


async def test_an_engine_removed_while_a_node_is_away_is_removed_there_when_it_returns():
    async with remote_nodes("x") as remotes, a_runner(*remotes) as runner:
        await runner.add_replica(A)
        await runner.add_replica(B)
        remotes[0].failure = "away"
        await until(lambda: not runner.live())
        await runner.remove_replica(A, 0)
        remotes[0].failure = None
        await until(lambda: len(runner.live()) == 1)
        assert remotes[0].gateway.replicas == ["http://engine", "http://b"]
        await runner.add_replica(A)
        await remotes[0].restart()
        await until(lambda: runner.members()[0].epoch == remotes[0].host.epoch)
        assert A in remotes[0].gateway.replicas


async def test_a_node_opens_without_an_unreachable_engine_and_adds_it_once_it_answers():
    async with remote_nodes("x", "late") as remotes, a_runner(remotes[0]) as runner:
        await runner.follow_engines([A], drain_s=0)
        late = remotes[1]
        late.gateway.refuses = "nobody answers"
        runner.join(late)
        await runner.first_contact()
        assert (runner.free, late.gateway.replicas) == (8, ["http://engine"])
        await runner.follow_engines([A], drain_s=0)
        late.gateway.refuses = None
        await runner.follow_engines([A], drain_s=0)
        assert late.gateway.replicas == ["http://engine", A]
        assert remotes[0].gateway.replicas == ["http://engine", A]


async def test_a_late_node_does_not_probe_released_engines_and_joins_their_resume():
    async with remote_nodes("x", "late") as remotes, a_runner(remotes[0]) as runner:
        await runner.add_replica(A)
        await runner.set_policy(SetPolicy(released=True, replicas=("a",), by="t"))
        runner.join(late := remotes[1])
        await runner.first_contact()
        assert late.gateway.replicas == ["http://engine"]  # a new one would be probed
        assert (late.gateway.asked[0].released, late.gateway.asked[0].by) == (True, "t")
        await runner.set_policy(SetPolicy(released=False, weights="/w", version=3, by="t"))
        asked = [remote.gateway.asked[-1] for remote in remotes]
        assert [(one.released, one.version) for one in asked] == [(False, 3)] * 2
        assert [one.weights for one in asked] == ["/w", None]  # loaded once
        assert runner.released == []


async def test_error_of_several_calls_names_every_failed_call():
    async def fails():
        raise EngineError("no")

    async def works():
        return 1

    with pytest.raises(EngineError, match=r"^a: no; c: no$"):
        await all_of([("a", fails), ("b", works), ("c", fails)])
