import json
import subprocess
import sys

import pytest

from bridle.harnesses.base import SCRIPTS
from bridle.harnesses.scripts import function_runner

TASK = {
    "instruction": "do it",
    "base_urls": {"openai": "http://gw/v1"},
    "model": "m",
    "workdir": "/w",
    "session_id": "s",
    "task_id": "t",
    "sample_index": 0,
    "context_length": 100,
}


@pytest.fixture
def called(tmp_path):
    """`called(text)`: the ended process of the runner with a function `run` of that source."""

    def call(text):
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules/mine.py").write_text(text)
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"module": "mine", "name": "run", "task": TASK}))
        command = [sys.executable, str(SCRIPTS / "function_runner.py"), str(config)]
        env = {"OPENAI_API_KEY": "key-1"}
        return subprocess.run(command, env=env, capture_output=True, check=False, text=True)

    return call


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("def run(task): return task.key + ' ' + task.instruction", "key-1 do it\n"),
        (
            "def run(task): return {'urls': task.base_urls}",
            '{"urls": {"openai": "http://gw/v1"}}\n',
        ),
        ("def run(task): pass", ""),
        ("async def run(task): return task.model", "m\n"),
        (
            "class run:\n def __init__(self, task): pass\n def __str__(self): return 'one'",
            '"one"\n',
        ),
    ],
)
def test_function_runner_prints_what_the_function_returns(called, text, printed):
    done = called(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_function_runner_exits_with_1_and_a_traceback_if_the_function_raises(called):
    done = called("def run(task): return {}[task.model]")
    assert done.returncode == 1
    assert "KeyError: 'm'" in done.stderr


def test_function_runner_does_not_import_bridle_and_knows_every_task_field():
    imported = (SCRIPTS / "function_runner.py").read_text()
    assert "bridle" not in imported
    assert set(TASK) | {"key"} == set(function_runner.FunctionTask.__dataclass_fields__)
