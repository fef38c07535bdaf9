""".ci/run: every suite runs, and the exit status and a table say what came of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.draw import Draw

ROOT = Path(__file__).resolve().parents[2]
GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")


@pytest.fixture
def ran(tmp_path):
    """Runs CI on a checkout of some commits with these targets; its status, and its summary."""

    def run(makefile, commits=1):
        (tmp_path / "Makefile").write_text(makefile)
        (tmp_path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
        subprocess.run([*GIT, "init", "-q"], check=True, cwd=tmp_path)
        for number in range(commits):
            commit = [*GIT, "commit", "-q", "--allow-empty", "-m", str(number)]
            subprocess.run(commit, check=True, cwd=tmp_path)
        done = subprocess.run(
            ["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.partition("==> summary")[2]

    return run


@pytest.mark.timeout(60)
def test_ci_runs_all_suites_and_fails_with_the_command_to_repeat_a_failed_one(ran):
    status, summary = ran("lint:\n\tfalse\n%:\n\t@echo '==== 2 passed in 1s ===='\n", commits=2)

    assert status == 1
    assert re.search(r"^lint +2 min +0:\d\d  FAILED: exit status 2", summary, re.MULTILINE)
    assert "    repeat it: BRIDLE_TEST_DRAW=2 make lint\n" in summary
    assert summary.count(" passed  2 passed in 1s") == len(re.findall(r" min ", summary)) - 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("commits", "suite"), [(2, "vllm"), (3, "sglang"), (4, "vllm")])
def test_ci_runs_sglang_instead_of_vllm_on_every_fourth_commit(ran, commits, suite):
    status, summary = ran("%:\n\t@echo $@ $$BRIDLE_TEST_DRAW\n", commits)

    assert status == 0
    assert re.findall(r"^test-(vllm|sglang)", summary, re.MULTILINE) == [suite]


def test_each_part_of_the_first_day_suite_is_drawn_within_three_commits():
    """The salt of the script gives each of the three days a part of its own."""
    text = (ROOT / "scripts" / "first-day").read_text()
    [days] = re.findall(r"days=\(([a-z -]+)\)", text)
    [spec] = re.findall(r"tests\.draw (\S+)", text)
    for block in range(3, 30, 3):
        drawn = [
            [day for day in days.split() if Draw.parse(spec, str(block + n)).takes(day)]
            for n in range(3)
        ]
        assert sorted(drawn) == [["agent"], ["pull-request"], ["server"]]
