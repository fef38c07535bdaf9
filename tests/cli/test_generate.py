"""`bridle generate`: tasks in, a data set out; the same command goes on."""

import json

import pytest
from tests.capture.made import MadeSession

from bridle.bridges.selection import Rules
from bridle.capture.sqlite import SqliteStore
from bridle.cli.generate import _standing, _wanting
from bridle.config import Task


@pytest.fixture
def generate(say, finished_run, tmp_path):
    """Generate from the three lookups, whose second is never answered rightly."""
    folder = finished_run.parent
    script = json.loads((folder / "script.json").read_text())
    script["conversations"][1]["turns"] = [{"content": "No idea."}]
    (tmp_path / "script.json").write_text(json.dumps(script))

    def call(*options):
        return say(
            "generate", folder / "tasks.jsonl", "--engine", f"scripted:{tmp_path / 'script.json'}",
            "--out", tmp_path / "data", *options,
        )  # fmt: skip

    return call


def lines(tmp_path):
    return [
        json.loads(line) for line in (tmp_path / "data" / "data.jsonl").read_text().split("\n")[:-1]
    ]


def test_one_command_runs_filters_and_writes_with_statistics(generate, tmp_path):
    said = generate("--json")

    assert said.code == 0
    assert (said.json["examples"], said.json["rounds"]) == (2, 1)
    assert len(lines(tmp_path)) == 2
    told = json.loads((tmp_path / "data" / "statistics.json").read_text())
    assert (told["attempted"], told["accepted"], told["tasks_accepted"]) == (3, 2, 2)
    assert told["rejected"] == {"reward": 1}


def test_what_was_run_is_not_run_again(generate, tmp_path):
    first = generate("--first", 1, "--json")
    rest = generate("--json")
    again = generate("--format", "parquet", "--json")

    assert [said.json["rounds"] for said in (first, rest, again)] == [1, 2, 2]
    assert [said.json["sessions"] for said in (first, rest, again)] == [1, 3, 3]
    run = json.loads((tmp_path / "data" / "rounds" / "001" / "run.json").read_text())
    assert len(run["config"]["tasks"]) == 2
    assert (tmp_path / "data" / "data.parquet").is_file()


def test_with_keep_a_task_is_tried_until_enough_is_accepted(generate, tmp_path):
    said = generate("--keep", 1, "--samples", 3, "--runtime", "local", "--json")
    statistics = said.json["statistics"]
    assert (statistics["attempted"], statistics["accepted"]) == (1 + 3 + 1, 2)
    assert said.json["rounds"] == 3


def test_another_harness_takes_the_tasks_own_command_away(generate):
    assert generate("--harness", "command").code == 2


def test_nothing_accepted_ends_with_code_1(generate):
    said = generate("--min-reward", 2)
    assert said.code == 1
    assert "rejected: reward 3" in said.out


async def test_what_failed_on_our_side_or_was_killed_is_wanted_again(tmp_path):
    async def played(name, **ended):
        made = MadeSession(name)
        made.call()
        if ended:
            made.end(**ended)
        folder = tmp_path / "rounds" / name
        folder.mkdir(parents=True)
        async with await SqliteStore.open(folder / "capture.sqlite") as store:
            await made.write(store)

    tasks = [Task(task_id="task-1", instruction="go"), Task(task_id="task-2", instruction="go")]

    def wanted(rules):
        return {
            t.task_id: t.num_samples for t in _wanting(tasks, rules, 4, *_standing(tmp_path, rules))
        }

    assert wanted(Rules()) == {"task-1": 4, "task-2": 4}
    await played("a", reward=None, status="ERROR", cause="infrastructure")
    await played("b")
    await played("c", reward=1.0)
    await played("d", reward=None, status="ERROR", cause="harness_crash")
    assert wanted(Rules()) == {"task-1": 2, "task-2": 4}
    assert wanted(Rules(keep=1)) == {"task-2": 1}
