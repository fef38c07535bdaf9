"""Engines that join and leave at run time, on every node of a runner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial

import structlog
from pydantic import ValidationError

from bridle.errors import BridleError, EngineError
from bridle.executors.cluster import ClusterRunner
from bridle.executors.members import Member
from bridle.gateway.weights import AddReplica
from bridle.types import without_user_info

log = structlog.get_logger(__name__)


class Replicas:
    """Adds engines to, and removes them from, all nodes of `runner`; late nodes get them too."""

    def __init__(self, runner: ClusterRunner) -> None:
        self._runner = runner
        self._followed = set[str]()

    async def add(self, engine: str) -> None:
        """A server joins. `EngineError` says which nodes could not take it, and why."""

        async def joins(member: Member) -> None:
            member.policy = await member.link.add_replica(engine)

        await on_all(live(self._runner), joins)
        if engine not in self._runner.replicas:
            self._runner.replicas.append(engine)

    async def remove(self, name: str, drain_s: float) -> None:
        """A server leaves, its calls after so many seconds. `EngineError` as `add`."""
        for one in [*self._runner.replicas]:
            if without_user_info(one) == without_user_info(name):
                self._runner.replicas.remove(one)

        async def leaves(member: Member) -> None:
            member.policy = await member.link.remove_replica(name, drain_s)

        await on_all(live(self._runner), leaves)

    async def follow(self, wanted: Collection[str], *, drain_s: float) -> None:
        """Have the servers that somebody tells of: new ones join, those not told any more leave.

        What fails is logged and tried again by the next call. Others are left alone.
        """
        lacking = {
            engine
            for member in live(self._runner)
            for engine in self._followed
            if without_user_info(engine) not in member.policy.get("replicas", ())
        }
        for engine in sorted(set(wanted) - self._followed | lacking & set(wanted)):
            try:
                await self.add(AddReplica(engine=engine).engine)
                self._followed.add(engine)
            except (BridleError, ValidationError) as error:
                log.warning("an engine cannot join", engine=engine, error=str(error))
        for engine in sorted(self._followed - set(wanted)):
            try:
                await self.remove(engine, drain_s)
                self._followed.discard(engine)
            except BridleError as error:
                log.warning("an engine cannot leave", engine=engine, error=str(error))


def live(runner: ClusterRunner) -> list[Member]:
    """The nodes that can be told something."""
    return [one for one in runner.nodes() if one.state in ("live", "draining")]


async def on_all(members: Collection[Member], say: Callable[[Member], Awaitable[object]]) -> None:
    """Say something to all at once. `EngineError` says which did not do it."""
    await all_of([(f"node {one.place.node_id}", partial(say, one)) for one in members])


async def all_of(said: Collection[tuple[str, Callable[[], Awaitable[object]]]]) -> None:
    """Do all at once, whatever one comes to. `EngineError` names those that failed."""
    failed: list[str] = []

    async def one(name: str, say: Callable[[], Awaitable[object]]) -> None:
        try:
            await say()
        except BridleError as error:
            failed.append(f"{name}: {error}")

    async with asyncio.TaskGroup() as group:
        for name, say in said:
            group.create_task(one(name, say))
    if failed:
        raise EngineError("; ".join(failed))
