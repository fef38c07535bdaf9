"""A pool sees what its first living replica sees."""

import numpy as np
import pytest
from tests.engines.fakes import Fake, pooled

from bridle.engines.base import Seeing, Seen, Templating
from bridle.engines.pool_replica import ReplicaState
from bridle.errors import EngineError

SEEN = Seen(np.array([1, 2], np.int32), ())


class Sighted(Fake):
    """It takes images."""

    async def see(self, messages, tools, arguments):
        return SEEN


async def test_any_living_replica_sees():
    async with pooled(Sighted(), Sighted()) as pool:
        pool.each()[0].enter(ReplicaState.DOWN)
        assert isinstance(pool, Seeing)
        assert await pool.see([], None, {}) is SEEN


async def test_replicas_without_eyes_see_nothing():
    async with pooled(Fake()) as pool:
        assert await pool.see([], None, {}) is None


async def test_while_none_is_ready_nothing_is_seen_yet():
    async with pooled(Sighted()) as pool:
        pool.each()[0].enter(ReplicaState.DOWN)
        with pytest.raises(EngineError, match="no replica") as failed:
            await pool.see([], None, {})
        assert failed.value.retryable


class Lettered(Fake):
    """It has a template."""

    failure: EngineError | None = None

    async def template(self, messages, tools, arguments):
        if self.failure is not None:
            raise self.failure
        return SEEN.ids


async def test_a_prompt_is_told_by_a_living_replica_that_can():
    first, second = Lettered(), Lettered()
    first.failure = EngineError("busy", retryable=True)
    async with pooled(Fake(), first, second) as pool:
        assert isinstance(first, Templating)
        assert await pool.template([], None, {}) is SEEN.ids
        second.failure = EngineError("no such role", status=400)
        with pytest.raises(EngineError, match="no such role"):
            await pool.template([], None, {})
        pool.each()[2].enter(ReplicaState.DOWN)
        with pytest.raises(EngineError, match="busy"):
            await pool.template([], None, {})
        pool.each()[1].enter(ReplicaState.DOWN)
        with pytest.raises(EngineError, match="no replica"):
            await pool.template([], None, {})
