import pytest
from tests.executors.house import a_runner, some_links

from bridle.errors import EngineError
from bridle.executors.replicas import Replicas, all_of

A, B = "http://a", "http://name:secret@b"


async def test_what_is_told_joins_all_nodes_and_leaves_when_it_is_told_no_more():
    async with some_links("x", "y") as links, a_runner(*links) as runner:
        replicas = Replicas(runner)
        await replicas.add("http://by-hand")
        await replicas.follow([A, B, "no URL"], drain_s=0)
        assert runner.replicas == ["http://by-hand", A, B]
        await replicas.follow([B], drain_s=0)
        await replicas.follow([B], drain_s=0)
        wanted = ["http://engine", "http://by-hand", "http://b"]
        assert [link.gateway.replicas for link in links] == [wanted, wanted]


async def test_one_that_cannot_join_is_tried_again():
    async with some_links("x") as links, a_runner(*links) as runner:
        replicas = Replicas(runner)
        links[0].gateway.refuses = "it is loading"
        await replicas.follow([A], drain_s=0)
        assert runner.replicas == []
        links[0].gateway.refuses = None
        await replicas.follow([A], drain_s=0)
        assert runner.replicas == [A]
        links[0].failure = "away"
        await replicas.follow([], drain_s=0)
        links[0].failure = None
        await replicas.follow([], drain_s=0)
        assert links[0].gateway.replicas == ["http://engine"]


async def test_a_node_comes_up_without_an_engine_that_is_gone_and_gets_it_when_it_is_back():
    async with some_links("x", "late") as links, a_runner(links[0]) as runner:
        replicas = Replicas(runner)
        await replicas.follow([A], drain_s=0)
        late = links[1]
        late.gateway.refuses = "nobody answers"
        runner.join(late)
        await runner.first_heard()
        assert (runner.free, late.gateway.replicas) == (8, ["http://engine"])
        await replicas.follow([A], drain_s=0)
        late.gateway.refuses = None
        await replicas.follow([A], drain_s=0)
        assert late.gateway.replicas == ["http://engine", A]
        assert links[0].gateway.replicas == ["http://engine", A]


async def test_all_that_failed_is_named():
    async def fails():
        raise EngineError("no")

    async def works():
        return 1

    with pytest.raises(EngineError, match=r"^a: no; c: no$"):
        await all_of([("a", fails), ("b", works), ("c", fails)])
