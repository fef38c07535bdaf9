"""Batches of tasks: their checks before the start, their progress and their files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn

from bridle.bridges.parquet import read_trajectories
from bridle.cli.config import tokenizer_folder
from bridle.cli.run import BatchRun, Board
from bridle.config import AgentSpec, Task, builtin_tokenizer_dir
from bridle.errors import ConfigError, EngineError, Problems
from bridle.node.base import Installing, SessionChanged
from bridle.types import SessionStatus


def test_a_finished_run_writes_as_many_trajectories_to_jsonl_as_to_parquet(finished_run):
    lines = (finished_run / "trajectories.jsonl").read_text().splitlines()

    assert len(read_trajectories(finished_run / "trajectories.parquet")) == len(lines) == 3


def board(total: int) -> tuple[Board, Progress]:
    bars = Progress(TextColumn("{task.fields[note]}"), disable=True)
    task = Task(task_id="t", instruction="x", num_samples=total, agent=AgentSpec(harness="pi"))
    return Board(bars, BatchRun([task], "scripted:x", Path("run"))), bars


def changed(number: int, status: SessionStatus, reward: float | None = None) -> SessionChanged:
    return SessionChanged(f"s{number}", "t", number, "pi", status, 0.0, reward=reward)


def test_progress_bar_shows_running_and_completed_sessions_and_mean_reward():
    shown, bars = board(3)
    shown.hear(Installing("pi", "step 1"))
    assert "installing pi: step 1" in bars.tasks[0].fields["note"]

    for number in range(2):
        shown.hear(changed(number, SessionStatus.RUNNING))
    assert "reward" not in bars.tasks[0].fields["note"]  # nothing is scored yet
    shown.hear(changed(0, SessionStatus.COMPLETED, 1.0))

    assert bars.tasks[0].fields["note"] == "1 running, 1 completed, mean reward 1.00 over 1 scored"
    assert (bars.tasks[0].completed, bars.tasks[0].total) == (1, 3)


TASK = {
    "task_id": "a",
    "instruction": "do it",
    "agent": {"harness": "command", "command": "true"},
    "runtime": {"backend": "local"},
}


def written(folder, *tasks):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({**TASK, **task}) + "\n" for task in tasks))
    return path


def test_all_problems_of_a_run_are_reported_at_once_and_no_output_folder_is_created(say, tmp_path):
    scorer = {"strategy": "function", "config": {"function": "gone.py:score"}}
    tasks = written(
        tmp_path,
        {"evaluator": scorer},
        {"task_id": "b", "agent": {"harness": "nope"}},
        {"task_id": "c", "agent": {"harness": "nope"}},
        {"task_id": "d", "agent": {"harness": "command", "command": "python x"},
         "runtime": {"backend": "bubblewrap"}},
        {"task_id": "e", "agent": {"harness": "command", "command": f"{tmp_path}/x"},
         "runtime": {"backend": "bubblewrap"}},
    )  # fmt: skip
    (tmp_path / "x").write_text("")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        config = tmp_path / "config.toml"
        config.write_text(f"[gateway]\nport = {taken.getsockname()[1]}\n")
        said = say(
            *("run", tasks, "--engine", "http://127.0.0.1:9", "--tokenizer", tmp_path / "none"),
            *("--config", config, "--out", tmp_path / "out"),
        )
    assert said.code == 2
    lines = " ".join(said.err.split())
    for problem in (
        "there is no file",
        "task 'b' and 1 more: unknown harness 'nope'",
        "the sandbox does not show",
        "the port is in use",
        "no such folder",
        "engine http://127.0.0.1:9 takes no connection",
    ):
        assert problem in lines
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in said.err


def test_wrong_tasks_and_a_missing_engine_are_reported_together(say, tmp_path):
    said = say("run", tmp_path / "gone.jsonl", "--out", tmp_path / "out")
    assert said.code == 2
    assert "2 problems; nothing was started" in said.err
    assert "no such file or folder" in said.err
    assert "give --engine" in said.err


def test_a_run_with_an_unreachable_engine_exits_with_code_3(say, tmp_path):
    tasks = written(tmp_path, {})
    said = say(
        *("run", tasks, "--engine", "http://127.0.0.1:9", "--out", tmp_path / "out"),
        *("--tokenizer", "builtin"),
    )
    assert said.code == 3
    assert "start it, or name another" in " ".join(said.err.split())


def test_several_problems_become_one_config_error_if_any_of_them_is_a_config_error():
    problems = Problems()
    problems.raise_any()
    with problems.noting():
        raise EngineError("dead")
    with pytest.raises(EngineError, match=r"^dead$"):
        problems.raise_any()
    with problems.noting():
        raise ConfigError("wrong")
    outer = Problems()
    with outer.noting():
        problems.raise_any()
    with pytest.raises(ConfigError, match="2 problems; nothing was started:\n- dead\n- wrong"):
        outer.raise_any()


def test_a_tokenizer_given_by_hub_id_is_found_in_the_hub_cache(tmp_path):
    """In the layout of the hub's own cache, and offline."""
    model = tmp_path / "models--org--small"
    (model / "snapshots").mkdir(parents=True)
    (model / "snapshots" / "abc").symlink_to(builtin_tokenizer_dir())
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    code = """
from bridle.cli.config import tokenizer_folder
print(tokenizer_folder("org/small"))
try:
    tokenizer_folder("org/other")
except Exception as error:
    print(type(error).__name__, error)
"""
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    found, refused = said.stdout.splitlines()
    assert found == str(model / "snapshots" / "abc")
    assert refused.startswith(
        "ConfigError tokenizer 'org/other' is not a folder and cannot be fetched"
    )
    assert tokenizer_folder(str(tmp_path)) == str(tmp_path)
