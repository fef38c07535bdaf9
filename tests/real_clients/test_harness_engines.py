"""Real harnesses of all dialects on servers of SGLang's shapes.

What such a server answers is what the package answers (`tests/sglang` holds it against a real one);
the tokens are a script's.
"""

from contextlib import AsyncExitStack

import pytest
from tests.engines.shapes import SHAPES
from tests.real_clients import four_dialects
from tests.real_clients.side_by_side import side_by_side

from bridle.testing import scripted_engine

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]


class Served:
    """A scripted engine behind a server of a shape, which starts and ends with its adapter."""

    def __init__(self, shape, conversations):
        self._shape = shape
        self._script = conversations
        self._stack = AsyncExitStack()

    async def start(self):
        inside = scripted_engine(conversations=self._script)
        self._engine = await self._stack.enter_async_context(self._shape.over(inside))
        return await self._engine.start()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def aclose(self):
        await self._stack.aclose()


@pytest.mark.parametrize("shape", ["sglang", "sglang incremental"])
async def test_harnesses_of_all_dialects_train_on_the_exact_tokens_of_sglang_servers(
    shape, tmp_path
):
    def play(conversations):
        return Served(SHAPES[shape], conversations)

    for ran in await side_by_side(tmp_path, four_dialects.rollouts(), play=play):
        four_dialects.check(ran)
