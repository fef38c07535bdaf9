import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.node.house import a_node
from tests.node.house import task as real_task
from tests.node.nodes import FakeNode, task
from tests.server.house import until

from bridle.capture.sqlite import SqliteStore
from bridle.errors import ConfigError
from bridle.folders import private_folder
from bridle.gateway.weights import SetPolicy
from bridle.node.base import RunRequest
from bridle.node.host import KEPT_EVENTS, NodeHost, node_name
from bridle.node.results import CAPTURE


def start(run_id, index=0):
    return RunRequest(run_id, task().model_dump_json(), index)


def a_host(capacity=2):
    node: Any = FakeNode(capacity)
    return node, a_host_of(node)


def a_host_of(node) -> Any:
    return NodeHost(node, node_id="n")


def poll(host, owner, after, wait_s):
    return host.poll(owner, host.epoch, after, wait_s)


async def began(node, *run_ids):
    await until(lambda: node.living.keys() >= set(run_ids))


async def test_a_host_starts_each_run_once_and_refuses_runs_beyond_its_slots():
    node, host = a_host()
    async with host:
        assert host.start("me", [start("a"), start("b"), start("c")]) == [None, None, "full"]
        await began(node, "a", "b")
        assert host.start("me", [start("a")]) == [None]
        assert node.ran == ["a", "b"]
        shake = host.connect("me")
        assert (shake.room.capacity, shake.room.free, shake.room.placed) == (2, 0, 2)
        assert (shake.living, shake.ended) == (("a", "b"), ())
        assert host.connect("you").living == ()
    assert node.living == {}


async def test_poll_waits_for_events_and_repeats_them_until_the_cursor_moves():
    node, host = a_host()
    async with host, asyncio.timeout(10):
        assert (await poll(host, "me", 0, 0.01)).events == ()
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(poll(host, "me", 0, 60))
            await asyncio.sleep(0)
            host.start("me", [start("a")])
        first = waits.result()
        assert [str(event.status) for event in first.events] == ["RUNNING"]
        node.let("a")
        second = await poll(host, "me", first.at, 60)
        while not second.ended:
            second = await poll(host, "me", first.at, 60)
        assert [str(event.status) for event in second.events] == ["COMPLETED"]
        assert second.ended == ("a",)
        assert second.room.free == 2
        again = await poll(host, "me", first.at, 0)
        assert (again.events, again.ended) == (second.events, second.ended)
        assert (await poll(host, "me", second.at, 0)).ended == ()


async def test_a_free_slot_wakes_the_poll_of_every_owner():
    node, host = a_host()
    async with host, asyncio.timeout(10):
        host.start("me", [start("a")])
        await began(node, "a")
        host.connect("you")
        node.let("a")
        batch = await poll(host, "you", 0, 60)
        assert (batch.events, batch.ended, batch.room.free) == ((), (), 2)


async def test_an_ended_run_is_kept_until_its_owner_acknowledges_it():
    node, host = a_host()
    async with host:
        host.start("me", [start("a")])
        await began(node, "a")
        assert host.result("a") is None
        host.ack("me", ["a"])
        node.let("a")
        await until(lambda: host.result("a"))
        assert host.result("a").node_id == "n"
        assert host.connect("me").ended == ("a",)
        assert not host.cancel("a")
        host.ack("you", ["a"])
        assert (await host.recall_all(["a"]))["a"] is host.result("a")
        host.ack("me", ["a", "unknown"])
        assert host.result("a") is None
        assert host.connect("me").ended == ()


async def test_a_run_that_cannot_start_ends_with_its_error():
    node, host = a_host()
    async with host:
        host.start("me", [start("bad"), RunRequest("worse", "{}", 0)])
        await began(node, "bad")
        node.living["bad"].set_result(ConfigError("no such thing"))
        await until(lambda: host.result("bad") and host.result("worse"))
        assert isinstance(host.result("bad"), ConfigError)
        assert "running worse" in str(host.result("worse"))


async def test_a_draining_node_refuses_runs():
    node, host = a_host()
    async with host:
        host.start("me", [start("a")])
        host.drain()
        assert host.start("me", [start("b")]) == ["draining"]
        assert host.connect("me").room.draining
        host.drain(draining=False)
        assert host.start("me", [start("b")]) == [None]
        await began(node, "a", "b")
        assert host.cancel("a")
        assert not host.cancel("unknown")
        await until(lambda: host.result("a"))
        assert host.result("a").status == "CANCELLED"


async def test_events_of_an_owner_that_does_not_poll_are_bounded():
    node, host = a_host()
    async with host:
        host.start("me", [start("a")])
        await began(node, "a")
        for _ in range(KEPT_EVENTS + 10):
            node.tell("a", task(), 0, "RUNNING")
        assert len((await poll(host, "me", 0, 0)).events) == KEPT_EVENTS


async def test_policy_calls_to_a_host_reach_its_gateway():
    _, host = a_host()
    async with host:
        assert (await host.call("set_policy", SetPolicy(version=4)))["version"] == 4
        assert host.connect("me").policy["version"] == 4


async def test_handshakes_events_and_results_can_be_pickled():
    node, host = a_host()
    async with host:
        host.start("me", [start("a")])
        await began(node, "a")
        node.let("a")
        await until(lambda: host.result("a"))
        for said in (host.connect("me"), await poll(host, "me", 0, 0), host.result("a")):
            assert type(pickle.loads(pickle.dumps(said))) is type(said)  # noqa: S301 - our own


async def test_a_real_session_is_hosted_recalled_and_removed(tmp_path):
    store = await SqliteStore.open(tmp_path / "capture.sqlite")
    async with store, a_node(tmp_path, store=store) as node:
        async with a_host_of(node) as host:
            spec = real_task().model_dump_json()
            host.start("me", [RunRequest("s", spec, 3)])
            await until(lambda: host.result("s"))
            result = host.result("s")
            assert (result.status, result.sample_index) == ("COMPLETED", 3)
            assert pickle.loads(pickle.dumps(result)).json() == result.json()  # noqa: S301 - our own
            assert await host.recall_all(["t", "s"]) == {"s": result}
            assert await host.artifact("s", "x") is None
            assert (await host.artifact("s", CAPTURE)).startswith(b"SQLite format 3")
            assert await host.artifact("t", CAPTURE) is None
            assert await node.artifact("s", "../../run.json") is None
            assert await node.artifact("s", "x" * 5000) is None
            assert await node.artifact("s", "\0") is None
            assert await host.call("kept_bytes") > 0
        again: Any = await node.recall("s")
        assert again.json()["trajectory"] == result.json()["trajectory"]
        assert await node.recall("unknown") is None
        async with a_host_of(node) as host:
            assert (await host.recall_all(["s"]))["s"].node_id == "n"
            await host.call("remove", "s")
            assert store.sessions() == []


async def test_recall_of_a_killed_run_closes_its_session_and_returns_none(tmp_path):
    async with a_node(tmp_path) as node:
        await node.gateway.open_session("s")
        assert await node.recall("s") is None
        assert "killed" in node.store.outcome("s").error
        assert await node.recall("s") is None


def test_node_id_depends_only_on_the_folder(tmp_path):
    assert node_name(tmp_path / "a") == node_name(tmp_path / "a") != node_name(tmp_path / "b")


async def test_an_artifact_of_a_node_on_a_relative_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    async with a_node(Path(tmp_path.name)) as node:
        folder = private_folder(node.folder.session_folder("s"))
        (folder / "stdout.log").write_text("said")
        path = await node.artifact("s", "stdout.log")
        assert path is not None
        assert path.read_text() == "said"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd"])
async def test_an_artifact_path_outside_the_run_folder_is_not_served(tmp_path, name):
    async with a_node(tmp_path) as node:
        assert await node.artifact("s", name) is None
