"""Runs: three sessions of one task, made through a real gateway, read only; one made-up session."""

import asyncio

import pytest
from tests.dashboard.house import LOOKED_AT, busy, captured, write


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard") / "run"
    asyncio.run(captured(folder))
    return folder


@pytest.fixture
def run_folder(tmp_path):
    """A run of a made-up session, to be written into."""
    asyncio.run(write(tmp_path / "run", busy("one.0")))
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def every_folder_is_closed():
    yield
    while LOOKED_AT:
        LOOKED_AT.pop().close()
