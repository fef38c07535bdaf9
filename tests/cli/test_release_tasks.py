"""Real release tasks: verified, solved by real harnesses, and failed by those that do nothing.

The tasks of `releases.txt` are made when a test first uses them. A task runs in Docker too: its
environment is bound into a container, whose image brings git and the system that the environment
was made on.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.real_clients.matrix import MINI_ENDS
from tests.sandbox.images import put_image

from bridle.evaluators.patch import files_of

RELEASES = Path(os.environ.get("BRIDLE_TEST_RELEASES", "missing"))
PAIRS = {
    pair.replace("==", "-").replace("..", "-"): pair
    for pair in Path(__file__).with_name("releases.txt").read_text().split()
}
NAMES = list(PAIRS)
HARNESSES = ("mini_swe_agent", "pi", "codex")
BACKENDS = ("bubblewrap", "docker")

pytestmark = [pytest.mark.tasks, pytest.mark.timeout(600)]

CLEAN = (
    'test "$(git rev-list --all --count)" = 1 && test -z "$(git fsck --unreachable 2>/dev/null)"'
    ' && test -z "$(git remote)$(git tag)" && python -c "import importlib.metadata as m; '
    "assert m.version('{package}') == '{base}'\""
)
"""The repository has the commit of the older release alone, and no newer one is installed."""


def a_part(*names_and_more):
    """A case that is drawn with the other cases of its package."""
    package = names_and_more[0].rsplit("-", 2)[0]
    return pytest.param(*names_and_more, marks=pytest.mark.drawn_with(package))


CASES = [
    a_part(name, backend, HARNESSES[(place + turn) % len(HARNESSES)])
    for place, name in enumerate(NAMES)
    for turn, backend in enumerate(BACKENDS)
]


def release(name: str) -> Path:
    """Return the folder of a task; make the task if no test has used it."""
    if not (RELEASES / name).exists():
        with tempfile.TemporaryDirectory(dir=RELEASES) as made:
            words = ("tasks", "from-releases", PAIRS[name], "--hint", "tests", "--out", f"{made}/a")
            ours = {"BRIDLE_CACHE": str(RELEASES.parent), "BRIDLE_RUNTIME": "bubblewrap"}
            argv = [sys.executable, "-m", "bridle.cli", *words]
            subprocess.run(argv, env=os.environ | ours, check=True)
            Path(made, "a", name).rename(RELEASES / name)
    return RELEASES / name


@pytest.fixture
def play(say, tmp_path, monkeypatch):
    """Play a task once with a script; its result."""
    monkeypatch.setenv("BRIDLE_RUNTIME", "bubblewrap")

    def play(name: str, backend: str, harness: str, *commands: str) -> dict:
        folder = shutil.copytree(release(name), tmp_path / name, symlinks=True)
        task = json.loads((folder / "task.json").read_text())
        task["runtime"]["backend"] = backend
        if backend == "docker":
            task["runtime"]["image"] = put_image(large=True)
        (folder / "task.json").write_text(json.dumps(task))
        turns: list[dict] = [{"shell": [command]} for command in commands]
        turns += [{"shell": [MINI_ENDS]} if harness == "mini_swe_agent" else {"content": "Done."}]
        script = tmp_path / "script.json"
        script.write_text(json.dumps({"conversations": [{"turns": turns}]}))
        out = tmp_path / "run"
        words = ("--engine", f"scripted:{script}", "--harness", harness, "--out", out)
        said = say("run", folder, *words)
        assert said.code == 0, said.out + said.err
        (line,) = (out / "trajectories.jsonl").read_text().splitlines()
        return json.loads(line)

    return play


@pytest.mark.parametrize("name", [a_part(name) for name in NAMES])
def test_tasks_verify_finds_each_release_task_sound(name, say):
    said = say("tasks", "verify", release(name), "--json")
    assert (said.code, said.json[0]["verdict"]) == (0, "sound"), said.out


@pytest.mark.parametrize("name", [a_part(name) for name in NAMES])
def test_binds_of_a_cached_release_task_are_resolved_paths(name):
    """The task outlives the checkout whose `.cache` led to it."""
    runtime = json.loads((release(name) / "task.json").read_text())["runtime"]
    places = [Path(each) for each in runtime["kwargs"]["binds"]]
    assert places == [place.resolve(strict=True) for place in places]


@pytest.mark.parametrize(("name", "backend", "harness"), CASES)
def test_a_harness_that_applies_the_reference_patch_has_reward_1(name, backend, harness, play):
    facts = json.loads((release(name) / "task.json").read_text())["metadata"]
    patch = (RELEASES / name / "solution" / "reference.patch").read_text()
    files = [f"git apply --whitespace=nowarn - <<'END'\n{text}END" for _, text in files_of(patch)]
    first = f"{CLEAN.format_map(facts)} && {files[0]}"
    result = play(name, backend, harness, first, *files[1:])
    assert result["reward"] == 1.0, result["metadata"]


@pytest.mark.parametrize(("name", "backend", "harness"), CASES)
def test_a_harness_that_does_nothing_has_reward_0(name, backend, harness, play):
    assert play(name, backend, harness)["reward"] == 0.0
