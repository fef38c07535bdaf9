"""Results of real runs, one cell of docs/harnesses.md at a time."""

from contextlib import contextmanager

import pytest
from tests.scripts.conftest import load_script

__all__ = ["load_script"]


@pytest.fixture
def cell(load_script):
    """`cell(harness, dialect, column, outcome="ok", note="")` records what was seen.

    `fails` and `n/a` need a note. See `scripts/make_harness_table`.
    """
    return load_script("make_harness_table").record


@pytest.fixture
def tried(cell):
    """`with tried(harness, dialect, column):` records `ok`, or `broken` where the block raises."""

    @contextmanager
    def trial(harness, dialect, column, note=""):
        try:
            yield
        except BaseException:
            cell(harness, dialect, column, "broken")
            raise
        cell(harness, dialect, column, note=note)

    return trial
