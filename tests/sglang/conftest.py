"""One real SGLang for the whole suite; it starts with the first test that wants it."""

import pytest
from tests.vllm.serving import make_model

from .serving import RealSglang


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two models of one shape and other weights."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "a", seed=0), make_model(folder / "b", seed=1)


@pytest.fixture(scope="session")
def sglang(tmp_path_factory, models):
    """The server, not started."""
    with RealSglang(tmp_path_factory.mktemp("sglang"), models[0]) as server:
        yield server


@pytest.fixture
def server(sglang):
    """The server as it is by default: its streams repeat themselves."""
    return sglang.running()
