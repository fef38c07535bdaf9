"""The first pull request, as it stands on its page: each file and command, in order, in a clone.

The offline suite has this environment in place of the clone's own, which `make setup` would make,
and leaves the linters out; the long form runs every command as it is printed.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "first-pull-request.md").read_text()
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
AUTHOR = {
    f"GIT_{role}_{what}": "newcomer@localhost"
    for role in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


@pytest.fixture
def clone(tmp_path):
    """A clone of a fork of what is committed here."""
    fork = tmp_path / "fork"
    for words in (
        ["clone", "--quiet", "--bare", ROOT, fork],
        ["clone", "--quiet", fork, tmp_path / "clone"],
    ):
        subprocess.run(["git", *map(str, words)], check=True)
    return tmp_path / "clone"


def follow(clone, run):
    """Write the page's files and `run` its commands; those of a block "fails" must fail."""
    for language, title, text in BLOCK.findall(PAGE):
        if language == "python":
            (clone / title).write_text(text)
            continue
        for command in re.findall(r"^\$ (.+)$", text, re.MULTILINE):
            done = run(command)
            said = f"{command}\n{done.stdout}\n{done.stderr}"
            assert (done.returncode != 0) == (title == "fails"), said
            assert title != "fails" or "unknown evaluator 'printed'" in done.stdout, said
    words = ["git", "--git-dir", str(clone.parent / "fork"), "show", "--stat=200", "printed"]
    pushed = subprocess.run(words, capture_output=True, check=True, text=True).stdout
    for changed in ("printed.py", "test_printed.py", "evaluators.md", "CHANGELOG.md"):
        assert changed in pushed
    assert "6 files changed" in pushed


def bash(command, clone, env):
    line = ["bash", "-c", command]
    return subprocess.run(line, cwd=clone, env=env, capture_output=True, check=False, text=True)


@pytest.mark.timeout(120)
def test_the_first_pull_request_guide_works_with_make_replaced_by_pytest(clone):
    env = os.environ | AUTHOR | {"PYTHONPATH": str(clone / "src"), "PYTEST_ADDOPTS": ""}

    def run(command):
        if command in {"make setup", "make lint"}:
            return subprocess.CompletedProcess(command, 0)
        if command.startswith("make test ARGS="):
            (tests,) = shlex.split(command.removeprefix("make test ARGS="))
            python = shlex.join([sys.executable, "-m", "pytest", "-q", "-n0", "--no-cov"])
            command = f"{python} {tests}"
        return bash(command, clone, env)

    follow(clone, run)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_command_of_the_first_pull_request_guide_succeeds(clone, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    env = os.environ | AUTHOR | {"HOME": str(home)}
    follow(clone, lambda command: bash(command, clone, env))
