"""A fork that is killed while its replies are still given again is run again, as an exact fork."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.cluster.machines import Served, config_in

from bridle.capture.sqlite import SqliteReader
from bridle.client import AsyncClient

AGENT = Path(__file__).parents[1] / "node" / "agent.py"


def gated_script(path, gate):
    """Write a script whose second command waits for the file `gate`."""
    commands = ["echo one", f"until [ -e {gate} ]; do sleep 0.05; done", "echo two"]
    turns = [*({"shell": [command]} for command in commands), {"content": "It is done."}]
    path.write_text(json.dumps({"conversations": [{"turns": turns}]}))


def gated_task():
    return {
        "task_id": "t",
        "instruction": "Do it.",
        "runtime": {"backend": "local"},
        "agent": {"harness": "command", "command": f"{sys.executable} -S {AGENT}"},
    }


async def replaying(capture, run):
    """Wait until a run has been given two replies."""
    with SqliteReader(capture) as reader:
        async with asyncio.timeout(60):
            while len(reader.exchanges(run)) < 2:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.05)
        return [one.extra.get("replayed") for one in reader.exchanges(run)]


@pytest.mark.timeout(180)
async def test_a_fork_that_is_killed_in_mid_replay_is_run_again_and_is_exact(tmp_path):
    config, gate = config_in(tmp_path, kind="local"), tmp_path / "gate"
    gated_script(tmp_path / "script.json", gate)
    gate.touch()
    server = Served(config, "")
    with server.up():
        async with AsyncClient(server.url, patience_s=120) as client:
            await client.submit(gated_task())
            await client.wait("t", timeout_s=60)
            gate.unlink()
            name = await client.fork("t.0", at=3)
            (capture,) = (tmp_path / "local").rglob("capture.sqlite")
            assert None not in await replaying(capture, f"{name}.0")
            server.kill()
            gate.touch()
            server.start()
            await client.wait(name, timeout_s=90)
            groups = {one.task_id: one async for one in client.groups(quiet_s=1)}
    (original,), (fork,) = (groups[one].results for one in ("t", name))
    assert fork.raw["run_id"] != f"{name}.0", "it was run again"
    assert (fork.status, fork.metadata["fork"]["verdict"]) == ("COMPLETED", "exact")
    old, new = (one.trajectory.metadata["stats"] for one in (original, fork))
    again = new["tokens_excluded"]["replayed"]
    assert new["tokens_trained"] + again == new["tokens_captured"] == old["tokens_trained"]
