"""One real vLLM for most of the suite; each starts with the first test that wants it."""

import pytest

from .serving import LACKING, OLDEST, VllmServer, make_model, printed_flags

collect_ignore = () if OLDEST else ("test_oldest.py",)


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of what this vLLM lacks."""
    left_out = [one for one in items if LACKING & {*needed(one)}]
    items[:] = [one for one in items if one not in left_out]
    config.hook.pytest_deselected(items=left_out)


def needed(item):
    for mark in item.iter_markers("needs"):
        yield from mark.args


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two models of one shape and other weights."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "a", seed=0), make_model(folder / "b", seed=1)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory, models):
    """The server, not started."""
    with VllmServer(tmp_path_factory.mktemp("vllm"), models[0]) as server:
        yield server


@pytest.fixture
def server(vllm):
    """The server as it is by default: raw logprobs, no script."""
    vllm.say(None)
    return vllm.running()


@pytest.fixture(scope="session")
def learner(tmp_path_factory):
    """A server of the demo's model, whose logprobs are those after temperature."""
    from examples.demo.model import demo_model

    with VllmServer(tmp_path_factory.mktemp("learner"), demo_model()) as server:
        yield server.running(*printed_flags("vllm"), "--max-model-len", "4096")
