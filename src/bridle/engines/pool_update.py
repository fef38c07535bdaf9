"""New weights into every replica of a pool, while sessions go on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from bridle.engines.base import PauseMode, Updatable, Weights
from bridle.errors import EngineError, boundary

if TYPE_CHECKING:
    from bridle.engines.pool_replica import Replica


class Updated(Protocol):
    """What an update needs of a pool; `bridle.engines.pool.EnginePool` says what each does."""

    def each(self) -> list[Replica]:
        """Replicas that have started."""

    async def hold(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Stop all sampling."""

    async def release(self) -> None:
        """Go on."""

    async def drain(self, name: str, *, timeout_s: float | None = None) -> None:
        """No calls for one."""

    def readmit(self, name: str) -> None:
        """Calls for it again."""

    def published(self, version: int) -> None:
        """Some replica has these weights."""


async def load_at_once(
    pool: Updated, source: Weights, version: int, *, mode: PauseMode, timeout_s: float
) -> None:
    """Hold all replicas and put the weights into all of them; see `EnginePool.update_weights`."""
    await pool.hold(mode, timeout_s=timeout_s)
    try:
        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(_loaded(pool, one, source, version)) for one in pool.each()]
        failed = [text for load in loads for text in load.result()]
    finally:
        await pool.release()
    _require(failed, version)


async def load_in_turn(pool: Updated, source: Weights, version: int, *, wait: bool) -> None:
    """Put the weights into one replica after the other, its calls having ended or gone elsewhere.

    The only replica is not drained: its calls would have nowhere to go.
    """
    failed: list[str] = []
    for one in pool.each():
        alone = len(pool.each()) == 1
        if not alone:
            await pool.drain(one.name, timeout_s=None if wait else 0)
        try:
            failed += await _loaded(pool, one, source, version)
        finally:
            if not alone:
                pool.readmit(one.name)
    _require(failed, version)


def _require(failed: list[str], version: int) -> None:
    if failed:
        raise EngineError(f"weights {version} are not everywhere: " + "; ".join(failed))


async def _loaded(pool: Updated, one: Replica, source: Weights, version: int) -> list[str]:
    """Load the weights into one replica; what went wrong."""
    if not isinstance(one.engine, Updatable):
        return [f"{one.name} takes no weights from a folder"]
    if isinstance(source, Mapping) and one.reopen is not None:
        return [f"{one.name} is in another process and takes weights from a folder"]
    try:
        with boundary(EngineError, "loading"):
            await one.engine.update_weights(source, version)
    except EngineError as error:
        return [f"{one.name}: {error}"]
    one.version = version
    pool.published(version)
    return []
