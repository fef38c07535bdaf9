"""`bridle score`: rewards afterwards."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3

import pyarrow.parquet as pq
import pytest

from bridle.evaluators.base import Evaluation
from bridle.folders import FolderLock

SCORER = """
def length(attempt):
    if attempt.traces == []:
        raise ValueError("nothing was said")
    return {"reward": len(attempt.instruction), "trace_rewards": [2.0] * len(attempt.traces)}

async def failing(attempt):
    raise KeyError(attempt.task_id)

def text(attempt):
    return "good"

def two(attempt, more):
    return 1
"""


@pytest.fixture
def run(finished_run, tmp_path):
    """A run folder of its own, and a file of scorers beside it."""
    (tmp_path / "my_scores.py").write_text(SCORER)
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


KEPT = ("capture.sqlite", "trajectories.jsonl", "trajectories.parquet", "summary.json")
"""Files that only a reward that is recorded changes."""


def rewards(run):
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


def test_score_with_a_function_of_a_file_replaces_the_reward_of_every_session(say, run):
    said = say("score", run, "--function", f"{run.parent}/my_scores.py:length", "--json")
    assert said.code == 0, said.err
    tasks = json.loads((run / "run.json").read_text())["config"]["tasks"]
    lengths = {task["task_id"]: float(len(task["instruction"])) for task in tasks}
    summary = json.loads((run / "summary.json").read_text())["sessions"]
    assert [each["reward"] for each in summary] == [lengths[each["task_id"]] for each in summary]
    assert rewards(run) == [each["reward"] for each in said.json["sessions"]]
    assert set(pq.read_table(run / "trajectories.parquet")["reward"].to_pylist()) == {2.0}


def test_score_sets_the_reward_of_one_session_and_reports_the_earlier_reward(say, run):
    before = rewards(run)
    (first, *_) = say("show", run, "--json").json
    said = say(
        "score", run, first["session_id"], "--reward", "0.125", "--why", "half done", "--json"
    )
    assert [each["before"] for each in said.json["sessions"]] == before[:1]
    assert rewards(run) == [0.125, *before[1:]]
    shown = say("show", first["session_id"], "--run", run)
    assert "scored 0.125 by " in shown.out
    assert "half done" in shown.out


@pytest.mark.parametrize(
    ("name", "error"), [("failing", "KeyError"), ("text", "must return a finite number")]
)
def test_a_scorer_that_fails_changes_no_reward(say, run, name, error):
    before = rewards(run)
    said = say("score", run, "--function", f"{run.parent}/my_scores.py:{name}", "--json")
    assert said.code == 1
    assert all(error in each["error"] for each in said.json["sessions"])
    assert rewards(run) == before


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--function", "json:dumps", "--reward", "1"), "give only one of --function, --evaluator"),
        (("--evaluator", "comand"), "unknown evaluator 'comand'"),
        (("--reward", "nan"), "must be a finite number"),
        (("--function", "nowhere.py:f"), "there is no file nowhere.py"),
        (("--function", "my_scores.py"), "'my_scores.py' names no function: give"),
        (("--function", "json:nothing"), "has no function 'nothing'"),
        (("--function", "my_scores.py:two"), "must take one argument"),
        (("nobody", "--reward", "1"), "no session nobody"),
    ],
)
def test_a_wrong_scorer_or_session_is_refused_before_any_is_scored(
    say, run, monkeypatch, words, error
):
    monkeypatch.chdir(run.parent)
    before = rewards(run)
    said = say("score", run, *words)
    assert said.code == 2
    assert error in " ".join(said.err.split())
    assert rewards(run) == before


COMPARED = """
def short(attempt):
    return float(len(attempt.instruction) < 40)

def some(attempt):
    return {"a": 1.0, "b": 0.0}.get(attempt.task_id[:1], 0.5)

def none(attempt):
    raise KeyError(attempt.task_id)
"""


def test_several_scorers_are_compared_and_change_no_reward(say, run):
    (run.parent / "compared.py").write_text(COMPARED)
    files = {path: path.read_bytes() for path in run.glob("*") if path.name in KEPT}
    before, sessions = rewards(run), say("show", run, "--json").json
    function, evaluator = f"{run.parent}/compared.py:some", "session_completed"
    words = ("score", run, "--function", function, "--evaluator", evaluator)
    said, shown = say(*words, "--json"), say(*words)

    assert said.code == shown.code == 0, said.err
    assert {path: path.read_bytes() for path in files} == files
    assert said.json["scorers"] == ["recorded", function, evaluator]
    assert [one["rewards"]["recorded"] for one in said.json["sessions"]] == before
    assert len(said.json["sessions"]) == len(sessions)
    for one in said.json["sessions"]:
        assert (one["rewards"][function], one["rewards"][evaluator]) == (0.5, 1.0)
    (apart,) = [pair for pair in said.json["pairs"] if "recorded" not in pair["scorers"]]
    assert (apart["compared"], apart["differing"]) == (len(sessions), len(sessions))
    assert apart["difference"] == pytest.approx(0.5)
    assert f"{len(sessions)} of {len(sessions)} sessions scored differently" in shown.out
    kept = json.loads((run / "scorers.json").read_text())
    assert kept["pairs"] == said.json["pairs"]


def test_comparison_of_scorers_reports_the_error_of_a_failing_scorer(say, run):
    (run.parent / "compared.py").write_text(COMPARED)
    none, some = (f"{run.parent}/compared.py:{name}" for name in ("none", "some"))
    said = say("score", run, "--function", none, "--function", some, "--json")
    assert said.code == 1
    for one in said.json["sessions"]:
        assert one["rewards"][none] is None
        assert "KeyError" in one["errors"][none]
    assert min(pair["compared"] for pair in said.json["pairs"]) == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--evaluator", "session_completed") * 2, "name each once"),
        (("--evaluator", "session_completed", "--evaluator", "judge", "--reward", "1"), "--reward"),
        (("--evaluator", "session_completed", "--evaluator", "comand"), "unknown evaluator"),
        (("no", "--evaluator", "session_completed", "--function", "json:loads"), "no session no"),
    ],
)
def test_scorers_that_cannot_be_compared_are_refused(say, run, words, error):
    said = say("score", run, *words)
    assert said.code == 2
    assert error in " ".join(said.err.split())
    assert not (run / "scorers.json").exists()


def test_score_refuses_a_run_that_another_process_uses(say, run):
    with FolderLock(run):
        said = say("score", run, "--reward", "1")
    assert said.code == 2
    assert "is in use by process" in " ".join(said.err.split())


def test_score_without_options_uses_the_evaluator_of_the_task(say, run):
    (run / "said.py").write_text("def score(attempt):\n    return 0.25 * len(attempt.traces)\n")
    change = {"evaluator": {"strategy": "function", "config": {"function": "said.py:score"}}}
    path = run / "run.json"
    facts = json.loads(path.read_text())
    for task in facts["config"]["tasks"]:
        task.update(change, task_dir=str(run))
    path.write_text(json.dumps(facts))
    said = say("score", run, "--json")
    assert said.code == 0, said.err
    assert rewards(run) == [0.25] * 3


def test_an_evaluator_that_needs_the_work_folder_changes_no_reward(say, run):
    before = rewards(run)
    spec = run.parent / "again.toml"
    spec.write_text('[evaluator]\nstrategy = "command"\nconfig = { command = "true" }\n')
    said = say("score", run, "--evaluator", spec, "--json")
    assert said.code == 1
    assert all("the work folder is not kept" in each["error"] for each in said.json["sessions"])
    assert rewards(run) == before


class Turns:
    """An evaluator that gives the last turn of each trace a reward of its own."""

    def __init__(self, reward=0.5):
        self._reward = reward

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    async def evaluate(self, context):
        turns = {trace.exchange_ids[-1]: self._reward for trace in context.trajectory.traces}
        return Evaluation(sum(turns.values()), turn_rewards=turns)


def test_score_records_the_turn_rewards_of_an_evaluator(say, run):
    said = say("score", run, "--evaluator", "tests.cli.test_score:Turns")
    assert said.code == 0, said.err
    for one in map(json.loads, (run / "trajectories.jsonl").read_text().splitlines()):
        for trace in one["traces"]:
            last = trace["turn_ends"][-1] - 1
            assert {at: r for at, r in enumerate(trace["token_rewards"]) if r} == {last: 0.5}


def test_score_refuses_rewards_that_are_not_finite_and_changes_none(say, run):
    before = rewards(run)
    spec = run.parent / "again.toml"
    spec.write_text('strategy = "tests.cli.test_score:Turns"\nconfig = { reward = nan }\n')
    said = say("score", run, "--evaluator", spec, "--json")
    assert said.code == 1
    assert all("must be a finite number" in each["error"] for each in said.json["sessions"])
    assert rewards(run) == before


def test_score_with_a_named_evaluator_replaces_the_rewards(say, run):
    said = say("score", run, "--evaluator", "session_completed")
    assert said.code == 0, said.err
    assert rewards(run) == [1.0] * 3


def test_scoring_a_crashed_session_sets_its_reward_and_keeps_its_error_status(say, run):
    with contextlib.closing(sqlite3.connect(run / "capture.sqlite")) as capture, capture:
        capture.execute("UPDATE outcomes SET status = 'ERROR', cause = 'harness_crash'")
    assert say("score", run, "--evaluator", "session_completed").code == 0
    assert rewards(run) == [0.0] * 3
    assert say("score", run, "--reward", "0.5").code == 0
    assert rewards(run) == [0.5] * 3
    statuses = [each["status"] for each in say("show", run, "--json").json]
    assert statuses == ["ERROR"] * 3
