"""Sessions on many nodes for the server: `workers.Workers` over a cluster's runner.

Engines that a file or a URL names join and leave the policy's engines while the server runs: lines,
JSON, or the Prometheus file that verl writes for its servers.

Runs outlive the server: one that stops, or is killed, leaves them to its successor, which adopts
them by their ids.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import structlog

from bridle.config import Task
from bridle.errors import BridleError, ConfigError, EngineError, NodeLostError, StoreError
from bridle.executors.cluster import ClusterRunner
from bridle.executors.members import Member
from bridle.executors.replicas import Replicas, all_of, live
from bridle.gateway.steering import SLACK_S, update
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.events import Event
from bridle.lifecycle.results import SessionResult
from bridle.server.tables import run_id as id_of_run
from bridle.types import JSON, without_user_info

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridle.server.workers import Workers


METRICS_S: Final = 3.0
"""A scrape waits 10 s by default, and a node that is slow now is told of by `bridle_node_up`."""


class ClusterWorkers:
    """Implements `workers.Workers` on a `ClusterRunner` that outlives."""

    outlive = True
    capture = None

    def __init__(self, runner: ClusterRunner) -> None:
        self._runner = runner
        self._replicas = Replicas(runner)

    @property
    def capacity(self) -> int:
        return self._runner.capacity

    async def run(
        self, task: Task, sample_index: int, run_id: str, avoid: frozenset[str]
    ) -> SessionResult:
        """Run it, or take up a run of this id that still goes on."""
        return await self._runner.run(
            task, sample_index, session_id=run_id, avoid=avoid, earlier=earlier_runs(run_id)
        )

    def cancel(self, run_id: str) -> bool:
        return self._runner.cancel(run_id)

    def expect(self, run_id: str) -> bool:
        return self._runner.expect(run_id)

    async def settle(self) -> None:
        self._runner.settle()

    async def recall(self, run_id: str) -> SessionResult | None:
        return await self._runner.recall(run_id)

    def release(self, run_id: str) -> None:
        self._runner.release(run_id)

    async def remove(self, run_id: str) -> None:
        """Remove it from whichever node has it; a node that is away keeps it."""
        for member in self._live():
            with suppress(NodeLostError):
                await member.link.remove(run_id)

    async def kept_bytes(self) -> int:
        """Return the sum over all nodes that live."""
        total = 0
        for member in self._live():
            with suppress(NodeLostError):
                total += await member.link.kept_bytes()
        return total

    async def set_policy(self, wanted: SetPolicy) -> None:
        """Steer every node.

        An engine that several nodes use loads weights once, while all of them hold.
        """
        nodes = [Steers(member) for member in self._live()]
        if not nodes:
            raise EngineError("no node is there to be steered", retryable=True)
        if wanted.weights is None or wanted.version is None or wanted.rolling:
            await each(nodes, wanted)
            self._keep(wanted)
            return
        await update(
            nodes, wanted.weights, wanted.version, mode=wanted.mode, timeout_s=wanted.timeout_s
        )
        if wanted.paused is not None:
            await each(nodes, SetPolicy(paused=wanted.paused))
        self._keep(wanted)

    def _keep(self, wanted: SetPolicy) -> None:
        """Have nodes that join later sample under the same policy.

        What a trainer has loaded by itself is with the engines that they share.
        """
        changes = wanted.model_dump(include={"version", "paused"}, exclude_none=True)
        if wanted.version is not None:
            changes |= {"weights": wanted.weights, "only_older": wanted.weights is not None}
        before = self._runner.common[0] if self._runner.common else SetPolicy()
        self._runner.common = [before.model_copy(update=changes)]

    def nodes(self) -> list[JSON]:
        return [member.json() for member in self._runner.nodes()]

    async def metrics(self) -> dict[str, str]:
        """Ask all nodes at once; each has `METRICS_S` to answer."""
        told: dict[str, str] = {}

        async def ask(member: Member) -> None:
            with suppress(NodeLostError, TimeoutError):
                async with asyncio.timeout(METRICS_S):
                    told[member.place.name] = await member.link.metrics()

        async with asyncio.TaskGroup() as group:
            for member in self._live():
                group.create_task(ask(member))
        return told

    async def drain_node(self, name: str) -> None:
        await self._runner.drain(name)

    async def add_replica(self, engine: str) -> None:
        """Add it on every node, those that join later too."""
        await self._replicas.add(engine)

    async def remove_replica(self, name: str, drain_s: float) -> None:
        await self._replicas.remove(name, drain_s)

    def policy(self) -> JSON:
        """Return the least version of all nodes; paused or held if one is."""
        told = [member.policy for member in self._live() if member.policy]
        return {
            "version": min((one["version"] for one in told), default=0),
            "paused": any(one["paused"] for one in told),
            "hold": next((one["hold"] for one in told if one["hold"]), None),
            "model": told[0]["model"] if told else None,
        }

    def listening(self, listener: Callable[[Event], None]) -> AbstractContextManager[None]:
        return self._runner.events.listening(listener)

    async def artifact(self, run_id: str, name: str) -> bytes | None:
        """Return it from whichever node has it."""
        for member in self._live():
            with suppress(NodeLostError, StoreError):
                if (content := await member.link.artifact(run_id, name)) is not None:
                    return content
        return None

    def _live(self) -> list[Member]:
        return live(self._runner)


class Steers:
    """A node's gateway, as weight updates see it (`bridle.gateway.steering.Steered`)."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.name = f"node {member.place.node_id}"

    async def steer(self, wanted: SetPolicy) -> JSON:
        try:
            async with asyncio.timeout(wanted.timeout_s + SLACK_S):
                self._member.policy = await self._member.link.set_policy(wanted)
        except (NodeLostError, TimeoutError) as error:
            raise EngineError(f"it does not answer: {error}") from error
        return dict(self._member.policy)


async def each(nodes: list[Steers], wanted: SetPolicy) -> None:
    """Steer all at once. `EngineError` says which did not do their part."""
    await all_of([(node.name, partial(node.steer, wanted)) for node in nodes])


def earlier_runs(run_id: str) -> tuple[str, ...]:
    """The ids of the runs of the same session before this one."""
    session, _, attempt = run_id.rpartition(".r")
    if not session or not attempt.isdigit():
        return ()
    return tuple(id_of_run(session, number) for number in range(1, int(attempt)))


log = structlog.get_logger()

READ_EVERY_S = 5.0
PATIENCE_S = 1800.0
"""How long a server waits for the first engine: a trainer may load its model first."""
DRAIN_S = 30.0
"""How long the calls of an engine that leaves may go on there."""
MOST_BYTES = 1 << 20
"""Of what names engines: of a longer file or answer nothing is read."""

ENGINE = re.compile(
    r"""(?:(?<![a-z])[a-z]+:)?https?://[^\s"',{}]+"""
    r"|(?<![\w./:-])(?:\[[0-9a-fA-F:]+\]|\w[\w.-]*):\d{1,5}(?![\w:])"
)


def engines_in(text: str) -> list[str]:
    """The engines that a text names, each once, as `--engine` takes them."""
    found = [one if "://" in one else f"http://{one}" for one in ENGINE.findall(text)]
    return list(dict.fromkeys(found))


async def named(source: str) -> list[str]:
    """The engines that a file or an `http(s)://` URL names now; none where it cannot be read."""
    try:
        if "://" not in source:
            return engines_in(await asyncio.to_thread(_read, Path(source)))
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
            http.get(source) as answer,
        ):
            content = b""
            async for part in answer.content.iter_any():
                content = _short(content + part)
            return engines_in(content.decode())
    except (OSError, ValueError, TimeoutError, aiohttp.ClientError):
        return []


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return _short(file.read(MOST_BYTES + 1)).decode()


def _short(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content


async def first_named(source: str) -> list[str]:
    """Wait until engines are named. `ConfigError` if none is for half an hour."""
    log.info("waiting_for_engines", source=source)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if found := await named(source):
                    return found
                await asyncio.sleep(READ_EVERY_S)
    except TimeoutError:
        raise ConfigError(f"{source} named no engine for {PATIENCE_S:g} s") from None


async def follow(
    source: str, workers: Workers, there: Iterable[str], *, every_s: float = READ_EVERY_S
) -> None:
    """Have engines join and leave as `source` names them; runs until it is cancelled.

    `there` are those that serve already. A source that names none, or cannot be read, changes
    nothing. An engine that cannot serve is tried again each time.
    """
    joined, failing = set(there), set[str]()
    while True:
        await asyncio.sleep(every_s)
        if not (wanted := await named(source)):
            continue
        for engine in [one for one in wanted if one not in joined]:
            try:
                await workers.add_replica(engine)
            except BridleError as error:
                if engine not in failing:
                    log.warning(
                        "engine_cannot_join", engine=without_user_info(engine), error=str(error)
                    )
                failing.add(engine)
                continue
            failing.discard(engine)
            joined.add(engine)
        for engine in joined - set(wanted):
            joined.discard(engine)
            await workers.remove_replica(engine, DRAIN_S)
