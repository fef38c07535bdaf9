"""One config here and on a cluster, and what becomes of sessions when only a process dies."""

import asyncio
import os
import signal

import aiohttp
import pytest
from tests.cluster.machines import Served, an_engine, config_in, machines, runs_in, tell_of
from tests.cluster.test_batch import bodies, taken

from bridle.client import AsyncClient
from bridle.credentials import find_token

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ONE_LINE = ('kind = "local"', 'kind = "ray"')


def admin_of(server):
    """An HTTP client with the token that the server made for its own user."""
    found = find_token(server.url)
    assert found is not None
    url, token = found
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"})


async def come_to(server):
    """Return what a batch of 8 comes to: by session, what does not depend on the machine."""
    async with AsyncClient(server.url, patience_s=120) as client:
        await client.submit_many(bodies(8, first="true"))
        groups = await taken(client, 2)
        log = await client.artifact("t0.0", "stdout.log")
        capture = await client.artifact("t0.0", "capture.sqlite")
    async with admin_of(server) as http, http.get("/metrics") as answer:
        metrics = await answer.text()
    assert log == b"" or log
    assert capture.startswith(b"SQLite format 3")
    assert 'bridle_sampled_tokens_total{node="' in metrics
    return {
        one.session_id: (
            one.status,
            one.reward,
            [trace.response_ids.tolist() for trace in one.trajectory.traces],
            one.trajectory.metadata["stats"]["tokens_trained"],
        )
        for group in groups
        for one in group.results
    }


async def test_a_local_config_gives_equal_results_on_a_ray_cluster_with_one_line_changed(tmp_path):
    config = config_in(tmp_path, kind="local")
    with Served(config, "").up() as server:
        here = await come_to(server)
    text = config.read_text()
    assert text.count(ONE_LINE[0]) == 1
    config.write_text(text.replace(*ONE_LINE).replace("/local", "/data"))
    nodes = tmp_path / "data" / "nodes"
    with machines(1, nodes) as cluster, Served(config, cluster.address).up() as server:
        there = await come_to(server)
        assert here == there
        assert {status for status, *_ in there.values()} == {"COMPLETED"}
        await an_engine_is_announced(server, cluster, tmp_path)
        await a_process_dies(server, cluster, nodes)
        await a_drained_node_leaves(server)


async def nodes_of(server):
    async with admin_of(server) as http, http.get("/v1/nodes") as answer:
        return (await answer.json())["nodes"]


async def until(condition, server):
    """Wait until the nodes are as `condition` has them."""
    while not condition(found := await nodes_of(server)):  # noqa: ASYNC110 - elsewhere
        await asyncio.sleep(0.1)
    return found


async def an_engine_is_announced(server, cluster, tmp_path):
    """An engine that a named actor tells of is used by the nodes."""
    with an_engine(tmp_path / "script.json") as url:
        await asyncio.to_thread(tell_of, cluster.address, url)
        [node] = await until(lambda nodes: url in nodes[0]["policy"]["replicas"], server)
        assert len(node["policy"]["replicas"]) == 2


async def a_drained_node_leaves(server):
    """It gets no session any more, and its process ends."""
    [node] = await nodes_of(server)
    async with admin_of(server) as http, http.post(f"/v1/nodes/{node['node_id']}/drain") as answer:
        assert answer.status == 200
    await until(lambda nodes: nodes == [], server)


async def a_process_dies(server, cluster, nodes):
    """Ray starts the node anew; what it was running is run again, on the same folder."""
    async with AsyncClient(server.url, patience_s=120) as client:
        result = nodes.parent / "result"
        [again] = bodies(4, first=f"until [ -e {result} ]; do sleep 0.1; done")
        await client.submit_many([again | {"task_id": "u0"}])
        while sum(run_id.startswith("u0") for run_id in runs_in(nodes)) < 4:  # noqa: ASYNC110 - elsewhere
            await asyncio.sleep(0.1)
        [actor] = cluster.actors()
        os.kill(actor, signal.SIGKILL)
        result.touch()
        group = (await taken(client, 2))[-1]  # the last one of before was not acknowledged
    assert group.task_id == "u0"
    assert {one.status for one in group.results} == {"COMPLETED"}
    assert {one.raw["run_id"].partition(".r")[2] for one in group.results} == {"2"}
    assert len(list(nodes.glob("*/*"))) == 1
