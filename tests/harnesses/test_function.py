import asyncio
import json
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from tests.harnesses.made import context
from tests.node.house import a_node, checked, nothing_lives, task

from bridle.config import AgentSpec, Task
from bridle.errors import ConfigError
from bridle.harnesses import default_agent, open_harness
from bridle.harnesses.function import FunctionHarness, import_path
from bridle.types import Cause

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/function-agent"
SHELL_AGENT = default_agent("function").function


@pytest.fixture
def written(tmp_path):
    """`written(text)`: a file `mine.py` with it; returns `file:run`."""

    def write(text):
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))
        return f"{tmp_path}/mine.py:run"

    return write


def function(path, **settings):
    return FunctionHarness(AgentSpec(harness="function", function=path, settings=settings))


def job(path, **changes):
    made = task(**changes)
    return made.model_copy(update={"agent": AgentSpec(harness="function", function=path)})


# ---- how it is started


def test_function_file_and_runner_are_copied_and_the_api_key_is_in_no_file(written):
    launch = function(written("def run(task): ..."), python="python3").launch(context())
    runner, config = "/h/.function/function_runner.py", "/h/.function/config.json"
    assert launch.command == ("python3", runner, config)
    assert launch.files["/h/.function/modules/mine.py"] == b"def run(task): ..."
    parsed = json.loads(launch.files[config])
    assert (parsed["module"], parsed["name"]) == ("mine", "run")
    assert parsed["task"]["instruction"] == "do it"
    assert parsed["task"]["model"] == "bridle-policy"
    assert launch.env["OPENAI_API_KEY"] == "key-1"
    assert not any(b"key-1" in content for content in launch.files.values())


def test_function_s_whole_package_is_copied_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "lazybones"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "inner.py").write_text("from os import getcwd as run")
    monkeypatch.chdir(tmp_path)
    harness = function("lazybones.inner:run")
    launch = harness.launch(context())
    assert launch.folders == {"/h/.function/modules/lazybones": package}
    assert launch.command[0] == sys.executable
    assert "lazybones" not in sys.modules


def test_modules_named_in_settings_are_copied_with_the_function(tmp_path, monkeypatch):
    (tmp_path / "helpful_one.py").write_text("")
    (tmp_path / "mine.py").write_text("import helpful_one\nrun = print")
    monkeypatch.chdir(tmp_path)
    launch = function(f"{tmp_path}/mine.py:run", modules=["helpful_one"]).launch(context())
    assert "/h/.function/modules/helpful_one.py" in launch.files


def test_function_version_is_the_digest_of_its_source_unless_given(written):
    one = function(written("def run(task): return 1")).version
    assert one == function(written("def run(task): return 1")).version
    assert one != function(written("def run(task): return 2")).version
    path = written("def run(task): ...")
    assert open_harness(AgentSpec(harness="function", function=path, version="7")).version == "7"


def test_import_path_of_a_module_function_is_module_and_name():
    assert import_path(textwrap.dedent) == "textwrap:dedent"
    assert function(import_path(textwrap.dedent)).version
    for nameless in (lambda task: task, "".strip):
        with pytest.raises(ConfigError, match="cannot be imported"):
            import_path(nameless)


def test_import_path_of_a_function_in_the_main_script_is_file_and_name(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from bridle.harnesses.function import import_path\n"
        "def run(task): ...\n"
        "print(import_path(run))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == f"{script}:run"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, "needs 'package.module:name'"),
        ("textwrap", "is not 'package.module:name'"),
        ("textwrap:a.b", "is not 'package.module:name'"),
        ("no_such_module:run", "no module 'no_such_module'"),
        ("tests.conftest:nothing", "defines no 'nothing'"),
        ("sys:exit", "'sys' has no source"),
        ("textwrap:nothing", "defines no 'nothing'"),
        ("email.nowhere:run", "No such file"),
        ("/no/where.py:run", "No such file"),
    ],
)
def test_a_missing_or_malformed_function_path_is_refused_before_the_start(path, said):
    with pytest.raises(ConfigError, match=r"agent\.function") as refused:
        function(path)
    assert said in str(refused.value)


def test_a_function_file_with_a_syntax_error_is_refused(written):
    with pytest.raises(ConfigError, match="is not Python"):
        function(written("def run(task:"))


# ---- how it runs


async def test_a_function_s_model_calls_are_captured_and_its_result_is_logged(tmp_path):
    made = job(SHELL_AGENT, evaluator=checked())
    async with a_node(tmp_path) as node:
        result = await node.run(made)
    assert (result.status, result.error, result.exit_code) == ("COMPLETED", None, 0)
    assert result.reward == 1.0
    stats = result.trajectory.metadata["stats"]
    assert (stats["exchanges"], stats["merge_ratio"]) == (2, 1.0)
    assert (tmp_path / "run" / result.logs["stdout"]).read_text() == "It is done.\n"


async def test_function_example_completes_and_its_source_is_in_the_guide(tmp_path):
    text = (EXAMPLE / "agent.py").read_text()
    page = (ROOT / "docs/guides/harnesses/function.md").read_text()
    assert text[text.index("async def run") :] in page
    made = tomllib.loads((EXAMPLE / "task.toml").read_text())
    async with a_node(tmp_path) as node:
        result = await node.run(Task(**made, task_dir=str(EXAMPLE)))
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)


async def test_function_file_is_relative_to_the_task_and_may_be_async(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import asyncio, os\n"
        "async def run(task):\n"
        "    await asyncio.sleep(0)\n"
        "    assert os.getcwd() == task.workdir\n"
        "    return {'asked': task.instruction, 'of': sorted(task.base_urls)}\n"
    )
    made = job("mine.py:run", task_dir=str(tmp_path))
    async with a_node(tmp_path) as node:
        result = await node.run(made)
    assert (result.cause, result.exit_code) == (Cause.HARNESS_NO_CALL, 0)
    assert json.loads((tmp_path / "run" / result.logs["stdout"]).read_text()) == {
        "asked": "Write done to out.txt.",
        "of": ["anthropic", "google", "openai"],
    }


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [("raise ValueError('oh no')", 1, "ValueError: oh no"), ("raise SystemExit(7)", 7, "")],
)
async def test_a_function_that_raises_is_a_harness_crash_with_its_traceback_in_the_log(
    written, tmp_path, body, code, said
):
    async with a_node(tmp_path) as node:
        result = await node.run(job(written(f"def run(task): {body}")))
    assert (result.status, result.cause) == ("ERROR", Cause.HARNESS_CRASH)
    assert result.exit_code == code
    assert said in (tmp_path / "run" / result.logs["stderr"]).read_text()


SLEEPS = "import time\ndef run(task): print('here'); time.sleep(60)"


async def test_a_function_beyond_its_time_budget_is_killed(written, tmp_path):
    async with a_node(tmp_path) as node:
        result = await node.run(job(written(SLEEPS), budgets={"agent_s": 5}))
        assert nothing_lives(result.session_id)
    assert (result.status, result.cause) == ("TIMEOUT", Cause.TIMEOUT)
    assert (tmp_path / "run" / result.logs["stdout"]).read_text() == "here\n"


async def test_a_function_whose_session_is_cancelled_is_killed(written, tmp_path):
    made = job(written(SLEEPS))
    async with a_node(tmp_path) as node, asyncio.TaskGroup() as group:
        running = group.create_task(node.run(made))
        log = tmp_path / "run" / "sessions"
        async with asyncio.timeout(30):
            while not any(f.read_text() for f in log.glob("*/stdout*")):  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait({running})
        assert all(nothing_lives(folder.name) for folder in log.iterdir())


def test_function_mounts_the_folders_of_the_python_that_runs_it(written):
    path = written("def run(task): ...")
    assert Path(sys.prefix) in function(path).sees
    assert function(path, python="/usr/bin/python3").sees == ()
