"""A folder that pip takes for its index: releases of a tiny package, and what its tests need.

The wheels are put together again from what is installed beside Bridle, so nothing is downloaded.
"""

import io
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["build"]

[project]
name = "tinytext"
version = "{version}"
license = "MIT"

[dependency-groups]
test = ["pytest"]
"""
BACKEND = """import pathlib, tomllib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    name = project["name"] + "-" + project["version"]
    facts = {"Metadata-Version": 2.4, "Name": project["name"], "Version": project["version"]}
    facts["License-Expression"] = project["license"]
    with zipfile.ZipFile(pathlib.Path(folder, name + "-py3-none-any.whl"), "w") as wheel:
        wheel.write("src/tinytext/__init__.py", "tinytext/__init__.py")
        lines = "".join(f"{key}: {value}\\n" for key, value in facts.items())
        wheel.writestr(name + ".dist-info/METADATA", lines)
        wheel.writestr(name + ".dist-info/WHEEL", "Root-Is-Purelib: true\\nTag: py3-none-any\\n")
    return name + "-py3-none-any.whl"
"""
TEXT = """__version__ = "{version}"


def words(text):
    return text.split()
"""
TESTS = """import tinytext

for number in range(5):
    exec(f"def test_words_{number}(): assert tinytext.words('a ' * {number}) == ['a'] * {number}")
"""
SHOUT = '''

def shout(text):
    """In capitals, with a mark."""
    text = text.strip().upper()
    mark = "" if text.endswith("!") else "!"
    return text + mark
'''
SHOUT_TESTS = """

def test_a_shout_has_one_mark():
    assert tinytext.shout(" go! ") == "GO!"
    assert tinytext.shout("go") == "GO!"
"""
NOTES = "# Changes\n\n## 1.0\n\n- Begin.\n"
WHEELS = ("pytest", "iniconfig", "packaging", "pluggy", "pygments")


def tiny_releases() -> dict[str, dict[str, str]]:
    """Files of each release: 1.0, a version bump, a new function with notes, one without tests."""

    def files(version: str, more: str = "", tests: str = "", notes: str = "") -> dict[str, str]:
        return {
            "pyproject.toml": PYPROJECT.format(version=version),
            "build/backend.py": BACKEND,
            "src/tinytext/__init__.py": TEXT.format(version=version) + more,
            "tests/test_text.py": f"# Tests of {version}.\n" + TESTS + tests,
            "CHANGES.md": NOTES.replace("## 1.0", f"{notes}## 1.0"),
        }

    noted = "## 1.2\n\n- `shout` gives a text in capitals with one exclamation mark.\n\n"
    without_tests = files("1.3", SHOUT, notes=noted)
    del without_tests["tests/test_text.py"]
    return {
        "1.0": files("1.0"),
        "1.1": files("1.1", notes="## 1.1\n\n- Nothing but a number.\n\n"),
        "1.2": files("1.2", SHOUT, SHOUT_TESTS, noted),
        "1.3": without_tests,
    }


def use_index(patch: pytest.MonkeyPatch, folder: Path, cache: Path) -> None:
    """Make a folder the only index of pip, and `cache` the cache of Bridle."""
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder))
    patch.setenv("BRIDLE_CACHE", str(cache))


def make_index(folder: Path) -> Path:
    """Write the releases and wheels to `folder`; pip reads it with `--find-links`."""
    folder.mkdir()
    for version, files in tiny_releases().items():
        top = f"tinytext-{version}"
        with tarfile.open(folder / f"{top}.tar.gz", "w:gz") as tar:
            for name, text in files.items():
                add(tar, f"{top}/{name}", text.encode())
    for name in WHEELS:
        repack(name, folder)
    return folder


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def repack(name: str, folder: Path) -> None:
    """The wheel of an installed package of pure Python."""
    installed = distribution(name)
    version = installed.version
    title = name.replace("-", "_")
    own = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}
    record = ""
    with zipfile.ZipFile(folder / f"{title}-{version}-py3-none-any.whl", "w") as wheel:
        for path in installed.files or ():
            if ".." not in path.parts and path.suffix != ".pyc" and path.name not in own:
                wheel.writestr(str(path), Path(path.locate()).read_bytes())
                record += f"{path},,\n"
        info = f"{title}-{version}.dist-info"
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
