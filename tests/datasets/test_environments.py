"""Metadata and hooks of strangers' packages are read, never believed."""

import asyncio
import zipfile

import pytest
from packaging.version import Version

from bridle.datasets.environments import (
    Bench,
    Refused,
    build_system,
    host_python,
    last_line,
    make_environment,
    read_wheel,
    requirements_of,
)
from bridle.runtimes.local import LocalRuntime

HEAD = "Metadata-Version: 2.1\nName: p\nVersion: 1.0\n"


class Spec(LocalRuntime):
    """A runtime of a plug-in, which says what it was asked for."""

    def __init__(self, spec, *where):
        self.network = spec.network
        super().__init__(spec.model_copy(update={"network": "open"}), *where)


async def test_strangers_code_gets_a_sandbox_without_network():
    async with Bench("tests.datasets.test_environments:Spec").place() as runtime:
        assert isinstance(runtime, Spec)
        assert runtime.network == "none"


def a_wheel(tmp_path, metadata=HEAD, name="p-1.0-py3-none-any.whl"):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("p/__init__.py", "")
        wheel.writestr("p-1.0.dist-info/METADATA", metadata)
    return folder


def read(folder):
    return read_wheel(folder, "P", Version("1"))


def test_files_licence_and_requirements_are_read_from_a_wheel(tmp_path):
    more = "License: Free\nClassifier: License :: OSI Approved :: MIT License\nRequires-Dist: x>1\n"
    wheel = read(a_wheel(tmp_path, f"{HEAD}{more}\nRequires-Dist: in the description\n"))
    assert (wheel.files, wheel.licence, wheel.needs()) == (
        {"p/__init__.py"},
        "MIT License",
        ["x>1"],
    )
    assert "description" not in wheel.headers
    assert read(a_wheel(tmp_path)).licence == "unknown"


@pytest.mark.parametrize(
    "metadata",
    [
        HEAD.replace("p", "../../p"),
        HEAD.replace("1.0", "2.0"),
        HEAD.replace("1.0", "1.0/../x"),
        HEAD + "Requires-Dist: ???\n",
        "",
    ],
)
def test_a_wheel_with_a_mismatched_name_or_version_or_malformed_metadata_is_refused(
    tmp_path, metadata
):
    with pytest.raises(Refused, match="build"):
        read(a_wheel(tmp_path, metadata))


def test_a_platform_specific_wheel_is_refused(tmp_path):
    with pytest.raises(Refused, match="not pure Python"):
        read(a_wheel(tmp_path, name="p-1.0-cp311-cp311-linux_x86_64.whl"))


@pytest.mark.parametrize("asked", [["-r /etc/passwd"], ["p @ file:///x"], "p", 3, {"p": 1}])
def test_build_requirements_that_are_urls_files_or_malformed_are_refused(asked):
    with pytest.raises(Refused, match="environment"):
        requirements_of(asked)
    assert requirements_of(["p>1"]) == ["p>1"]
    assert requirements_of(None) == []


@pytest.mark.parametrize(
    "text",
    [
        "build-system = 3",
        "[build-system]\nrequires = 'setuptools'",
        "[build-system]\nbackend-path = 3",
        "[",
    ],
)
def test_a_malformed_pyproject_toml_is_refused(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(Refused):
        build_system(tmp_path)


async def test_concurrent_requests_for_an_environment_build_one(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    files = {"own.pth": "/work\n"}
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(make_environment([], files)) for _ in range(3)]
    first, *others = [call.result() for call in calls]
    assert others == [first, first]
    (packages,) = first.folder.glob("lib/python3*/site-packages")
    assert (packages / "own.pth").read_text() == "/work\n"
    assert [path.name for path in first.folder.parent.glob("[!.]*")] == [first.folder.name]
    assert (await make_environment([], {"own.pth": "/other\n"})).folder != first.folder


def test_the_reason_of_a_failed_install_is_the_last_error_line_and_not_the_hint_behind_it():
    said = b"ERROR: no version of p\nERROR: nothing matches p\n\nhint: upgrade pip\n"
    assert last_line(said) == "ERROR: nothing matches p"
    assert last_line(b"it broke\n\n") == "it broke"


async def test_a_program_that_warns_and_times_out_is_refused_for_the_timeout(monkeypatch):
    monkeypatch.setattr("bridle.datasets.environments.PIP_S", 0.5)
    program = "import sys, time; print('WARNING', file=sys.stderr, flush=True); time.sleep(600)"
    with pytest.raises(Refused, match=r"environment: it took more than 0\.5 s"):
        await host_python("-c", program)
