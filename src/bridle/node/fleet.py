"""All nodes of a cluster at once: their policy, their engines, and what they keep of runs.

Nodes that join later get the same policy and the same engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog
from pydantic import ValidationError

from bridle.engines.pool_replica import engine_id
from bridle.errors import BridleError, ConfigError, EngineError, NodeLostError, StoreError
from bridle.gateway.steering import SLACK_S, update
from bridle.gateway.weights import AddReplica, SetPolicy
from bridle.node.scheduling import Member
from bridle.types import JSON, without_user_info

METRICS_S: Final = 3.0
"""Time limit for a node's metrics. A scrape waits 10 s by default, and `bridle_node_up` shows which
nodes are slow."""

log = structlog.get_logger(__name__)


class Fleet:
    """The nodes of a cluster; implements `base.Node` for all of them."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.common: SetPolicy | None = None
        """The policy that every node gets before its first run, those that join late too."""
        self.replicas: list[str] = []
        """Engines that joined at run time, as `AddReplica.engine`."""
        self.released: list[SetPolicy] = []
        """Releases that have not ended, for nodes that join late."""
        self._followed = set[str]()

    def members(self) -> list[Member]:
        return list(self._members.values())

    def live(self) -> list[Member]:
        """Return the nodes that can be called."""
        return [one for one in self._members.values() if one.state in ("live", "draining")]

    def nodes(self) -> list[JSON]:
        return [member.json() for member in self._members.values()]

    # ---- policy and engines

    def policy(self) -> JSON:
        """Return the least version of all nodes; paused or held if one is."""
        known = [member.policy for member in self.live() if member.policy]
        return {
            "version": min((one["version"] for one in known), default=0),
            "paused": any(one["paused"] for one in known),
            "hold": next((one["hold"] for one in known if one["hold"]), None),
            "model": known[0]["model"] if known else None,
            "engines": _merged(engine for one in known for engine in one.get("engines", ())),
        }

    async def set_policy(self, wanted: SetPolicy) -> JSON:
        """Change the policy of every node.

        An engine that several nodes use loads weights once, while all of them hold.
        """
        nodes = [SteeredNode(member) for member in self.live()]
        if not nodes:
            raise EngineError("there is no node whose policy could be set", retryable=True)
        if wanted.released is not None:
            await self._hand_over(nodes, wanted)
        elif wanted.weights is None or wanted.version is None or wanted.rolling:
            await _steer_all(nodes, wanted)
        else:
            await update(
                nodes, wanted.weights, wanted.version, mode=wanted.mode, timeout_s=wanted.timeout_s
            )
            if wanted.paused is not None:
                await _steer_all(nodes, SetPolicy(paused=wanted.paused))
        # Weights that a trainer has loaded by itself are with the engines that the nodes share.
        changes = wanted.model_dump(include={"version", "paused"}, exclude_none=True)
        if wanted.version is not None:
            changes |= {"weights": wanted.weights, "only_older": wanted.weights is not None}
        self.common = (self.common or SetPolicy()).model_copy(update=changes)
        return self.policy()

    async def _hand_over(self, nodes: list[SteeredNode], wanted: SetPolicy) -> None:
        """Release engines on all nodes, or resume them; one node has them load their weights."""
        if wanted.weights is not None:
            await nodes[0].steer(wanted)
            nodes, wanted = nodes[1:], wanted.model_copy(update={"weights": None})
        await _steer_all(nodes, wanted)
        replicas = wanted.replicas
        ended = [one for one in self.released if replicas is None or one.replicas == replicas]
        self.released = [one for one in self.released if one not in ended]
        self.released += [wanted] if wanted.released else []

    async def release_on(self, member: Member) -> None:
        """Have a node that has just connected leave released engines alone."""
        for release in self.released:
            with suppress(ConfigError, EngineError):  # it has no such engine
                member.policy = await member.node.set_policy(release)

    def has_released(self, engine: str) -> bool:
        """Return whether a trainer has this engine, so that no node may probe it."""
        name = without_user_info(engine)
        return any(
            one.replicas is None or not {name, engine_id(name)}.isdisjoint(one.replicas)
            for one in self.released
        )

    async def add_replica(self, engine: str) -> JSON:
        """Add a server on every node. `EngineError` names the nodes that failed, and why."""

        async def join(member: Member) -> None:
            member.policy = await member.node.add_replica(engine)

        await self._on_all(join)
        if engine not in self.replicas:
            self.replicas.append(engine)
        return self.policy()

    async def remove_replica(self, name: str, drain_s: float) -> JSON:
        """Remove a server from every node. `EngineError` names the nodes that failed, and why."""
        for engine in [*self.replicas]:
            if without_user_info(engine) == without_user_info(name):
                self.replicas.remove(engine)

        async def leave(member: Member) -> None:
            member.policy = await member.node.remove_replica(name, drain_s)

        await self._on_all(leave)
        return self.policy()

    async def follow_engines(self, wanted: Collection[str], *, drain_s: float) -> None:
        """Add the servers that an outside source lists, and remove those that it lists no more.

        A failure is logged and tried again by the next call. Other servers are left alone.
        """
        lacking = {
            engine
            for member in self.live()
            for engine in self._followed
            if without_user_info(engine) not in member.policy.get("replicas", ())
        }
        for engine in sorted(set(wanted) - self._followed | lacking & set(wanted)):
            if self.has_released(engine):
                continue
            try:
                await self.add_replica(AddReplica(engine=engine).engine)
                self._followed.add(engine)
            except (BridleError, ValidationError) as error:
                log.warning(
                    "an engine cannot join", engine=without_user_info(engine), error=str(error)
                )
        for engine in sorted(self._followed - set(wanted)):
            try:
                await self.remove_replica(engine, drain_s)
                self._followed.discard(engine)
            except BridleError as error:
                log.warning(
                    "an engine cannot leave", engine=without_user_info(engine), error=str(error)
                )

    # ---- what is kept of runs

    async def metrics(self) -> dict[str, str]:
        """Ask all nodes at once; each has `METRICS_S` to answer."""
        found: dict[str, str] = {}

        async def ask(member: Member) -> None:
            with suppress(NodeLostError, TimeoutError):
                async with asyncio.timeout(METRICS_S):
                    found[member.slots.name] = "".join((await member.node.metrics()).values())

        async with asyncio.TaskGroup() as group:
            for member in self.live():
                group.create_task(ask(member))
        return found

    async def artifact(self, run_id: str, name: str) -> bytes | None:
        for member in self.live():
            with suppress(NodeLostError, StoreError):
                content = await member.node.artifact(run_id, name)
                if isinstance(content, bytes):
                    return content
        return None

    async def remove(self, run_id: str) -> None:
        """Remove a run from every node; a node that is away keeps it."""
        for member in self.live():
            with suppress(NodeLostError):
                await member.node.remove(run_id)

    async def kept_bytes(self) -> int:
        total = 0
        for member in self.live():
            with suppress(NodeLostError):
                total += await member.node.kept_bytes()
        return total

    async def _on_all(self, call: Callable[[Member], Awaitable[object]]) -> None:
        calls = [(f"node {one.slots.node_id}", partial(call, one)) for one in self.live()]
        await all_of(calls)


class SteeredNode:
    """A node as weight updates see it; implements `gateway.steering.Steered`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.name = f"node {member.slots.node_id}"

    async def steer(self, wanted: SetPolicy) -> JSON:
        try:
            async with asyncio.timeout(wanted.timeout_s + SLACK_S):
                self._member.policy = await self._member.node.set_policy(wanted)
        except (NodeLostError, TimeoutError) as error:
            raise EngineError(f"it does not answer: {error}") from error
        return dict(self._member.policy)


def _merged(engines: Iterable[JSON]) -> list[JSON]:
    """Return each engine once; of what nodes say of one, what is not `serving` counts."""
    merged: dict[str, JSON] = {}
    for one in engines:
        known = merged.setdefault(one["name"], one)
        if known["state"] == "serving":
            merged[one["name"]] = one
    return list(merged.values())


async def _steer_all(nodes: Collection[SteeredNode], wanted: SetPolicy) -> None:
    await all_of([(node.name, partial(node.steer, wanted)) for node in nodes])


async def all_of(calls: Collection[tuple[str, Callable[[], Awaitable[object]]]]) -> None:
    """Make all calls at once and await every one. `EngineError` names those that failed."""
    failed: list[str] = []

    async def one(name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except BridleError as error:
            failed.append(f"{name}: {error}")

    async with asyncio.TaskGroup() as group:
        for name, call in calls:
            group.create_task(one(name, call))
    if failed:
        raise EngineError("; ".join(failed))
