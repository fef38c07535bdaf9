"""Instances: the command lines, on a program that stands for apptainer; the suite where it is."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.apptainer import (
    PROGRAMS,
    ApptainerRuntime,
    client_environment,
)
from bridle.runtimes.base import Mount
from bridle.runtimes.conformance import CHECKS, run_check
from bridle.runtimes.process import started_at

FAKE = """#!/bin/bash
# Takes the command lines of apptainer 1.3 and makes no namespaces; what it was asked is in `calls`.
here=${0%/*}
echo "$*" >> "$here/calls"
name=${!#}
case "$1 $2" in
"instance start") setsid sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > "$here/$name.pid" ;;
"instance list")
  pid=$(cat "$here/$name.pid")
  echo "{\\"instances\\": [{\\"instance\\": \\"$name\\", \\"pid\\": $pid, \\"img\\": \\"x\\"}]}" ;;
"instance stop") echo "no instance found" >&2; exit 255 ;;
"exec instance://bridle-"*) shift 2; exec "$@" ;;
*) exit 64 ;;
esac
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The folder of the program: `calls` has its command lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(FAKE)
    (folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
async def started(fake, tmp_path):
    """An instance whose paths are the machine's."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    spec = RuntimeSpec(image="x.sif", network="open", workdir=str(scratch / "work"))
    runtime = ApptainerRuntime(spec, "s", scratch)
    await runtime.start()
    yield runtime
    await runtime.stop()
    assert list(scratch.iterdir()) == []


def calls(fake, *words):
    return [line for line in (fake / "calls").read_text().splitlines() if line.startswith(words)]


def first_process(fake):
    return int(next(fake.glob("*.pid")).read_text())


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "needs an image: a .sif file"),
        ({"image": "x", "cpus": 2}, "no share of processors"),
        ({"image": "x", "workdir": "/a/../b"}, "must not contain"),
        ({"image": "x", "kwargs": {"nv": 1}}, r"kwargs \['binds'\]; given: \['nv'\]"),
    ],
)
def test_unsupported_options_are_refused(asked, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        ApptainerRuntime(RuntimeSpec(**asked), "s", tmp_path)


async def test_start_without_the_apptainer_command_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFailure, match="needs the command apptainer"):
        await ApptainerRuntime(RuntimeSpec(image="x"), "s", tmp_path).start()


def test_instance_options_set_overlay_binds_and_a_network_with_loopback_only(tmp_path):
    spec = RuntimeSpec(image="x.sif", gpus=1, kwargs={"binds": ["/data"]})
    mount = Mount(tmp_path / "bundle", "/opt/bridle/pi")
    line = " ".join(ApptainerRuntime(spec, "s", Path("/s"), [mount]).options())
    for part in (
        "--userns --containall --no-privs --overlay /s/overlay",
        "--home /s/home:/home/agent --bind /s/work:/work --bind /s/tmp:/tmp",
        f"--bind {tmp_path}/bundle:/opt/bridle/pi:ro --bind /data:/data:ro",
        "--net --network none --nv",
    ):
        assert part in line
    open_one = ApptainerRuntime(
        RuntimeSpec(image="x", network="open", workdir="/w"), "s", Path("/s")
    )
    assert "--net" not in open_one.options()
    assert "/s/work:/w" in open_one.options()


async def test_commands_and_file_transfers_run_inside_the_instance(started, fake, tmp_path):
    result = await started.exec('echo "$KEY $BRIDLE_EXEC"; pwd; exit 3', env={"KEY": "a b"})
    assert (result.exit_code, result.stdout.splitlines()) == (
        3,
        [b"a b s/1", str(tmp_path / "scratch" / "work").encode()],
    )
    assert (await started.exec("exit 137")).signal == signal.SIGKILL
    await started.write("deep/file", b"written")
    await started.download("deep", tmp_path / "out")
    assert (tmp_path / "out/file").read_bytes() == b"written"
    image, name = calls(fake, "instance start")[0].split()[-2:]
    assert image == "x.sif"
    assert {line.split()[1] for line in calls(fake, "exec")} == {f"instance://{name}"}


async def test_environment_values_are_not_on_the_apptainer_command_line(started, fake):
    await started.exec("true", env={"KEY": "s3cret"})
    assert "s3cret" not in (fake / "calls").read_text()


async def test_a_command_after_a_kill_starts_a_new_instance(started, fake):
    before = first_process(fake)
    await started.kill()
    await started.kill()
    assert (await started.exec("echo again")).stdout == b"again\n"
    assert len(calls(fake, "instance start")) == 2
    assert first_process(fake) != before
    assert len(calls(fake, "instance stop")) == 1


async def test_an_instance_killed_from_outside_is_a_runtime_failure(started, fake):
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_outcome(started.exec("read line < $FIFO", env=_fifo(fake))))
        while not calls(fake, "exec"):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        os.kill(first_process(fake), signal.SIGKILL)
        while started_at(first_process(fake)) is not None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        (fake / "fifo").write_text("go\n")
    assert "was ended from outside" in running.result()


def _fifo(fake):
    os.mkfifo(fake / "fifo")
    return {"FIFO": str(fake / "fifo")}


async def _outcome(work):
    try:
        return str(await work)
    except RuntimeFailure as error:
        return str(error)


async def test_an_error_contains_the_message_of_apptainer(fake, tmp_path):
    runtime = ApptainerRuntime(RuntimeSpec(image="x", network="open"), "s", tmp_path)
    (fake / "apptainer").write_text("#!/bin/sh\necho 'FATAL: no such image' >&2; exit 255\n")
    with pytest.raises(RuntimeFailure, match="apptainer instance start: FATAL: no such image"):
        await runtime.start()
    (fake / "apptainer").write_text(
        '#!/bin/sh\necho "$*" >> ${0%/*}/calls; echo \'{"instances": null}\'\n'
    )
    with pytest.raises(RuntimeFailure) as error:
        await runtime.start()
    name = calls(fake, "instance start")[0].split()[-1]
    assert f"no process of {name} in" in str(error.value)
    await runtime.stop()


def test_only_apptainer_s_own_variables_reach_the_apptainer_command(monkeypatch):
    monkeypatch.setenv("APPTAINER_CACHEDIR", "/cache")
    monkeypatch.setenv("APPTAINERENV_KEY", "secret")
    monkeypatch.setenv("BRIDLE_CONTROL_TOKEN", "secret")
    result = client_environment()
    assert result["APPTAINER_CACHEDIR"] == "/cache"
    assert "secret" not in result.values()


if any(map(shutil.which, PROGRAMS)):

    @pytest.mark.sandbox
    @pytest.mark.timeout(180)
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_apptainer_runtime_passes_each_conformance_check(check, tmp_path):
        from tests.sandbox.rootfs import make_rootfs

        image = str(make_rootfs(tmp_path / "image"))
        await run_check(check, ApptainerRuntime, tmp_path, RuntimeSpec(image=image))
