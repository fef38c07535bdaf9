"""The drawn part of a suite: what a commit draws, and that no test is left out for long."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.draw import WITHIN, Draw

ROOT = Path(__file__).resolve().parent.parent
ROWS = [f"tests/room/test_{number}.py" for number in range(1000)]
SOURCE = """
import pytest

@pytest.mark.core
def test_always(): pass

@pytest.mark.parametrize("name", ["aider", "pi", "codex", "cline"])
@pytest.mark.parametrize("form", ["whole", "live"])
def test_row(name, form): pass

@pytest.mark.drawn_with("aider")
def test_beside(): pass
"""


@pytest.mark.parametrize("parts", range(1, WITHIN // 2 + 1))
@pytest.mark.parametrize("salt", ["", "27"])
def test_every_test_group_is_drawn_within_20_consecutive_commits(parts, salt):
    drawn = [Draw(parts, number, salt).part for number in range(500)]
    belongs = {Draw(parts, 0, salt).part_of(row) for row in ROWS}
    assert belongs == set(range(parts))
    for first in range(len(drawn) - WITHIN + 1):
        assert set(drawn[first : first + WITHIN]) == belongs


def test_every_part_of_the_vllm_suite_is_drawn_within_20_commits_beside_sglang():
    """`.ci/run` draws SGLang for one number in four and gives vLLM's suite the rest, closed up."""
    for first in range(500):
        numbers = range(first, first + WITHIN)
        of_vllm = {Draw(3, n // 4 * 3 + n % 4).part for n in numbers if n % 4 != 3}
        assert of_vllm == {0, 1, 2}
        assert any(n % 4 == 3 for n in numbers)


def test_the_drawn_part_of_a_test_group_depends_on_its_name_and_the_salt_only():
    assert [Draw(3, 0).part_of(row) for row in ROWS[:5]] == [2, 0, 2, 2, 1]
    assert [Draw(3, 0, "27").part_of(row) for row in ROWS[:5]] != [2, 0, 2, 2, 1]


def test_commits_at_any_regular_distance_draw_every_part():
    for step in range(1, 12):
        drawn = {Draw(3, number).part for number in range(0, 20 * step, step)}
        assert drawn == {0, 1, 2}, step


@pytest.mark.parametrize("parts", ["0", "11"])
def test_more_parts_than_20_commits_can_draw_are_refused(parts):
    with pytest.raises(ValueError, match="parts must be 1 to 10"):
        Draw.parse(parts, "1")


@pytest.fixture
def selected(tmp_path, monkeypatch):
    """Collects `SOURCE` under a number; the names of the tests that would run."""
    (tmp_path / "test_rows.py").write_text(SOURCE)

    def select(number, *arguments):
        if number is not None:
            monkeypatch.setenv("BRIDLE_TEST_DRAW", str(number))
        command = [
            *(sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml"),
            *("--rootdir", tmp_path, "-o", f"cache_dir={tmp_path}/cache", "-p", "tests.draw"),
            *("--draw=2", "--collect-only", "-q", "-p", "no:randomly", tmp_path, *arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    return select


def test_the_whole_suite_runs_without_a_draw_number(selected, monkeypatch):
    monkeypatch.delenv("BRIDLE_TEST_DRAW", raising=False)
    assert len(selected(None)) == 10


def test_two_consecutive_draws_split_the_test_groups_and_both_run_core_tests(selected):
    one, other = selected(10), selected(11)
    assert set(one) & set(other) == {"test_always"}
    assert len(one) + len(other) == 11
    assert one == selected(10)
    for names in (one, other):
        of_aider = [name for name in names if "aider" in name or name == "test_beside"]
        assert len(of_aider) in {0, 3}
