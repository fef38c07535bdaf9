"""`make` is a thin call of scripts/: one executable script per target."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
(PHONY,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
TARGETS = PHONY.split()


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_has_a_script(target):
    script = ROOT / "scripts" / target
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")


def test_ci_runs_the_readmes_commands():
    steps = re.findall(
        r"^step \S+ \S+ make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE
    )
    assert steps[:2] == ["test", "lint"]
    assert set(steps) <= set(TARGETS)
