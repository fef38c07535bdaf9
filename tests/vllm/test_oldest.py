"""The oldest vLLM that is supported says what it lacks, and where the way out is."""

import pytest

from bridle.engines.vllm import VllmEngine
from bridle.engines.vllm_routes import VllmRoute
from bridle.errors import EngineError

from .serving import ROUTES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


async def test_the_oldest_supported_vllm_uses_the_route_that_takes_token_ids(server):
    engine = VllmEngine(server.url)
    try:
        await engine.start()
        assert engine.report is not None
        assert [engine.report.findings[0].found] == [route.path for route in ROUTES]
    finally:
        await engine.aclose()


@pytest.mark.parametrize("route", [route for route in VllmRoute if route not in ROUTES])
async def test_routes_without_token_ids_are_refused_on_the_oldest_supported_vllm(server, route):
    engine = VllmEngine(server.url, route=route)
    try:
        with pytest.raises(EngineError, match=r"token in: .*Use vLLM 0\.32 or later"):
            await engine.start()
    finally:
        await engine.aclose()


async def test_weight_updates_are_refused_on_the_oldest_vllm_with_the_required_version(
    server, models
):
    engine = VllmEngine(server.url)
    try:
        await engine.start()
        with pytest.raises(EngineError, match=r"vLLM 0\.32 or later"):
            await engine.update_weights(models[1], 1)
        await engine.health()
    finally:
        await engine.aclose()
