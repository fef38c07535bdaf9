"""On many machines each session of a batch arrives once, whichever process dies meanwhile.

`BRIDLE_TEST_SESSIONS` draws another number of sessions (200 in the long form).
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.machines import Served, config_in, machines, runs_in

from bridle.client import AsyncClient

SESSIONS = int(os.environ.get("BRIDLE_TEST_SESSIONS", "60"))
SAMPLES = 4
SLOTS = 4
CAPACITY = SLOTS + 2 + 2
"""Sessions that one machine has at once (`config_in`)."""

SLEEP_S = 2.0
"""How long a session takes beside its model call; slots, not processors, are what is scarce."""

AGENT = Path(__file__).parents[1] / "node" / "agent.py"

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300 + 2 * SESSIONS)]


def bodies(count, first=f"sleep {SLEEP_S}"):
    """So many sessions, each of which does `first` before its model call."""
    return [
        {
            "task_id": f"t{number}",
            "instruction": "Do it.",
            "num_samples": SAMPLES,
            "max_attempts": 1,
            "runtime": {"backend": "local"},
            "agent": {"harness": "command", "command": f"{first}; {sys.executable} -S {AGENT}"},
        }
        for number in range(count // SAMPLES)
    ]


async def until_ended(client, count):
    """Wait until so many sessions have ended."""
    while True:
        status = await client.status()
        by_state = status["sessions"]
        done = sum(many for state, many in by_state.items() if state not in ("queued", "running"))
        if done >= count:
            return done
        await asyncio.sleep(0.1)


async def test_every_session_of_a_batch_completes_once_while_nodes_and_the_server_are_killed(
    tmp_path,
):
    config = config_in(tmp_path, slots=SLOTS)
    nodes = tmp_path / "ray" / "nodes"
    with machines(4, nodes) as cluster:
        server = Served(config, cluster.address)
        with server.up():
            async with AsyncClient(server.url, patience_s=120) as client:
                began = time.monotonic()
                all_of_them = bodies(SESSIONS)
                part = 2 * len(all_of_them) // 3
                await client.submit_many(all_of_them[:part])
                await until_ended(client, SESSIONS // 5)
                cluster.kill(cluster.names[1])
                lost_s = await run_again(nodes)
                cluster.add()
                await until_live(client, 4)
                await client.submit_many(all_of_them[part:])
                await until_ended(client, part * SAMPLES + SLOTS)
                server.kill()
                server.start()
                groups = await taken(client, SESSIONS // SAMPLES)
                took_s = time.monotonic() - began
    results = [one for group in groups for one in group.results]
    assert len(results) == len({one.session_id for one in results}) == SESSIONS
    assert {one.status for one in results} == {"COMPLETED"}
    assert all(one.trajectory.traces for one in results)
    runs = runs_in(nodes)
    assert {run_id.partition(".r")[0] for run_id in runs} == {one.session_id for one in results}
    # Only what the dead machine had was run again: not what went on while the server was dead.
    assert len(runs) <= SESSIONS + CAPACITY
    assert len({one.raw["node_id"] for one in results}) >= 4  # the late one is among them
    print(  # noqa: T201 - with -s, the numbers
        {
            "sessions": len(results),
            "runs": len(runs),
            "completed_runs": sum(status == "COMPLETED" for status in runs.values()),
            "run_again_after_s": round(lost_s, 2),
            "took_s": round(took_s, 1),
        }
    )


async def until_live(client, count):
    """Wait until so many nodes are."""
    while [one["state"] for one in await client.nodes()].count("live") < count:  # noqa: ASYNC110 - elsewhere
        await asyncio.sleep(0.1)


async def run_again(nodes):
    """Wait until some session runs for the second time; how many seconds that took."""
    began = time.monotonic()
    while not any(run_id.endswith(".r2") for run_id in runs_in(nodes)):  # noqa: ASYNC110 - elsewhere
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def taken(client, count):
    """So many groups, each acknowledged as the next one comes."""
    groups = []
    async for group in client.groups(quiet_s=240):
        groups.append(group)
        if len(groups) == count:
            break
    return groups
