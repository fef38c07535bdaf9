"""The tutorial, as it stands on its page: its files, its commands in order, and the rise.

It runs with an empty home in a fresh folder. The Bridle of the checkout's own environment stands
for an installed one; `make first-day` names an environment with the wheel (`BRIDLE_TEST_BIN`), and
a file for the seconds of each command (`BRIDLE_TEST_RECORD`).
"""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
INSTALLED = Path(os.environ.get("BRIDLE_TEST_BIN", BIN))
RECORD = Path(os.environ.get("BRIDLE_TEST_RECORD", os.devnull))
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)
MOST_COMMANDS = 12


def test_the_tutorial_has_few_commands_and_names_every_file():
    blocks = re.findall(r"^```(?:python|toml|json)", PAGE, re.MULTILINE)

    assert 2 < len(COMMANDS) <= MOST_COMMANDS
    assert len(FILES) == len(blocks) > 2
    assert all(compile(text, name, "exec") for name, text in FILES.items() if name[-3:] == ".py")


def environment(home: Path) -> dict[str, str]:
    """An empty home, Bridle's programs and uv; pip's package index, if it has one, for uv."""
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "PATH": f"{INSTALLED}{os.pathsep}{os.environ['PATH']}"}
    pip: list[str | Path] = [BIN / "python", "-m", "pip"]
    index = subprocess.run(
        [*pip, "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if url := index.stdout.strip():
        env["UV_DEFAULT_INDEX"] = url
    if shutil.which("uv", path=env["PATH"]) is None:
        locked: list[str | Path] = [
            "--no-deps",
            "--require-hashes",
            "-r",
            ROOT / "requirements" / "uv.txt",
        ]
        subprocess.run([*pip, "install", "-qq", "--target", home / "uv", *locked], check=True)
        env["PATH"] += f"{os.pathsep}{home / 'uv' / 'bin'}"
    return env


@pytest.mark.train
@pytest.mark.timeout(900)
def test_an_openai_sdk_agent_improves_when_the_tutorial_is_followed(tmp_path):
    env = environment(tmp_path / "home")
    folder, record = tmp_path, []
    for command in COMMANDS:
        started = time.monotonic()
        if command.startswith("cd "):
            folder /= command.removeprefix("cd ")
            for name, text in FILES.items():
                (folder / name).write_text(text)
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=env,
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        record.append(f"{time.monotonic() - started:6.1f} s  {command}")
    (ROOT / RECORD).write_text("\n".join([*record, ""]))

    course = json.loads((folder / "runs" / "train" / "course.json").read_text())
    rewards = [step["reward"] for step in course["steps"]]
    before, after = (one["reward"] for one in course["evaluations"])
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.2, rewards
    assert after > before + 0.2
    assert (folder / "runs" / "train" / "curve.png").read_bytes().startswith(b"\x89PNG")
