"""A user's mistake is named in one line, with the documented exit code."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import bridle

from .conftest import call

pytestmark = pytest.mark.timeout(180)

SOURCES = Path(bridle.__file__).parents[1]


def failure(*arguments: object) -> tuple[int, str]:
    done = call(*arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join(done.stderr.split())


def test_an_unknown_harness_is_reported_with_the_known_ones(batch, run_arguments):
    code, said = failure(*run_arguments(batch(1), "--harness", "clod"))

    assert code == 2
    assert "clod" in said
    assert "mini_swe_agent" in said


def test_a_mistake_in_a_task_file_is_reported_with_path_line_and_field(batch, run_arguments):
    folder = batch(2)
    path = folder / "tasks.jsonl"
    first, second = path.read_text().splitlines()
    broken = json.loads(second) | {"num_samples": 0}
    path.write_text(f"{first}\n{json.dumps(broken)}\n")

    code, said = failure(*run_arguments(folder))

    assert code == 2
    assert "tasks.jsonl:2" in said
    assert "num_samples" in said


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("scripted:/no/such/file.json", "no such file"),
        ("embedded:/no/such/model", "/no/such/model"),
        ("magic:thing", "known forms"),
        ("http://127.0.0.1:9", "--tokenizer"),
    ],
)
def test_an_unavailable_engine_is_reported_by_name(batch, engine, expected):
    folder = batch(1)

    code, said = failure("run", folder / "tasks.jsonl", "--engine", engine, "--out", folder / "run")

    assert code in {2, 3}
    assert expected in said


def test_a_tokenizer_without_a_chat_template_is_refused_with_its_folder(batch, tmp_path):
    from bridle.config import builtin_tokenizer_dir

    folder = batch(1)
    bare = tmp_path / "bare"
    shutil.copytree(builtin_tokenizer_dir(), bare)
    (bare / "chat_template.jinja").unlink()

    code, said = failure(
        "run", folder / "tasks.jsonl", "--engine", f"scripted:{folder / 'script.json'}",
        "--tokenizer", bare, "--out", folder / "run",
    )  # fmt: skip

    assert code in {2, 3}
    assert str(bare) in said
    assert "template" in said


@pytest.fixture
def without_torch(tmp_path):
    """The environment of a Python that has all packages of this one but torch."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("torch", "functorch")):
            (folder / entry.name).symlink_to(entry)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{SOURCES}"}


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--model", "MODEL", "--tasks", "TASKS", "--out", "OUT"),
        ("run", "TASKS", "--engine", "embedded:MODEL", "--tokenizer", "builtin", "--out", "OUT"),
    ],
    ids=lambda command: command[0],
)
def test_without_torch_the_pip_command_for_the_extra_is_printed(
    batch, without_torch, tmp_path, command
):
    names = {"TASKS": batch(1) / "tasks.jsonl", "MODEL": tmp_path, "OUT": tmp_path / "out"}
    (tmp_path / "config.json").write_text("{}")
    words = [re.sub("[A-Z]+$", lambda name: str(names[name[0]]), word) for word in command]

    done = subprocess.run(
        [sys.executable, "-S", "-m", "bridle.cli", *words],
        capture_output=True, check=False, text=True, env=os.environ | without_torch,
    )  # fmt: skip

    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert re.search(r"run pip install .*\[embedded\]'", done.stderr)


def test_a_run_folder_that_holds_a_run_is_not_overwritten(batch, run_arguments):
    folder = batch(1)
    call(*run_arguments(folder))

    code, said = failure(*run_arguments(folder))

    assert code == 2
    assert "run" in said


def test_a_run_that_failed_to_start_can_be_repeated_in_its_folder(batch, run_arguments):
    folder = batch(1)
    script = folder / "script.json"
    script.rename(folder / "away")

    failed, _ = failure(*run_arguments(folder))
    (folder / "away").rename(script)
    code, said = failure(*run_arguments(folder))

    assert failed == 2
    assert code == 0, said


def test_bridle_show_without_a_run_reports_the_folder(tmp_path):
    code, said = failure("show", "nothing", "--run", tmp_path)

    assert code == 2
    assert str(tmp_path) in said


def test_an_unknown_flag_exits_with_code_2():
    code, said = failure("run", "--no-such-flag")

    assert code == 2
    assert "no-such-flag" in said
