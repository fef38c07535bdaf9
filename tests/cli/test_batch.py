"""Every batch leaves a folder behind and reports its result."""

from pathlib import Path

from rich.progress import Progress, TextColumn

from bridle.bridges.parquet import read_trajectories
from bridle.cli.batch import Batch, Board
from bridle.config import AgentSpec, Task
from bridle.node.events import Installing, SessionChanged
from bridle.types import SessionStatus


def test_a_finished_run_has_the_same_trajectories_as_lines_and_as_parquet(finished_run):
    lines = (finished_run / "trajectories.jsonl").read_text().splitlines()

    assert len(read_trajectories(finished_run / "trajectories.parquet")) == len(lines) == 3


def board(total: int) -> tuple[Board, Progress]:
    bars = Progress(TextColumn("{task.fields[note]}"), disable=True)
    task = Task(task_id="t", instruction="x", num_samples=total, agent=AgentSpec(harness="pi"))
    return Board(bars, Batch([task], "scripted:x", None, Path("run"), None)), bars


def changed(number: int, status: SessionStatus, reward: float | None = None) -> SessionChanged:
    return SessionChanged(f"s{number}", "t", number, "pi", status, 0.0, reward=reward)


def test_the_board_counts_running_completed_and_reward():
    shown, bars = board(3)
    shown.hear(Installing("pi", "step 1"))
    assert "installing pi: step 1" in bars.tasks[0].fields["note"]

    for number in range(2):
        shown.hear(changed(number, SessionStatus.RUNNING))
    assert "reward" not in bars.tasks[0].fields["note"]  # nothing is scored yet
    shown.hear(changed(0, SessionStatus.COMPLETED, 1.0))

    assert bars.tasks[0].fields["note"] == "1 running, 1 completed, mean reward 1.00 over 1 scored"
    assert (bars.tasks[0].completed, bars.tasks[0].total) == (1, 3)
