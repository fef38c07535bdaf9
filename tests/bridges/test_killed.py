"""Trainers on a real rollout server, in processes that are killed: each group is trained once."""

import asyncio
import dataclasses
import json
import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from tests.server.house import FakeWorkers, a_service, body, result, served

from bridle.server.app import serve_api
from bridle.server.auth import ApiToken, TokenRole
from bridle.server.submission_policy import SubmissionPolicy
from bridle.testing import TrainedRow, trainer_conformance, trainer_sessions

PROGRAM = Path(__file__).parents[2] / "examples" / "own-trainer" / "trainer.py"
trainer = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
TOKEN = ApiToken(name="trainer", token="a-token-of-sixteen", roles=(TokenRole.ADMIN,))


class Shapes(FakeWorkers):
    """Each session of a task is one of the group with its name."""

    def __init__(self):
        super().__init__()
        self.groups = {group.task_id: group for group in trainer_sessions()}

    async def run(self, task, sample_index, run_id, avoid=frozenset()):
        made = result(run_id, task, sample_index)
        session = self.groups[task.task_id].sessions[sample_index]
        fields = {name: getattr(session, name) for name in ("status", "error", "reward")}
        trajectory = dataclasses.replace(session, session_id=run_id)
        return dataclasses.replace(made, trajectory=trajectory, **fields)


async def test_a_trainer_of_ones_own_trains_every_token_of_every_trace(tmp_path):
    async with (
        a_service(tmp_path, Shapes()) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):
        server = trainer.Server(url, TOKEN.token)
        groups = trainer_sessions()
        tasks = [body(group.task_id, len(group.sessions), max_attempts=1) for group in groups]
        await asyncio.to_thread(server.ask, "POST", "/v1/tasks", {"tasks": tasks})
        found = []
        while len(found) < len(groups):
            query = "/v1/groups?wait_s=30&include=trajectories"
            found = (await asyncio.to_thread(server.ask, "GET", query))["groups"]
    names = {
        one["session_id"]: next(g for g in groups if g.task_id == group["task_id"])
        .sessions[one["sample_index"]]
        .session_id
        for group in found
        for one in group["results"]
    }
    rows = [
        TrainedRow(names[row.session_id], row.ids, row.mask, row.logprobs, row.versions, row.weight)
        for group in found
        for row in trainer.rows_of(group)
    ]
    trainer_conformance(groups, rows).check()


async def run(*arguments, killed_after=None):
    """Run a program; kill it once it has said so many lines. Returns what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    said = []
    async for line in process.stdout:
        said.append(line.decode())
        if len(said) == killed_after:
            process.kill()
            break
    status = await process.wait()
    assert status == (0 if killed_after is None else -9)
    return said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
async def test_a_trainer_that_is_killed_twice_trains_every_group_once(tmp_path, seed, monkeypatch):
    drawn = random.Random(seed)
    monkeypatch.setenv("BRIDLE_SERVER_TOKEN", TOKEN.token)
    tasks = [body(f"task-{n}", 2) for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    checkpoint = tmp_path / "checkpoint.json"
    workers = FakeWorkers(answers={f"task-{n}.0": {"reward": 0.0} for n in range(8)})
    async with (
        a_service(tmp_path, workers) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):
        arguments = [str(PROGRAM), url, str(tmp_path / "tasks.jsonl"), str(checkpoint)]
        # A step says three lines: the groups left, the groups taken, and that it saved.
        for _ in range(2):
            await run(*arguments, killed_after=drawn.randint(1, 4))
        said = await run(*arguments)
        assert said[-1].endswith("0 groups left\n")
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN.token}"}) as http:
            left = msgspec.json.decode((await http.get(f"{url}/v1/groups")).content)["groups"]
    trained = Counter(one for step in json.loads(checkpoint.read_text())["steps"] for one in step)
    assert trained == Counter(task["task_id"] for task in tasks)
    assert left == []
    assert len(workers.ran) == 16  # no session was played twice


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(2))
async def test_slimes_loop_that_is_killed_twice_trains_every_group_once(
    tmp_path, seed, monkeypatch
):
    drawn = random.Random(seed)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("BRIDLE_SERVER_TOKEN", TOKEN.token)
    tasks = [json.dumps({"task_id": f"task-{n}", "instruction": "go"}) for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    checkpoint, workers, rollouts = tmp_path / "checkpoint.json", FakeWorkers(), 5
    permits = SubmissionPolicy(host_paths=(tmp_path,), local=True)
    async with (
        a_service(tmp_path, workers) as service,
        serve_api(
            served(service, permits=permits, tokens=[TOKEN]), host="127.0.0.1", port=0
        ) as url,
    ):
        program = str(Path(__file__).with_name("slime_loop.py"))
        arguments = [program, url, str(tmp_path / "tasks.jsonl"), str(checkpoint), str(rollouts)]
        for _ in range(2):
            await run(*arguments, killed_after=drawn.randint(1, 7))
        await run(*arguments)
        state = json.loads(checkpoint.read_text())
    trained = state["trained"]
    kept = {of[0]["group_index"] for _, of in state["source"][1]["bridle"]}
    assert {*trained} | kept == {*range(state["source"][0])}  # none was passed over
    assert len(trained) == len(set(trained)) == 2 * rollouts
    assert len(workers.ran) == len(set(workers.ran))  # no session was played twice
