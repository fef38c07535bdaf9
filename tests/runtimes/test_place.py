"""Behaviour that runtimes share, on a folder of this machine under another name."""

from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import Mount
from bridle.runtimes.bubblewrap import BubblewrapRuntime
from bridle.runtimes.docker import DockerRuntime
from bridle.runtimes.place import Archived, refuse_workdir
from bridle.runtimes.process import run_process

CONTAINING = (BubblewrapRuntime, DockerRuntime)


class Folder(Archived):
    """Commands run in `scratch`, whatever folder they name, and see it as `TOP`."""

    contains = True
    workdir = "/work"
    home = "/home/agent"

    async def start(self):
        self._usable = True

    async def kill(self):
        pass

    async def _run(self, inside):
        self._must_be_usable()
        (self._scratch / "aside").mkdir(exist_ok=True)
        self.asked = inside
        at = self._scratch / PurePosixPath(inside.cwd).relative_to("/")
        argv = [word.replace("/work", f"{self._scratch}/work") for word in inside.argv]
        at.mkdir(parents=True, exist_ok=True)
        env = {"PATH": "/usr/bin:/bin", **inside.env, **self._marks()}
        return await run_process(replace(inside, argv=argv, cwd=str(at), env=env))


@pytest.fixture
def place(tmp_path):
    made = Folder(RuntimeSpec(), "s", tmp_path)
    (tmp_path / "aside").mkdir()
    made._usable = True
    return made


async def test_a_line_is_bash_s_and_a_folder_is_the_workdir_s(place):
    result = await place.exec("exit 4 | cat; pwd", cwd="deep", env={"A": "b"}, stdin=b"x")
    assert result.stdout.endswith(b"/work/deep\n")
    assert (place.asked.cwd, place.asked.env, place.asked.stdin) == ("/work/deep", {"A": "b"}, b"x")
    await place.exec(["true"], cwd="/elsewhere")
    assert (place.asked.cwd, place.asked.argv) == ("/elsewhere", ["true"])


async def test_every_command_has_a_mark_of_its_own(place):
    first = await place.exec("echo $BRIDLE_SESSION $BRIDLE_EXEC")
    second = await place.exec("echo $BRIDLE_SESSION $BRIDLE_EXEC")
    assert [first.stdout, second.stdout] == [b"s s/1\n", b"s s/2\n"]


async def test_files_go_in_and_out_as_archives(place, tmp_path):
    source = tmp_path / "given"
    source.mkdir()
    (source / "file").write_text("given")
    await place.upload(source, "deep/folder")
    await place.write("deep/other", b"written", mode=0o755)
    await place.download("deep", tmp_path / "out")
    assert (tmp_path / "out/folder/file").read_text() == "given"
    assert (tmp_path / "out/other").stat().st_mode & 0o777 == 0o755
    assert list((tmp_path / "aside").iterdir()) == []
    with pytest.raises(RuntimeFailure, match="nothing: Cannot stat"):
        await place.download("nothing", tmp_path / "out")
    with pytest.raises(RuntimeFailure, match="deep/other"):
        await place.write("deep/other/x", b"")


async def test_before_its_start_nothing_goes_in_or_out(tmp_path):
    place = Folder(RuntimeSpec(), "s", tmp_path)
    for work in (place.exec("true"), place.upload(tmp_path, "x"), place.download("x", tmp_path)):
        with pytest.raises(RuntimeFailure, match="session s is not started, or was stopped"):
            await work


@pytest.mark.parametrize("kind", CONTAINING)
def test_a_mounted_path_is_seen_at_its_target(kind, tmp_path):
    runtime = kind(RuntimeSpec(image="/"), "s", tmp_path, [Mount(tmp_path / "b", "/opt/b")])
    assert runtime.inside(tmp_path / "b" / "bin" / "x") == "/opt/b/bin/x"
    assert runtime.inside(tmp_path / "other") == str(tmp_path / "other")


@pytest.mark.parametrize("kind", CONTAINING)
async def test_what_must_be_mounted_and_is_not_there_is_named(kind, tmp_path):
    gone = Mount(tmp_path / "gone", "/opt/b")
    with pytest.raises(RuntimeFailure, match=f"does not exist: {tmp_path}/gone|needs bwrap"):
        await kind(RuntimeSpec(image="/"), "s", tmp_path, [gone]).start()


@pytest.mark.parametrize("kind", CONTAINING)
def test_the_gateway_has_one_address_inside(kind, tmp_path):
    runtime = kind(RuntimeSpec(image="/"), "s", tmp_path)
    assert runtime.gateway_url("http://127.0.0.1:81/s/x/v1") == "http://127.0.0.1:4000/s/x/v1"
    with pytest.raises(RuntimeFailure, match="has one gateway"):
        runtime.gateway_url("http://127.0.0.1:82/")
    closed = kind(RuntimeSpec(image="/", network="none"), "s", tmp_path)
    assert closed.gateway_url("http://127.0.0.1:81/") == "http://127.0.0.1:81/"


def test_a_workdir_that_leads_upwards_is_refused():
    refuse_workdir(RuntimeSpec(workdir="/a/b"), "x")
    with pytest.raises(ConfigError, match=r"runtime 'x': workdir '/a/\.\./b' must not contain"):
        refuse_workdir(RuntimeSpec(workdir="/a/../b"), "x")
