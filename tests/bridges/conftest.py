"""Fixtures for the tests of real trainers."""

import pytest


@pytest.fixture
def one_thread():
    """The fastest for so small a model, most of all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
