"""Forks on a cluster: a captured session goes on on any machine, and again where one dies."""

import asyncio

import pytest
from tests.cluster.machines import Served, config_in, machines
from tests.server.test_fork_killed import gated_script, gated_task

from bridle.capture.sqlite import SqliteReader
from bridle.client import AsyncClient

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

FORKS = 6
"""More than the run slots of one machine."""


async def replaying(nodes, count):
    """Wait until so many forks have been given two replies; how many each machine has."""
    while True:
        found = []
        for path in nodes.glob("*/*/capture.sqlite"):
            with SqliteReader(path) as reader:
                ids = [one.session_id for one in reader.sessions() if one.task_id == "fork"]
                found.append(sum(len(reader.exchanges(session)) == 2 for session in ids))
        if sum(found) >= count:
            return found
        await asyncio.sleep(0.1)


async def test_forks_of_a_captured_session_replay_exactly_on_every_node_and_after_a_node_dies(
    tmp_path,
):
    config, gate = config_in(tmp_path), tmp_path / "gate"
    with config.open("a") as file:
        file.write(f'[server.permits]\nhost_paths = ["{tmp_path}"]\n')
    gated_script(tmp_path / "script.json", gate)
    gate.touch()
    nodes = tmp_path / "ray" / "nodes"
    with machines(2, nodes) as cluster, Served(config, cluster.address).up() as server:
        async with AsyncClient(server.url, patience_s=120) as client:
            await client.submit(gated_task())
            await client.wait("t", timeout_s=120)
            kept = tmp_path / "kept.sqlite"
            kept.write_bytes(await client.artifact("t.0", "capture.sqlite"))
            gate.unlink()
            spec = {"capture": str(kept), "session": "t.0", "at": 3}
            forks = gated_task() | {"task_id": "fork", "num_samples": FORKS, "fork": spec}
            await client.submit(forks)
            assert min(await replaying(nodes, FORKS)) > 0, "both machines have some"
            cluster.kill(cluster.names[0])
            gate.touch()
            await client.wait("fork", timeout_s=120)
            groups = {one.task_id: one async for one in client.groups(quiet_s=1)}
    (original,), ended = (groups[one].results for one in ("t", "fork"))
    assert [one.status for one in ended] == ["COMPLETED"] * FORKS
    assert [one.metadata["fork"]["verdict"] for one in ended] == ["exact"] * FORKS
    assert any(one.raw["run_id"] != one.session_id for one in ended), "some were run again"
    sampled = original.trajectory.metadata["stats"]["tokens_trained"]
    for one in ended:
        stats = one.trajectory.metadata["stats"]
        again = stats["tokens_excluded"]["replayed"]
        assert stats["tokens_trained"] + again == stats["tokens_captured"] == sampled
