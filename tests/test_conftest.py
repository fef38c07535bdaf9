"""The gates of conftest.py catch what they promise to catch: each runs pytest on a small file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def outcome_of(tmp_path):
    """Runs pytest with our settings and conftest on `source`; its exit status and output."""
    ours = (ROOT / "tests" / "conftest.py").read_text()
    quick = ours.replace("GRACE_S = 5.0", "GRACE_S = 0.5")
    assert quick != ours
    (tmp_path / "conftest.py").write_text(quick)

    def run(source, *arguments):
        (tmp_path / "test_it.py").write_text(source)
        command = [
            *(sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml"),
            *("--rootdir", tmp_path, "-o", "cache_dir=cache", tmp_path, *arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout

    return run


def test_an_asyncio_task_left_running_fails_the_test(outcome_of):
    source = """
import asyncio

async def test_it():
    asyncio.get_running_loop().create_task(asyncio.sleep(60))
"""
    status, output = outcome_of(source)
    assert status == 1
    assert "left tasks behind: ['sleep']" in output


def test_a_child_process_left_behind_fails_the_test(outcome_of):
    source = """
import subprocess

def test_it():
    globals()["kept"] = subprocess.Popen(["sleep", "60"])
"""
    status, output = outcome_of(source, "-W", "ignore::ResourceWarning")
    assert status == 1
    assert "left child processes behind: ['sleep 60']" in output


def test_tasks_and_processes_that_end_do_not_fail_the_test(outcome_of):
    source = """
import asyncio
import subprocess

async def test_tasks():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))

def test_processes():
    subprocess.run(["true"], check=True)
"""
    status, output = outcome_of(source)
    assert (status, "2 passed" in output) == (0, True), output


SKIPS = {
    "a test": "import pytest\n\n@pytest.mark.skip(reason='no tool')\ndef test_it(): ...\n",
    "a call": "import pytest\n\ndef test_it():\n    pytest.skip('no tool')\n",
    "a module": "import pytest\n\npytest.skip('no tool', allow_module_level=True)\n",
}


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS)
def test_no_skips_turns_a_skip_into_a_failure(outcome_of, source):
    status, output = outcome_of(source, "--no-skips")
    assert status in (1, 2)
    assert "skipped under --no-skips: Skipped: no tool" in output


def test_no_skips_does_not_fail_an_expected_failure(outcome_of):
    source = "import pytest\n\n@pytest.mark.xfail\ndef test_it(): raise ValueError\n"
    status, output = outcome_of(source, "--no-skips")
    assert (status, "1 xfailed" in output) == (0, True), output


def test_a_pytest_run_without_tests_fails(outcome_of):
    status, _ = outcome_of("", "--no-skips")
    assert status == 5


def test_a_warning_fails_the_test(outcome_of):
    source = "import warnings\n\ndef test_it():\n    warnings.warn('old', DeprecationWarning)\n"
    status, _ = outcome_of(source)
    assert status == 1


def test_api_keys_and_proxies_of_the_environment_are_hidden_from_tests(outcome_of, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the caller's")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("BRIDLE_TEST_SETTING", "kept")
    source = """
import os

def test_it():
    assert not {"OPENAI_API_KEY", "https_proxy"} & os.environ.keys()
    assert os.environ["BRIDLE_TEST_SETTING"] == "kept"
"""
    status, output = outcome_of(source)
    assert status == 0, output
