import asyncio
import os
import secrets
import socket
from pathlib import Path

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import Mount
from bridle.runtimes.files import remove_folders
from bridle.runtimes.local import LocalRuntime

SESSION = f"s-{secrets.token_hex(8)}"
"""Of this run alone: another run of these tests may be under way."""


@pytest.fixture
async def runtime(tmp_path):
    made = LocalRuntime(RuntimeSpec(env={"FROM": "spec"}, workdir="repo"), SESSION, tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"image": "python:3.12"}, "image"),
        ({"cpus": 1, "memory_mb": 100}, "cpus, memory_mb"),
        ({"network": "none"}, "network = 'none'"),
        ({"workdir": "/app"}, "workdir '/app' must lie inside"),
        ({"workdir": "a/../../b"}, "must lie inside"),
        ({"kwargs": {"x": 1}}, r"takes no kwargs; given: \['x'\]"),
    ],
)
def test_unsupported_options_are_refused(asked, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        LocalRuntime(RuntimeSpec(**asked), SESSION, tmp_path)


def test_local_runtime_reports_that_it_does_not_contain(tmp_path):
    assert LocalRuntime(RuntimeSpec(), SESSION, tmp_path).contains is False


async def test_environment_of_a_command_has_no_variable_of_the_caller(runtime):
    os.environ["OPENAI_API_KEY"] = "sk-caller"
    try:
        result = await runtime.exec(["env"])
    finally:
        del os.environ["OPENAI_API_KEY"]
    names = {line.partition("=")[0] for line in result.stdout.decode().splitlines()}
    assert names == {
        "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "USER", "LOGNAME", "SHELL", "TERM",
        "FROM", "BRIDLE_SESSION", "BRIDLE_PLACE", "BRIDLE_EXEC",
    }  # fmt: skip


async def test_stopping_one_runtime_of_a_session_does_not_stop_another(runtime, tmp_path):
    other = LocalRuntime(RuntimeSpec(), SESSION, tmp_path / "other")
    await other.start()
    async with asyncio.TaskGroup() as group:
        os.mkfifo(f"{other.workdir}/begun")
        running = group.create_task(other.exec("echo > begun; exec sleep 60"))
        await asyncio.to_thread(Path(other.workdir, "begun").read_text)
        await runtime.exec("true")
        await runtime.kill()
        assert not running.done()
        await other.kill()
    assert running.result().signal is not None
    await other.stop()


async def test_a_relative_workdir_is_a_folder_below_the_work_folder(runtime, tmp_path):
    assert runtime.workdir == str(tmp_path / "work" / "repo")
    assert (await runtime.exec("pwd")).stdout.decode().strip() == runtime.workdir


async def test_stop_leaves_an_empty_scratch_folder(tmp_path):
    runtime = LocalRuntime(RuntimeSpec(), SESSION, tmp_path)
    await runtime.start()
    await runtime.exec(
        "mkdir -p a/b && touch a/b/c ~/x && ln -s /etc link && chmod 000 a && chmod 500 ."
    )
    await runtime.stop()
    assert list(tmp_path.iterdir()) == []


async def test_commands_and_files_are_refused_before_the_start(tmp_path):
    runtime = LocalRuntime(RuntimeSpec(), SESSION, tmp_path)
    for work in (runtime.exec("true"), runtime.write("x", b""), runtime.download("x", tmp_path)):
        with pytest.raises(RuntimeFailure, match="not started"):
            await work


async def test_a_missing_mount_is_named(tmp_path):
    runtime = LocalRuntime(RuntimeSpec(), SESSION, tmp_path, [Mount(tmp_path / "bundle", "/opt/b")])
    with pytest.raises(RuntimeFailure, match=r"does not exist: .*/bundle"):
        await runtime.start()


async def test_start_without_bash_is_a_runtime_failure(tmp_path):
    runtime = LocalRuntime(RuntimeSpec(env={"PATH": "/nowhere"}), SESSION, tmp_path)
    with pytest.raises(RuntimeFailure, match="needs bash"):
        await runtime.start()


async def test_an_unwritable_scratch_folder_is_a_runtime_failure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeFailure, match="cannot make the folders of session s-"):
        await LocalRuntime(RuntimeSpec(), SESSION, tmp_path / "file").start()


async def test_an_upload_of_a_missing_file_fails(runtime, tmp_path):
    with pytest.raises(RuntimeFailure, match=r"cannot upload .*/none to here"):
        await runtime.upload(tmp_path / "none", "here")


async def test_a_download_of_a_socket_is_refused(runtime, tmp_path):
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{runtime.workdir}/socket")
    with pytest.raises(RuntimeFailure, match="is not a regular file"):
        await runtime.download("socket", tmp_path / "out")
    listening.close()


def test_a_folder_that_cannot_be_removed_is_named(tmp_path):
    with pytest.raises(RuntimeFailure, match=r"folder /proc/self/fdinfo could not be removed"):
        remove_folders([tmp_path, Path("/proc/self/fdinfo")])
    assert not tmp_path.exists()
