"""Engines behind the real server, each for one test."""

import aiohttp
import pytest
from tests.scripted.api import Api

from bridle.scripted.server import EngineServer


@pytest.fixture
async def api():
    """Makes servers for engines; all of them end with the test."""
    opened = []

    async def make(engine, **options):
        server = EngineServer(engine, **options)
        await server.__aenter__()
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        opened.append((server, session))
        return Api(server, session)

    yield make
    for server, session in opened:
        await session.close()
        await server.__aexit__()
