"""Models of a few thousand parameters: every test computes on one thread."""

import pytest


@pytest.fixture(autouse=True)
def fastest(one_thread):
    """Have `one_thread` for every test."""
