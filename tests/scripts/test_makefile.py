"""`make` is a thin call of scripts/: one executable script per target."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
(PHONY,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
TARGETS = PHONY.split()
CI = (ROOT / ".ci" / "run").read_text()


def test_the_targets_that_people_rely_on_exist():
    assert {"demo", "test", "lint", "bench", "docs", "dist", "long"} <= set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_each_make_target_has_an_executable_script(target):
    script = ROOT / "scripts" / target
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")


def test_ci_suites_are_make_targets_and_start_with_test_and_lint():
    steps = re.findall(r"^ *suite +\d+ +\d+ +(\S+)", CI, re.MULTILINE)
    assert steps[:2] == ["test", "lint"]
    assert set(steps) <= set(TARGETS)


def test_the_time_budgets_of_ci_sum_to_at_most_an_hour():
    budgets = {
        target: int(minutes)
        for minutes, target in re.findall(r"^ *suite +(\d+) +\d+ +(\S+)", CI, re.MULTILINE)
    }
    one_of_both = min(budgets["test-vllm"], budgets["test-sglang"])
    assert sum(budgets.values()) - one_of_both <= 60
