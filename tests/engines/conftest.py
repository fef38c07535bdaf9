"""Engines behind the real server, and stub servers, each for one test."""

from typing import Any

import pytest
from tests.engines.completions import CompletionServer
from tests.engines.stub import Stub

from bridle.engines.vllm import VllmEngine


@pytest.fixture
async def connected():
    """Makes adapters: for an engine of ours behind the real server, or for a URL."""
    closing: list[Any] = []

    async def make(target, *, start=True, **options):
        if not isinstance(target, str):
            server = CompletionServer(target)
            await server.__aenter__()
            closing.append(server.__aexit__)
            target = server.url
        engine = VllmEngine(target, **options)
        closing.append(engine.aclose)
        if start:
            await engine.start()
        return engine

    yield make
    for close in reversed(closing):
        await close()


@pytest.fixture
async def stub():
    """Makes stub servers."""
    opened = []

    async def make(**replies):
        one = Stub(**replies)
        opened.append(one)
        return await one.__aenter__()

    yield make
    for one in opened:
        await one.__aexit__()
