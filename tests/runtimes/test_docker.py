import asyncio
import os
from pathlib import Path

import pytest
from tests.sandbox.images import spec_of

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import Mount
from bridle.runtimes.conformance import CHECKS, run_check
from bridle.runtimes.docker import (
    DockerRuntime,
    check_daemon,
    client_environment,
    docker,
    image_facts,
    layers,
    program,
    remove_left_behind,
)
from bridle.runtimes.process import owner_mark


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "needs an image"),
        ({"image": "x", "workdir": "/a/../b"}, "must not contain"),
        ({"image": "x", "kwargs": {"privileged": True}}, r"kwargs .* given: \['privileged'\]"),
    ],
)
def test_unsupported_options_are_refused(asked, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        DockerRuntime(RuntimeSpec(**asked), "s", tmp_path)


async def test_runtime_spec_becomes_docker_run_options(tmp_path, monkeypatch):
    limits = {"gpus": 2, "cpus": 1.5, "memory_mb": 64, "max_processes": 9, "storage_mb": 1}
    place = {"image": "x", "network": "none", "workdir": "/app", "kwargs": {"user": "1000"}}
    spec = RuntimeSpec.model_validate(limits | place)
    runtime = DockerRuntime(spec, "s-1", tmp_path, [Mount(tmp_path / "bundle", "/opt/b")])
    (tmp_path / "bundle").mkdir()
    docker_program = tmp_path / "bin" / "docker"
    docker_program.parent.mkdir()
    docker_program.write_text(
        '#!/bin/sh\necho "$*" >> ${0%/*}/calls\n'
        '[ "$1" != create ] && echo \'[{"Config": {}, "RootFS": {}}]\'\n'
    )
    docker_program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker_program.parent}:{os.environ['PATH']}")
    with pytest.raises(RuntimeFailure):  # it makes none
        await runtime.start()
    [words] = [line for line in (tmp_path / "bin/calls").read_text().splitlines()
               if line.startswith("create ")]  # fmt: skip
    for option in (
        "--gpus 2",
        "--cpus 1.5",
        "--memory 64m --memory-swap 64m",
        "--pids-limit 9",
        "--ulimit fsize=1048576:1048576",
        "--network none",
        "--user 1000",
        f"--volume {tmp_path}/bundle:/opt/b:ro",
        "--security-opt no-new-privileges",
    ):
        assert option in words, option


async def test_a_container_that_is_not_started_refuses_commands(tmp_path):
    with pytest.raises(RuntimeFailure, match="is not started"):
        await DockerRuntime(RuntimeSpec(image="x"), "s", tmp_path).exec("true")


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_docker_runtime_passes_each_conformance_check(check, tmp_path):
    await run_check(check, DockerRuntime, tmp_path, RuntimeSpec(**await spec_of("docker")))


@pytest.mark.sandbox
@pytest.mark.timeout(180)
class TestContainers:
    async def started(self, tmp_path, **spec):
        runtime = DockerRuntime(RuntimeSpec(**await spec_of("docker"), **spec), "own", tmp_path)
        await runtime.start()
        return runtime

    async def test_start_with_an_unavailable_image_names_the_image(self, tmp_path):
        runtime = DockerRuntime(RuntimeSpec(image="bridle-no-such-image:1"), "s", tmp_path)
        with pytest.raises(RuntimeFailure, match="'bridle-no-such-image:1' is not here"):
            await runtime.start()
        await runtime.stop()

    async def test_files_survive_a_kill_and_processes_do_not(self, tmp_path):
        runtime = await self.started(tmp_path)
        await runtime.exec("echo kept > file; (setsid sleep 60 </dev/null >/dev/null 2>&1 &)")
        await runtime.kill()
        result = await runtime.exec("cat file; ps ax | grep -c '[s]leep 60'")
        await runtime.stop()
        assert result.stdout == b"kept\n0\n"

    async def test_commands_run_in_a_configured_workdir(self, tmp_path):
        runtime = await self.started(tmp_path, workdir="/testbed")
        result = await runtime.exec("pwd; touch here")
        await runtime.stop()
        assert (result.stdout, runtime.workdir) == (b"/testbed\n", "/testbed")

    async def test_a_write_into_an_existing_folder_is_one_docker_cp(self, tmp_path, monkeypatch):
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

    async def test_environment_values_with_spaces_and_newlines_reach_the_command(self, tmp_path):
        runtime = await self.started(tmp_path)
        result = await runtime.exec('echo "$KEY"', env={"KEY": "a b\nc"})
        await runtime.stop()
        assert result.stdout == b"a b\nc\n"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a `docker` on PATH that is a bash script; it may write to `calls`."""

    def make(script):
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return tmp_path / "calls"

    return make


async def test_an_error_contains_the_message_of_the_docker_daemon(fake):
    fake("echo no such thing >&2; exit 1")
    with pytest.raises(RuntimeFailure, match="docker inspect: no such thing"):
        await docker(["inspect", "x"])


async def test_docker_command_of_a_hanging_daemon_times_out(fake):
    fake("sleep 60")
    with pytest.raises(RuntimeFailure, match=r"docker ps: did not end within 0.1 s"):
        await docker(["ps"], timeout_s=0.1)


async def test_a_missing_docker_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFailure, match="needs the command docker on PATH"):
        await docker(["ps"])
    assert await remove_left_behind() == 0


def test_check_daemon_reports_a_daemon_that_is_down(fake):
    calls = fake("echo Cannot connect to the Docker daemon. >&2; exit 1")
    with pytest.raises(RuntimeFailure, match="daemon cannot be used: Cannot connect to the Docker"):
        check_daemon()
    assert calls.read_text() == "version --format {{.Server.Version}}\n"
    fake("echo 27.0")
    check_daemon()


async def test_a_local_image_is_not_pulled(fake):
    calls = fake('echo \'[{"Id": "x"}]\'')
    assert await image_facts("here:1") == {"Id": "x"}
    assert calls.read_text() == "image inspect here:1\n"


def test_concurrent_image_lookups_work_in_successive_event_loops(fake):
    fake('echo \'[{"Id": "x"}]\'')

    async def ask_twice():
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(image_facts("both:1")) for _ in range(2)]
        return [each.result() for each in asked]

    for _ in range(2):
        assert asyncio.run(ask_twice()) == [{"Id": "x"}] * 2


async def test_pull_failure_names_the_image(fake):
    calls = fake("echo nowhere >&2; exit 1")
    with pytest.raises(RuntimeFailure, match="image 'gone:1' is not here and cannot be pulled"):
        await image_facts("gone:1")
    assert calls.read_text().splitlines() == ["image inspect gone:1", "pull gone:1"]


def test_pull_progress_is_read_from_the_output():
    said = (
        "3.12: Pulling from library/python\n0123456789ab: Pulling fs layer\n"
        "ba9876543210: Pulling fs layer\nba9876543210: Verifying Checksum\n"
        "0123456789ab: Pull complete\nfedcba987654: Already exists\n"
    )
    assert layers(said) == (2, 3)
    assert layers("") == (0, 0)
    assert layers(said + "ba9876543210: Pull complete\nDigest: sha256:0123456789ab\n") == (3, 3)


async def test_a_missing_image_is_pulled_once_and_then_inspected(fake, tmp_path):
    calls = fake(f"""case "$1" in
    pull) echo "0123456789ab: Pull complete"; touch {tmp_path}/here;;
    image) [ -e {tmp_path}/here ] && echo '[{{"Id": "x"}}]';; esac""")
    assert await image_facts("far:1") == {"Id": "x"}
    assert calls.read_text().splitlines().count("pull far:1") == 1


async def test_an_image_with_a_build_folder_is_built_once(fake, tmp_path):
    calls = fake(f"""case "$1" in
    build) touch {tmp_path}/built;;
    image) [ -e {tmp_path}/built ] && echo '[{{"Id": "x"}}]';; esac""")
    for _ in range(2):
        assert await image_facts("made:1", build="/tasks/environment") == {"Id": "x"}
    lines = calls.read_text().splitlines()
    assert lines.count("build --quiet --force-rm --tag made:1 /tasks/environment") == 1


async def test_build_failure_names_the_folder(fake):
    fake("echo no FROM >&2; exit 1")
    with pytest.raises(RuntimeFailure, match="cannot be built of /t: docker build: no FROM"):
        await image_facts("made:1", build="/t")


async def test_containers_of_dead_owners_are_removed_and_those_of_living_owners_kept(fake):
    place = owner_mark().split(".", 2)[2]
    owners = (owner_mark(), f"999999999.5.{place}", f"{os.getpid()}.1.{place}", "1.1.elsewhere.1")
    result = "".join(f"c{number} {owner}\\n" for number, owner in enumerate(owners, 1))
    calls = fake(f'[ $1 != ps ] || printf "{result}"')
    assert await remove_left_behind() == 2
    assert calls.read_text().splitlines()[-1] == "rm --force --volumes c2 c3"


async def test_without_a_daemon_no_container_is_removed(fake):
    fake("exit 1")
    assert await remove_left_behind() == 0


def test_docker_command_gets_its_login_and_daemon_variables_and_no_secret(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///x")
    monkeypatch.setenv("SECRET", "x")
    found = client_environment()
    assert found["DOCKER_HOST"] == "unix:///x"
    assert Path(found["DOCKER_CONFIG"]).name == ".docker"
    assert "SECRET" not in found
