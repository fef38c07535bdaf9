"""Sandboxes of bubblewrap: the contract's suite, and what is their own."""

import os

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.bubblewrap import BubblewrapRuntime, what_is_missing
from bridle.runtimes.conformance import CHECKS, run_check


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"gpus": 1}, "no GPUs: use 'docker'"),
        ({"image": "python:3.12"}, "image 'python:3.12' must be a root folder"),
        ({"workdir": "/a/../b"}, "must not contain"),
        ({"kwargs": {"privileged": True}}, r"'binds' .*'folders'.* given: \['privileged'\]"),
        ({"kwargs": {"folders": ["tests"]}}, "folder 'tests' must be an absolute path"),
        ({"kwargs": {"folders": ["/a/../b"]}}, "folder '/a/../b' must be an absolute path"),
    ],
)
def test_what_it_cannot_give_it_refuses(asked, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        BubblewrapRuntime(RuntimeSpec(**asked), "s", tmp_path)


def test_a_machine_without_it_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = what_is_missing()
    assert missing is not None
    assert "needs bwrap" in missing
    assert "install the packages bubblewrap" in missing


async def test_a_machine_without_it_cannot_start_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFailure, match="needs bwrap"):
        await BubblewrapRuntime(RuntimeSpec(), "s", tmp_path).start()


def test_an_open_network_needs_no_way(tmp_path):
    runtime = BubblewrapRuntime(RuntimeSpec(network="open"), "s", tmp_path)
    assert runtime.gateway_url("http://127.0.0.1:81/") == "http://127.0.0.1:81/"


@pytest.mark.sandbox
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_conforms(check, tmp_path):
    await run_check(check, BubblewrapRuntime, tmp_path)


@pytest.fixture
async def runtime(tmp_path):
    """Makes started runtimes, which are stopped at the end."""
    made = []

    async def start(**spec):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(BubblewrapRuntime(RuntimeSpec(**spec), f"s-{os.getpid()}-{len(made)}", folder))
        await made[-1].start()
        return made[-1]

    yield start
    for place in made:
        await place.stop()


@pytest.mark.sandbox
async def test_after_a_kill_the_next_command_finds_the_files_and_no_process(runtime):
    place = await runtime()
    await place.exec("echo kept > file; (setsid sleep 60 </dev/null >/dev/null 2>&1 &)")
    await place.kill()
    result = await place.exec("cat file; ps -e -o comm= | grep -c sleep")
    assert result.stdout == b"kept\n1\n"  # process 1's own


@pytest.mark.sandbox
async def test_a_workdir_of_its_own_is_where_commands_run(runtime):
    place = await runtime(workdir="/testbed")
    result = await place.exec("pwd; touch here")
    assert (result.stdout, place.workdir) == (b"/testbed\n", "/testbed")
