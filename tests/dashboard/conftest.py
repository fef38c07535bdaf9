"""A run of three sessions of one task, made through a real gateway; read only."""

import asyncio

import pytest
from tests.dashboard.house import LOOKED_AT, captured


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard") / "run"
    asyncio.run(captured(folder))
    return folder


@pytest.fixture(autouse=True)
def every_folder_is_closed():
    yield
    while LOOKED_AT:
        LOOKED_AT.pop().close()
