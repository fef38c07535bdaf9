import os
from pathlib import Path

import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes.base import Mount
from bridle.runtimes.bubblewrap import (
    OWN,
    BubblewrapRuntime,
    bwrap_options,
    what_is_missing,
    write_etc,
)
from bridle.runtimes.conformance import CHECKS, run_check


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"gpus": 1}, "no GPUs: use 'docker'"),
        ({"image": "python:3.12"}, "image 'python:3.12' must be a root folder"),
        ({"workdir": "/a/../b"}, "must not contain"),
        ({"kwargs": {"privileged": True}}, r"'binds', 'folders'.* given: \['privileged'\]"),
        ({"kwargs": {"folders": ["tests"]}}, "folder 'tests' must be an absolute path"),
        ({"kwargs": {"folders": ["/a/../b"]}}, "folder '/a/../b' must be an absolute path"),
    ],
)
def test_unsupported_options_are_refused(asked, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        BubblewrapRuntime(RuntimeSpec(**asked), "s", tmp_path)


def test_message_about_missing_bwrap_names_the_packages_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = what_is_missing()
    assert missing is not None
    assert "needs bwrap" in missing
    assert "install the packages bubblewrap" in missing


async def test_start_without_bwrap_is_a_runtime_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFailure, match="needs bwrap"):
        await BubblewrapRuntime(RuntimeSpec(), "s", tmp_path).start()


def test_gateway_url_is_unchanged_with_an_open_network(tmp_path):
    runtime = BubblewrapRuntime(RuntimeSpec(network="open"), "s", tmp_path)
    assert runtime.gateway_url("http://127.0.0.1:81/") == "http://127.0.0.1:81/"


@pytest.mark.sandbox
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_bubblewrap_runtime_passes_each_conformance_check(check, tmp_path):
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
async def test_files_survive_a_kill_and_processes_do_not(runtime):
    place = await runtime()
    await place.exec("echo kept > file; (setsid sleep 60 </dev/null >/dev/null 2>&1 &)")
    await place.kill()
    result = await place.exec("cat file; ps -e -o comm= | grep -c sleep")
    assert result.stdout == b"kept\n1\n"  # process 1's own


@pytest.mark.sandbox
async def test_commands_run_in_a_configured_workdir(runtime):
    place = await runtime(workdir="/testbed")
    result = await place.exec("pwd; touch here")
    assert (result.stdout, place.workdir) == (b"/testbed\n", "/testbed")


def words_of(tmp_path, mounts=(), **spec):
    for name in ("etc", *OWN):
        (tmp_path / name).mkdir(exist_ok=True)
    write_etc(tmp_path / "etc")
    return bwrap_options(RuntimeSpec(**spec), tmp_path, mounts, "/work")


def bound(words, option):
    """Target -> source of one kind of bind."""
    return {words[at + 2]: words[at + 1] for at, word in enumerate(words) if word == option}


def test_system_folders_are_read_only_and_three_session_folders_are_writable(tmp_path):
    words = words_of(tmp_path)
    assert bound(words, "--bind") == {
        "/tmp": str(tmp_path / "tmp"),
        "/home/agent": str(tmp_path / "home"),
        "/work": str(tmp_path / "work"),
    }
    assert bound(words, "--ro-bind")["/usr"] == "/usr"
    assert words[-2:] == ["--remount-ro", "/"]
    assert {path.name for path in tmp_path.iterdir()} == {*OWN, "etc"}


def test_host_secrets_and_home_folders_are_not_mounted(tmp_path):
    seen = set(bound(words_of(tmp_path), "--ro-bind"))
    for hidden in (
        "/",
        "/etc",
        "/etc/shadow",
        "/etc/ssl",
        "/root",
        "/home",
        "/var",
        "/run",
        "/sys",
    ):
        assert hidden not in seen
    assert (tmp_path / "etc" / "passwd").read_text().startswith("agent:x:1000:1000:")


def test_host_network_is_shared_only_with_network_open(tmp_path):
    assert "--share-net" not in words_of(tmp_path)
    assert "--share-net" not in words_of(tmp_path, network="none")
    assert "--share-net" in words_of(tmp_path, network="open")


def test_image_folders_are_mounted_except_proc_tmp_and_root(tmp_path):
    image = tmp_path / "image"
    for name in ("usr/bin", "etc", "proc", "tmp", "root", "opt"):
        (image / name).mkdir(parents=True)
    (image / "bin").symlink_to("usr/bin")
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    words = words_of(scratch, image=str(image))

    binds = bound(words, "--ro-bind")
    masked = {target for target, source in binds.items() if source == "/dev/null"}
    assert set(binds) - masked == {"/usr", "/etc", "/opt"}
    assert all(target.startswith("/proc/") for target in masked)
    assert bound(words, "--symlink")["/bin"] == "usr/bin"


def test_bundles_and_configured_binds_are_read_only(tmp_path):
    mounts = [Mount(Path("/host/bundle"), "/opt/bridle/pi")]
    binds = bound(
        words_of(tmp_path, mounts, kwargs={"binds": ["/data/set", "/data/cli:/opt/node"]}),
        "--ro-bind",
    )
    assert binds["/opt/bridle/pi"] == "/host/bundle"
    assert (binds["/data/set"], binds["/opt/node"]) == ("/data/set", "/data/cli")


def test_configured_session_folders_are_writable_at_their_targets(tmp_path):
    binds = bound(words_of(tmp_path, kwargs={"folders": ["/tests", "/logs"]}), "--bind")
    assert binds["/tests"] == str(tmp_path / "more" / "0")
    assert binds["/logs"] == str(tmp_path / "more" / "1")


@pytest.mark.parametrize("option", ["--unshare-all", "--unshare-user", "--disable-userns"])
def test_all_namespaces_are_unshared_and_nested_user_namespaces_disabled(tmp_path, option):
    assert option in words_of(tmp_path)
