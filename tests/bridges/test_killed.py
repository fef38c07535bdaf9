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

from bridle.bridges.trl import STATE
from bridle.config import EvaluatorSpec
from bridle.server.app import serve_api
from bridle.server.http import ApiToken, TokenRole
from bridle.server.settings import SubmissionPolicy
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


async def test_a_custom_trainer_over_http_trains_every_token_of_every_trace(tmp_path):
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


class Killer(FakeWorkers):
    """Kills a process when so many more sessions have begun."""

    left = 0
    process: asyncio.subprocess.Process

    async def run(self, task, sample_index, run_id, avoid=frozenset()):
        self.left -= 1
        if self.left == 0:
            self.process.kill()
        return await super().run(task, sample_index, run_id, avoid)


async def run(*arguments, killed_after=None, killer=None):
    """Run a program; kill it once it has said so many lines, or have the killer do it.

    Returns what it said.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    if killer is not None:
        killer.process = process
    said = []
    async for line in process.stdout:
        said.append(line.decode())
        if len(said) == killed_after:
            process.kill()
            break
    status = await process.wait()
    assert status == (0 if killed_after is None and killer is None else -9)
    return said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
async def test_a_custom_trainer_killed_twice_trains_every_group_once(tmp_path, seed, monkeypatch):
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


async def killed_twice(tmp_path, monkeypatch, trainer, seed, *, unacked):
    """Run a trainer's loop that is killed twice; its last state and the sessions that were run.

    It is killed while a batch is played, and between two lines. The server starts nothing while
    `unacked` groups wait to be acknowledged.
    """
    drawn, steps = random.Random(seed), 5
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("BRIDLE_SERVER_TOKEN", TOKEN.token)
    tasks = [json.dumps({"task_id": f"task-{n}", "instruction": "go"}) for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    checkpoint, workers = tmp_path / "checkpoint.json", Killer()
    permits = SubmissionPolicy(host_paths=(tmp_path,), local=True)
    async with (
        a_service(tmp_path, workers, max_unacked_groups=unacked) as service,
        serve_api(
            served(service, permits=permits, tokens=[TOKEN]), host="127.0.0.1", port=0
        ) as url,
    ):
        program = str(Path(__file__).with_name("trainer_loop.py"))
        arguments = [program, trainer, url, str(tmp_path / "tasks.jsonl"), str(checkpoint)]
        workers.left = drawn.randint(1, 7)
        await run(*arguments, str(steps), killer=workers)
        await run(*arguments, str(steps), killed_after=drawn.randint(1, 7))
        await run(*arguments, str(steps))
    state = json.loads(checkpoint.read_text())
    assert len(state["trained"]) == len(set(state["trained"])) == 2 * steps
    return state, workers.ran


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(2))
async def test_slime_s_async_loop_killed_twice_trains_every_group_once(tmp_path, seed, monkeypatch):
    state, ran = await killed_twice(tmp_path, monkeypatch, "slime-async", seed, unacked=12)
    given, metadata = state["data"]
    kept = {of[0]["group_index"] for _, of in metadata["bridle"]}
    assert {*state["trained"]} | kept == {*range(given)}  # none was passed over
    assert len(ran) == len(set(ran))  # no session was played twice


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("trainer", "seed"),
    [
        ("slime", 0),
        ("slime", 1),
        ("nemo-rl", 2),
        ("nemo-gym", 3),
        pytest.param("verl", 4, marks=pytest.mark.train),
        pytest.param("verl", 5, marks=pytest.mark.train),
    ],
)
async def test_each_trainer_s_loop_killed_twice_trains_every_group_once(
    tmp_path, trainer, seed, monkeypatch
):
    state, _ = await killed_twice(tmp_path, monkeypatch, trainer, seed, unacked=4)
    assert state["trained"] == [*range(10)]


def prepared(folder, monkeypatch, number, **changes):
    """Write a model and tasks for a trainer that plays in its own process; the tasks."""
    from examples.demo.lookups import lookups
    from examples.demo.policy import lookup_task
    from tests.cli.models import untrained

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    untrained(folder / "model")
    tasks = [
        lookup_task(one, folder / "files").model_copy(update=changes)
        for one in lookups(number, seed=5)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(one.model_dump_json() for one in tasks))
    return tasks


@pytest.mark.train
@pytest.mark.timeout(300)  # 25 s of a core of one's own
async def test_trl_s_trainer_killed_twice_trains_every_group_once(tmp_path, monkeypatch):
    steps = 3
    tasks = prepared(tmp_path, monkeypatch, 2 * steps)
    arguments = [str(Path(__file__).with_name("trl_loop.py")), str(tmp_path), str(steps)]
    # A step says that it plays, has played, and has saved.
    for lines in (4, 2):
        await run(*arguments, killed_after=lines)
    await run(*arguments)
    trained = json.loads((tmp_path / "out" / f"checkpoint-{steps}" / "trained.json").read_text())
    assert Counter(trained) == Counter(task.task_id for task in tasks)


@pytest.mark.train
@pytest.mark.timeout(600)  # 40 s of a core of one's own
async def test_trl_s_asynchronous_trainer_killed_twice_trains_every_row_once(tmp_path, monkeypatch):
    steps = 4
    toss = {"command": "test $(( $(od -An -N1 -tu1 /dev/urandom) % 2 )) = 0"}
    evaluator = EvaluatorSpec(strategy="command", config=toss)
    prepared(tmp_path, monkeypatch, 5, evaluator=evaluator)
    arguments = [str(Path(__file__).with_name("trl_async_loop.py")), str(tmp_path), str(steps)]
    # Of these lines, four steps say one for each of six groups or more, and four checkpoints.
    for lines in (3, 6):
        await run(*arguments, killed_after=lines)
    await run(*arguments)
    rows = json.loads((tmp_path / "out" / f"checkpoint-{steps}" / "trained.json").read_text())
    assert len(rows) == len({*map(tuple, rows)}) == 3 * steps
    flat = {int(line) for line in (tmp_path / "flat.txt").read_text().split()}
    state = json.loads((tmp_path / "out" / f"checkpoint-{steps}" / STATE).read_text())
    numbers = Counter(number for number, _ in rows)
    part = {row["group_id"] for row in state["rows"]}
    assert {*numbers, *state["again"], *flat} >= {*range(state["drawn"])}  # none was passed over
    assert not {*numbers} & {*state["again"]}
    assert {number for number, of in numbers.items() if of != 2} == part
