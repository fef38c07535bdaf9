"""`bridle run` and `bridle fork`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import bridle
from bridle.capture.sqlite import SqliteReader
from bridle.cli.run import setup_of
from bridle.cli.terminal import EngineOptions
from bridle.errors import ConfigError
from bridle.node.results import result_from, trajectory_of
from bridle.trajectory.sample import MaskReason

HARBOR = Path(__file__).parents[2] / "examples" / "harbor-tasks"


def test_run_flags_override_every_task_and_are_recorded_in_run_json(say, finished_run, tmp_path):
    tasks = finished_run.parent / "tasks.jsonl"
    script = finished_run.parent / "script.json"

    said = say(
        "run", tasks, "--engine", f"scripted:{script}", "--out", tmp_path / "run", "--samples", 2,
        "--first", 1, "--builder", "per_request", "--concurrency", 2,
        "--stream", "live", "--prompt", "engine",
    )  # fmt: skip

    assert said.code == 0
    assert "2 sessions" in said.out
    assert "mean reward 1.000 over 2 scored of 2" in said.out
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["concurrency"], config["stream"], config["prompt"]) == (2, "live", "engine")
    assert [task["num_samples"] for task in config["tasks"]] == [2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [line["traces"] for line in summary["sessions"]] == [2, 2]


def test_template_option_wraps_every_instruction(say, finished_run, tmp_path):
    (tmp_path / "around.txt").write_text("Be quick.\n{{ instruction }}")
    script = finished_run.parent / "script.json"
    said = say(
        "run", finished_run.parent / "tasks.jsonl", "--engine", f"scripted:{script}", "--first", 1,
        "--template", tmp_path / "around.txt", "--out", tmp_path / "run",
    )  # fmt: skip
    assert said.code == 0
    (task,) = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["tasks"]
    assert task["instruction"].startswith("Be quick.\n")


def test_a_run_without_a_completed_session_exits_with_code_1_and_unknown_mean_reward(
    say, finished_run, tmp_path
):
    task = {
        "task_id": "none",
        "instruction": "nothing",
        "agent": {"harness": "command", "command": "true"},
    }
    (tmp_path / "task.json").write_text(json.dumps(task))

    said = say(
        "run", tmp_path / "task.json", "--engine",
        f"scripted:{finished_run.parent / 'script.json'}", "--out", tmp_path / "run",
    )  # fmt: skip

    assert said.code == 1
    assert "harness_no_call" in said.out
    assert "mean reward unknown" in said.out


@pytest.mark.parametrize(("harness", "mean"), [("oracle", "1.000"), ("empty", "0.000")])
def test_oracle_and_empty_harnesses_run_a_task_set_without_an_engine(say, tmp_path, harness, mean):
    said = say(
        "run", HARBOR, "--harness", harness, "--runtime", "local", "--network", "open",
        "--first", 2, "--out", tmp_path / "run", "--report",
    )  # fmt: skip
    assert said.code == 0
    assert "pass@1" in said.out
    assert "harbor-tasks" in said.out
    assert f"mean reward {mean} over 2 scored of 2" in said.out


@pytest.fixture
def run(finished_run, tmp_path):
    """A finished run of its own with its tasks' files."""
    shutil.copytree(finished_run.parent, tmp_path / "finished")
    path = tmp_path / "finished" / "run" / "run.json"
    before, now = (f"{folder}/files/" for folder in (finished_run.parent, tmp_path / "finished"))
    path.write_text(path.read_text().replace(before, now))
    return path.parent


@pytest.fixture
def other(tmp_path):
    """An engine that answers every first call with nonsense, and every second one too."""
    turns = [{"content": "not this"}, {"content": "another answer"}]
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"conversations": [{"when": {}, "turns": turns}]}))
    return f"scripted:{path}"


def captures(folder):
    with SqliteReader(folder / "capture.sqlite") as reader:
        return [reader.read(session.session_id) for session in reader.sessions()]


def test_a_fork_replays_the_captured_replies_and_then_samples_from_the_captured_prompt(
    say, run, other, tmp_path
):
    (original, *_) = captures(run)
    words = ("--run", run, "--at", 1, "--samples", 2, "--engine", other, "--json")
    said = say("fork", original.session.session_id, *words, "--out", tmp_path / "forks")
    assert said.code == 0, said.err
    assert said.json["exact"] == 2
    for line in said.json["sessions"]:
        came = {"session": original.session.session_id, "at": 1}
        exact = {"replayed": 1, "left": 0, "verdict": "exact", "noise": []}
        assert line["fork"] == came | exact
        assert (line["status"], line["reward"]) == ("COMPLETED", 0.0)
    for fork in captures(tmp_path / "forks"):
        first, second = fork.exchanges
        before, after = original.exchanges
        assert np.array_equal(first.output_ids, before.output_ids)
        assert np.array_equal(first.logprobs, before.logprobs)
        assert first.versions == before.versions
        assert first.extra["replayed"] == before.exchange_id
        assert (second.prompt_digest, second.kept) == (after.prompt_digest, after.kept)
        assert not np.array_equal(second.output_ids, after.output_ids)


def test_replayed_tokens_of_a_fork_are_excluded_from_training(say, run, other, tmp_path):
    (original, *_) = captures(run)
    name = original.session.session_id
    say("fork", name, "--run", run, "--at", 1, "--engine", other, "--out", tmp_path / "forks")
    (fork,) = captures(tmp_path / "forks")
    replayed, own = fork.exchanges
    trajectory = trajectory_of(fork)
    stats = trajectory.metadata["stats"]
    assert stats["tokens_excluded"] == {"replayed": len(replayed.output_ids)}
    assert stats["tokens_trained"] == len(own.output_ids)
    (trace,) = trajectory.traces
    assert (trace.reasons == MaskReason.REPLAYED).sum() == len(replayed.output_ids)
    assert trace.loss_mask.sum() == len(own.output_ids)


def test_a_fork_after_the_last_reply_replays_all_replies_and_trains_no_token(
    say, run, other, tmp_path
):
    (original, *_) = captures(run)
    words = ("--run", run, "--at", 2, "--engine", other, "--out", tmp_path / "forks", "--json")
    said = say("fork", original.session.session_id, *words)
    (line,) = said.json["sessions"]
    came = {"session": original.session.session_id, "at": 2}
    exact = {"replayed": 2, "left": 0, "verdict": "exact", "noise": []}
    assert line["fork"] == came | exact
    assert (line["reward"], line["tokens_trained"]) == (1.0, 0)


def test_a_fork_with_a_changed_workspace_fails_at_the_first_different_prompt_token(
    say, run, other, tmp_path
):
    (original, *_) = captures(run)
    for file in (run.parent / "files" / original.session.task_id).iterdir():
        file.write_text(f"changed {file.read_text()}")
    words = ("--run", run, "--at", 1, "--engine", other, "--out", tmp_path / "forks", "--json")
    said = say("fork", original.session.session_id, *words)
    assert (said.code, said.json["exact"]) == (1, 0)
    (line,) = said.json["sessions"]
    assert (line["status"], line["cause"], line["reward"]) == ("ERROR", "infrastructure", None)
    assert "differs from token" in line["error"]
    assert "now " in line["error"]
    assert "changed" in line["error"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--at", 3), "has 2 replies, fewer than at = 3"),
        (("--at", 0), "greater than or equal to 1"),
    ],
)
def test_a_fork_point_that_was_not_captured_is_refused(say, run, tmp_path, words, error):
    (original, *_) = captures(run)
    said = say("fork", original.session.session_id, "--run", run, *words, "--out", tmp_path / "f")
    assert said.code == 2
    assert error in " ".join(said.err.split())
    assert not (tmp_path / "f").exists()


def test_a_fork_uses_the_rendering_settings_of_its_run(say, finished_run, tmp_path):
    script = finished_run.parent / "script.json"
    file = tmp_path / "bridle.toml"
    file.write_text(f"engines = ['scripted:{script}']\n[rendering]\nhistory = 'template'\n")
    tasks = finished_run.parent / "tasks.jsonl"
    assert say("run", tasks, "--config", file, "--first", 1, "--out", tmp_path / "run").code == 0
    for engines in (EngineOptions(), EngineOptions(engine=["scripted:other.json"])):
        assert setup_of(tmp_path / "run", engines).rendering.history == "template"


def test_a_fork_of_a_session_whose_task_is_not_in_the_run_is_refused(say, run):
    (original, *_) = captures(run)
    path = run / "run.json"
    facts = json.loads(path.read_text())
    facts["config"]["tasks"] = []
    path.write_text(json.dumps(facts))
    said = say("fork", original.session.session_id, "--run", run, "--at", 1)
    assert said.code == 2
    assert "only sessions of `bridle run` can be forked" in " ".join(said.err.split())


def test_a_fork_in_a_task_file_runs_and_a_missing_capture_is_refused_before_the_run(
    say, run, other, tmp_path
):
    (original, *_) = captures(run)
    (task, *_) = json.loads((run / "run.json").read_text())["config"]["tasks"]
    spec = {"capture": "run/capture.sqlite", "session": original.session.session_id, "at": 2}
    path = run.parent / "forks.json"
    path.write_text(json.dumps({**task, "task_dir": None, "fork": spec}))
    words = ("--engine", other, "--out", tmp_path / "forks")
    said = say("run", path, *words, "--json")
    assert said.code == 0, said.err
    assert said.json["sessions"][0]["fork"]["verdict"] == "exact"
    gone = [
        ("capture", "gone.sqlite", "gone.sqlite"),
        ("session", "nobody", "nobody"),
        ("at", 9, "at = 9"),
    ]
    for name, value, error in gone:
        path.write_text(json.dumps({**task, "task_dir": None, "fork": {**spec, name: value}}))
        said = say("run", path, *("--engine", other, "--out", tmp_path / name))
        assert said.code == 2
        assert error in " ".join(said.err.split())
        assert not (tmp_path / name).exists()


def test_python_api_forks_a_session_as_the_command_does(run, other, tmp_path):
    (original, *_) = captures(run)
    session_id, folder = original.session.session_id, tmp_path / "forks"
    found = bridle.fork(session_id, at=1, samples=2, run=run, engine=other, data=folder)
    assert [one.status for one in found] == ["COMPLETED", "COMPLETED"]
    assert [result_from(fork).metadata["fork"]["replayed"] for fork in captures(folder)] == [1, 1]
    with pytest.raises(ConfigError, match="no session 'nobody'"):
        bridle.fork("nobody", at=1, run=run)
