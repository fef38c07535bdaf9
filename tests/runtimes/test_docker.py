"""Containers: the contract's suite, and what is their own."""

import os
from pathlib import Path

import pytest
from tests.sandbox.images import spec_of

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import Mount
from bridle.runtimes.conformance import CHECKS, run_check
from bridle.runtimes.docker import DockerRuntime, program


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "needs an image"),
        ({"image": "x", "workdir": "/a/../b"}, "must not contain"),
        ({"image": "x", "kwargs": {"privileged": True}}, r"kwargs .* given: \['privileged'\]"),
    ],
)
def test_what_it_cannot_give_it_refuses(asked, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        DockerRuntime(RuntimeSpec(**asked), "s", tmp_path)


async def test_what_a_task_asks_for_are_options_of_the_container(tmp_path):
    limits = {"gpus": 2, "cpus": 1.5, "memory_mb": 64, "max_processes": 9, "storage_mb": 1}
    place = {"image": "x", "network": "none", "workdir": "/app", "kwargs": {"user": "1000"}}
    spec = RuntimeSpec.model_validate(limits | place)
    runtime = DockerRuntime(spec, "s-1", tmp_path, [Mount(Path("/bundle"), "/opt/b")])
    words = " ".join(await runtime._options())
    for option in (
        "--gpus 2",
        "--cpus 1.5",
        "--memory 64m --memory-swap 64m",
        "--pids-limit 9",
        "--ulimit fsize=1048576:1048576",
        "--network none",
        "--user 1000",
        "--volume /bundle:/opt/b:ro",
        "--security-opt no-new-privileges",
    ):
        assert option in words, option


async def test_before_its_start_it_runs_nothing(tmp_path):
    with pytest.raises(RuntimeFailure, match="is not started"):
        await DockerRuntime(RuntimeSpec(image="x"), "s", tmp_path).exec("true")


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_conforms(check, tmp_path):
    await run_check(check, DockerRuntime, tmp_path, RuntimeSpec(**await spec_of("docker")))


@pytest.mark.sandbox
@pytest.mark.timeout(180)
class TestContainers:
    async def started(self, tmp_path, **spec):
        runtime = DockerRuntime(RuntimeSpec(**await spec_of("docker"), **spec), "own", tmp_path)
        await runtime.start()
        return runtime

    async def test_an_image_that_is_nowhere_is_named(self, tmp_path):
        runtime = DockerRuntime(RuntimeSpec(image="bridle-no-such-image:1"), "s", tmp_path)
        with pytest.raises(RuntimeFailure, match="'bridle-no-such-image:1' is not here"):
            await runtime.start()
        await runtime.stop()

    async def test_files_outlive_a_kill_and_processes_do_not(self, tmp_path):
        runtime = await self.started(tmp_path)
        await runtime.exec("echo kept > file; (setsid sleep 60 </dev/null >/dev/null 2>&1 &)")
        await runtime.kill()
        result = await runtime.exec("cat file; ps ax | grep -c '[s]leep 60'")
        await runtime.stop()
        assert result.stdout == b"kept\n0\n"

    async def test_a_workdir_of_its_own_is_where_commands_run(self, tmp_path):
        runtime = await self.started(tmp_path, workdir="/testbed")
        result = await runtime.exec("pwd; touch here")
        await runtime.stop()
        assert (result.stdout, runtime.workdir) == (b"/testbed\n", "/testbed")

    async def test_files_for_a_folder_that_is_there_are_one_call(self, tmp_path, monkeypatch):
        runtime = await self.started(tmp_path)
        calls, wrapper = tmp_path / "calls", tmp_path / "programs" / "docker"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\necho "$1" >>{calls}\nexec {program()} "$@"\n')
        wrapper.chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
            await runtime.write("here", b"1")
            one = [call for call in calls.read_text().split() if call != "inspect"]
            await runtime.write("new/folder/there", b"2")
        result = await runtime.exec("cat here new/folder/there")
        await runtime.stop()
        assert one == ["cp"]
        assert result.stdout == b"12"

    async def test_a_value_of_the_environment_is_not_on_the_command_line(self, tmp_path):
        runtime = await self.started(tmp_path)
        result = await runtime.exec('echo "$KEY"', env={"KEY": "a b\nc"})
        await runtime.stop()
        assert result.stdout == b"a b\nc\n"
