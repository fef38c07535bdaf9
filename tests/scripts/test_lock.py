"""The locks in requirements/ keep what pyproject.toml declares, without asking any index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]
CORE = PROJECT["project"]["dependencies"] + GROUPS["build"]
DECLARED = {
    "core.txt": CORE,
    "dev.txt": [*CORE, *GROUPS["test"], *GROUPS["lint"], *GROUPS["typing"]],
    "embedded.txt": CORE,
}
PIN = re.compile(r"^([a-z0-9.-]+)==([^ ;]+)[^\n]*((?:\n    --hash=[^\n]+)*)", re.MULTILINE)


def pins(lock):
    """Name -> the versions pinned for it, more than one where platforms differ."""
    versions = {}
    for name, version, _ in PIN.findall((ROOT / "requirements" / lock).read_text()):
        versions.setdefault(name, []).append(version)
    return versions


@pytest.mark.parametrize("lock", DECLARED)
def test_every_declared_dependency_is_pinned_within_its_bounds(lock):
    pinned = pins(lock)
    for requirement in map(Requirement, DECLARED[lock]):
        assert pinned.get(requirement.name), f"{requirement} is not locked: run `make lock`"
        assert all(requirement.specifier.contains(v) for v in pinned[requirement.name])


@pytest.mark.parametrize("lock", DECLARED)
def test_every_locked_dependency_has_a_hash(lock):
    found = PIN.findall((ROOT / "requirements" / lock).read_text())
    assert found
    assert [name for name, _, hashes in found if not hashes] == []


def test_the_core_and_embedded_locks_pin_the_versions_of_the_dev_lock():
    dev = pins("dev.txt")
    for lock in ("core.txt", "embedded.txt"):
        for name, versions in pins(lock).items():
            assert dev.get(name, versions) == versions


def test_a_plain_installation_has_neither_torch_nor_ray():
    core = {Requirement(one).name for one in PROJECT["project"]["dependencies"]}
    assert {"aiohttp", "pydantic"} <= core & pins("core.txt").keys()
    assert not {"torch", "ray"} & (core | pins("core.txt").keys())


def test_optional_dependencies_have_no_exact_pins():
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = [Requirement(one) for of in extras.values() for one in of]

    assert requirements
    assert [str(one) for one in requirements if "==" in str(one.specifier)] == []


def test_torch_is_locked_within_its_range_and_brings_no_accelerator_packages():
    (extra,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["embedded"])
    (about,) = PROJECT["tool"]["uv"]["dependency-metadata"]
    lines = (ROOT / "requirements" / "torch.txt").read_text().splitlines()
    assert f"torch=={about['version']}" in lines
    assert extra.specifier.contains(about["version"])
    names = pins("embedded.txt")
    assert "torch" not in names
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
