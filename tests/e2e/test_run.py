"""`bridle run` and what follows it, as a user has it: processes, files, signals."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from bridle.runtimes.process import owner_mark

from .conftest import arguments_of, bridle_process, call, write_batch

pytestmark = pytest.mark.timeout(180)


def committed(run) -> int:
    """Exchanges in the run's capture, 0 while there is none."""
    from bridle.capture.sqlite import SqliteReader
    from bridle.errors import StoreError

    try:
        with SqliteReader(run / "capture.sqlite") as reader:
            return sum(len(reader.exchanges(s.session_id)) for s in reader.sessions())
    except StoreError:
        return 0


def wait_for(condition, what: str, timeout_s: float = 90.0) -> None:
    """Return when `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def processes_of(folder) -> list[int]:
    """Processes whose command line or environment names `folder`."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                named = str(folder).encode() in Path(f"/proc/{entry.name}/environ").read_bytes()
            except OSError:
                continue
            if named:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A batch of 8 sessions that was run, and what the command said."""
    folder = write_batch(tmp_path_factory.mktemp("batch"), samples=2)
    return folder, call(*arguments_of(folder, "--json"))


@pytest.fixture
def finished(once, tmp_path):
    """The folder of a batch that was run, a copy."""
    return shutil.copytree(once[0], tmp_path / "finished")


def test_bridle_run_completes_a_batch_and_accounts_for_every_token(once):
    folder, done = once

    assert done.returncode == 0, done.stderr
    sessions = json.loads(done.stdout)["sessions"]
    assert len(sessions) == 8
    for line in sessions:
        assert (line["status"], line["reward"], line["merge_ratio"]) == ("COMPLETED", 1.0, 1.0)
        excluded = sum(line["tokens_excluded"].values())
        assert line["tokens_captured"] == line["tokens_trained"] + excluded > 0
        assert (line["exchanges"], line["traces"]) == (2, 1)
    names = {path.name for path in (folder / "run").iterdir()}
    assert {"run.json", "capture.sqlite", "trajectories.jsonl", "summary.json"} <= names
    assert json.loads((folder / "run" / "summary.json").read_text())["sessions"] == sessions


def test_rebuilding_a_finished_run_gives_the_same_bytes(finished):
    run = finished / "run"

    again = call("rebuild", run)

    assert again.returncode == 0, again.stderr
    for name in ("trajectories.jsonl", "trajectories.parquet"):
        assert (run / "rebuilt" / name).read_bytes() == (run / name).read_bytes() != b""


def test_rebuilding_with_per_request_gives_one_trace_per_call(finished):
    again = call("rebuild", finished / "run", "--builder", "per_request", "--json")

    report = json.loads(again.stdout)
    assert report["traces"] == report["exchanges"] == 16
    assert report["captured"] == report["trained"]


def test_sigkill_loses_no_committed_exchange(batch, run_arguments):
    folder = batch(delay_s=300.0)
    run = folder / "run"
    with bridle_process(*run_arguments(folder)) as process:
        wait_for(lambda: committed(run) >= 2, "two exchanges are committed")
        before = committed(run)
        process.kill()
        process.communicate()
    for pid in processes_of(run):
        os.kill(pid, signal.SIGKILL)

    rebuilt = call("rebuild", run, "--json")

    assert rebuilt.returncode == 0, rebuilt.stderr
    report = json.loads(rebuilt.stdout)
    assert report["exchanges"] >= before >= 2
    assert report["captured"] > 0
    shown = call("show", run)
    assert "holds" in shown.stdout


def test_ctrl_c_ends_all_processes_of_a_run_and_keeps_its_capture(batch, run_arguments):
    folder = batch(delay_s=300.0)
    run = folder / "run"
    with bridle_process(*run_arguments(folder)) as process:
        wait_for(lambda: committed(run) >= 2, "two exchanges are committed")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)

    assert process.returncode == 130, err
    assert "interrupted" in err
    assert f"written to {run}; `bridle show {run}`" in err
    wait_for(lambda: not processes_of(run), "no process of the run is left")
    shown = call("show", run, "--json")
    lines = json.loads(shown.stdout)
    assert sum(line["exchanges"] for line in lines) >= 2
    assert {line["status"] for line in lines} <= {"CANCELLED", "COMPLETED"}


def test_a_session_is_shown_as_a_tree_and_replayed_from_its_exported_script(
    finished, run_arguments
):
    folder, run = finished, finished / "run"
    session = json.loads(call("show", run, "--json").stdout)[0]["session_id"]

    tree = call("show", session, "--run", run)
    script = call("show", session, "--run", run, "--as-script")

    assert "root: first" in tree.stdout
    assert "trains" in tree.stdout
    turns = json.loads(script.stdout)["conversations"][0]["turns"]
    (folder / "script.json").write_text(script.stdout)
    replay = call(*run_arguments(folder, "--first", "1", "--out", folder / "again", "--json"))
    line = json.loads(replay.stdout)["sessions"][0]
    assert line["reward"] == 1.0
    assert line["tokens_captured"] == sum(len(turn["token_ids"]) for turn in turns)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("exit 3", "harness_crash"),
        ("kill -SEGV $$", "harness_crash"),
        ("true", "harness_no_call"),
        ("sleep 60", "timeout"),
    ],
)
def test_each_failure_of_a_harness_has_its_own_cause_and_is_not_completed(
    batch, run_arguments, command, cause
):
    agent = {"harness": "command", "command": command}
    folder = batch(1, agent=agent, budgets={"agent_s": 1.5 if cause == "timeout" else 30})

    done = call(*run_arguments(folder, "--json"))

    line = json.loads(done.stdout)["sessions"][0]
    assert done.returncode == 1
    assert line["status"] in {"ERROR", "TIMEOUT"}
    assert line["cause"] == cause


def test_logs_go_to_stderr_and_stdout_is_one_json_document(batch, run_arguments, tmp_path):
    left = tmp_path / "scratch" / "bridle-killed"
    left.mkdir(parents=True)
    pid, _, machine = owner_mark().split(".", 2)
    (left / "owner").write_text(f"{pid}.1.{machine}")

    done = call(*run_arguments(batch(1), "--json"), env={"TMPDIR": str(left.parent)})

    assert json.loads(done.stdout)["sessions"][0]["status"] == "COMPLETED"
    assert "removed what a killed process left" in done.stderr
    assert not left.exists()


def test_bridle_export_writes_sft_examples_of_successful_sessions(finished):
    out = finished / "sft.jsonl"
    done = call("export", finished / "run", "--format", "sft", "--out", out, "--json")

    assert json.loads(done.stdout)["examples"] == 8
    example = json.loads((finished / "sft.jsonl").read_text().splitlines()[0])
    assert len(example["input_ids"]) == len(example["loss_mask"])
    assert 0 < sum(example["loss_mask"]) < len(example["loss_mask"])
