"""The nodes of a cluster: settings, free slots and the choice of a node, and all of them at once.

`Fleet` has their policy, their engines, and what they keep of runs. Nodes that join later get the
same policy and the same engines.

`update` and `updating` have one policy follow many gateways: hold all, load, publish everywhere,
resume. A trainer wraps its own loading in `updating`; `update` has the engines load from a folder,
each once, whichever gateways use it. No gateway resumes before all of them know the version, and a
step that fails at one leaves none of them held: sessions then continue under the old version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeVar

import aiohttp
import structlog
from pydantic import Field, ValidationError

from bridle.aio import run_shielded
from bridle.capture.records import Outcome
from bridle.config import AUTO, RuntimeSpec, Settings, Task
from bridle.engines.base import PauseMode
from bridle.engines.pool_replica import engine_id
from bridle.errors import BridleError, ConfigError, EngineError, NodeLostError, StoreError
from bridle.gateway.weights import AddReplica, SetPolicy
from bridle.node.base import RemoteNode, RunEnd
from bridle.node.local import NodeSettings, plan
from bridle.node.results import SessionResult, uncaptured_result
from bridle.types import JSON, Cause, SessionStatus, without_user_info

if TYPE_CHECKING:
    from bridle.gateway.app import GatewayServer

CPU: Final = "CPU"
MEMORY: Final = "memory"
"""In bytes."""
GPU: Final = "GPU"

SLACK_S: Final = 30.0
"""Time of an answer beyond the time that a hold of engines may take."""

_LEAST: Final = 1e-6
"""Amounts that differ by less are equal; sums of floats are not exact."""


def needs_of(runtime: RuntimeSpec) -> dict[str, float]:
    """Return the resources that a session in this runtime needs besides a slot, and how much of
    each.

    The runtime's name is one of them (`docker`: 1): it counts on nodes that offer a resource of
    that name, which says how many such sandboxes the node takes.
    """
    needs = dict(runtime.resources)
    if runtime.cpus is not None:
        needs[CPU] = runtime.cpus
    if runtime.memory_mb is not None:
        needs[MEMORY] = runtime.memory_mb * 2.0**20
    if runtime.gpus is not None:
        needs[GPU] = float(runtime.gpus)
    if runtime.backend != AUTO:
        needs.setdefault(runtime.backend, 1.0)
    return needs


@dataclass(eq=False, slots=True)
class NodeSlots:
    """Slots and resources of a node, by which one is chosen."""

    name: str
    """Unique among the nodes."""
    offers: Mapping[str, float] = field(default_factory=dict)
    """The amount of each resource that it has."""
    node_id: str = ""
    """Its name in results; known after its first answer."""
    capacity: int = 0
    """Sessions that it runs at once."""
    open: bool = False
    """True if it takes new sessions."""
    used: dict[str, float] = field(default_factory=dict)
    """The amount of each resource that its sessions use."""
    placed: int = 0
    """Sessions that were ever placed here."""
    reported_free: int = 0
    """Free slots in its last report."""
    reported_placed: int = 0
    """Sessions of ours that it had started by then."""

    @property
    def free(self) -> int:
        """Number of the node's free slots, as far as is known; runs just sent to it count
        as taken.
        """
        return max(0, self.reported_free - (self.placed - self.reported_placed)) if self.open else 0

    def has(self, needs: Mapping[str, float]) -> bool:
        """Return whether the node has these resources when it is empty."""
        return all(self.offers.get(name, 0.0) >= much - _LEAST for name, much in needs.items())

    def fits(self, needs: Mapping[str, float]) -> bool:
        """Return whether the node has these resources free now."""
        return all(
            self.offers.get(name, 0.0) - self.used.get(name, 0.0) >= much - _LEAST
            for name, much in needs.items()
        )

    def take(self, needs: Mapping[str, float]) -> None:
        """Subtract the resources of a session that was placed on this node."""
        for name, much in needs.items():
            self.used[name] = self.used.get(name, 0.0) + much

    def release(self, needs: Mapping[str, float]) -> None:
        """Give back the resources of a session that has left this node."""
        for name, much in needs.items():
            self.used[name] = max(0.0, self.used.get(name, 0.0) - much)


def relevant(runtime: RuntimeSpec, offered: Collection[str]) -> dict[str, float]:
    """Return the resources that limit where a session can run: GPUs, those that the task names, and
    those of its needs that some node offers.
    """
    named = {GPU, *runtime.resources}
    needs = needs_of(runtime)
    return {name: much for name, much in needs.items() if name in named or name in offered}


def choose(
    needs: Mapping[str, float], avoid: frozenset[str], nodes: Iterable[NodeSlots]
) -> NodeSlots | None:
    """Return the node for a session: of those with free slots and resources, the one with the
    greatest share of free slots; `None` = no node is free.

    A node of `avoid` (by `node_id`) is taken only where no other node could ever run the session.
    """
    able = [node for node in nodes if node.open and node.has(needs)]
    others = [node for node in able if node.node_id not in avoid]
    ready = [node for node in others or able if node.free > 0 and node.fits(needs)]
    return max(ready, key=lambda node: (node.free / node.capacity, node.name), default=None)


class NodeTimeouts(Settings):
    """Timeouts for a node, in seconds."""

    lost_after_s: float = Field(default=5, gt=0)
    """A node that does not answer for so long is lost, and its sessions are run again.

    A pause of the server's own event loop counts as a fifth of it at most.
    """
    tell_s: float = Field(default=1, gt=0)
    """Longest wait of a poll without events."""
    open_s: float = Field(default=600, gt=0)
    """Time limit for opening a node: its engines, its tokenizer."""
    again_s: float = Field(default=0.2, gt=0)
    """Wait between two attempts to reach a node that does not answer."""


class RaySettings(NodeTimeouts):
    """Address of the cluster, and the machines that run sessions."""

    address: str | None = None
    """`HOST:PORT` of the cluster's head, or `local` for a new cluster of this machine alone;
    `None` = `RAY_ADDRESS`, else the cluster that this machine belongs to, else a new one."""
    namespace: str = "bridle"
    """Ray's namespace of the node actors; servers that share nodes share it."""
    resource: str = "bridle_node"
    """Machines that offer it compute sessions; `CPU` = every one that offers processors."""
    folder: Path | None = None
    """Folder on each machine's own disk for captures and logs; `None` = `nodes` in the server's
    data folder, by the same path on each."""
    engines_from: str | None = None
    """Source of further engines, with a method `engines()` that returns their URLs: the name of an
    actor of the cluster (`NAME`, or `NAMESPACE/NAME`), or `serve:APP`, a Ray Serve application."""
    engines_s: float = Field(default=10, gt=0)
    """Seconds between two calls of it; the calls of an engine that is listed no more may continue
    for `engines_drain_s`."""
    engines_drain_s: float = Field(default=60, ge=0)
    watch_s: float = Field(default=1, gt=0)
    """Seconds between two checks for machines that have joined or left."""


class ExecutorSettings(Settings):
    """Choice of the executor."""

    kind: Literal["local", "ray"] = "local"
    """`local`: in the server's process; `ray`: on the machines of a Ray cluster."""
    node: NodeSettings = NodeSettings()
    """Settings of each node; the defaults depend on its machine."""
    ray: RaySettings = RaySettings()
    """Used where `kind` is `ray`."""


@dataclass(eq=False, slots=True)
class Member:
    """A node of the cluster and its state."""

    node: RemoteNode
    slots: NodeSlots
    clock: Callable[[], float] = time.monotonic
    """Clock by which its silence is measured."""
    runs: dict[str, PendingRun] = field(default_factory=dict)
    """Runs that are on the node, or on their way to it."""
    epoch: str = ""
    after: int = 0
    last_contact: float = field(init=False)
    """Time of its last answer, by `clock`."""
    state: str = "opening"
    """`opening`, `live`, `draining`, `away` (it does not answer), `lost`."""
    error: str | None = None
    stages: Mapping[str, int] = field(default_factory=dict)
    policy: JSON = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is live, or has failed to open."""

    def __post_init__(self) -> None:
        self.last_contact = self.clock()

    @property
    def name(self) -> str:
        """Name of the node in messages."""
        return f"node {self.slots.node_id}"

    async def steer(self, wanted: SetPolicy) -> JSON:
        """Set the policy of the node's engines; returns its policy then."""
        try:
            async with asyncio.timeout(wanted.timeout_s + SLACK_S):
                self.policy = await self.node.set_policy(wanted)
        except (NodeLostError, TimeoutError) as error:
            raise EngineError(f"the node does not answer: {error}") from error
        return dict(self.policy)

    @property
    def silent_s(self) -> float:
        """Seconds since the node's last answer."""
        return self.clock() - self.last_contact

    @property
    def idle(self) -> bool:
        """Return whether the node runs no session of any owner."""
        return not self.runs and self.slots.reported_free >= self.slots.capacity

    def json(self) -> JSON:
        """Return the node's name, state, slots, resources and policy as JSON."""
        return {
            "name": self.slots.name,
            "node_id": self.slots.node_id or None,
            "state": self.state,
            "slots": self.slots.capacity,
            "free": self.slots.free,
            "sessions": len(self.runs),
            "stages": dict(self.stages),
            "offers": dict(self.slots.offers),
            "used": {name: much for name, much in self.slots.used.items() if much},
            "silent_s": round(self.silent_s, 3),
            "policy": self.policy,
            "error": self.error,
        }


def earlier_runs(run_id: str) -> tuple[str, ...]:
    """Return the ids of the same session's runs before this one, whose nodes were lost.

    If one of them turns out to have ended, its result counts. A server names the runs of a session
    SESSION, SESSION.r2, SESSION.r3, ...
    """
    session, _, attempt = run_id.rpartition(".r")
    if not session or not attempt.isdigit():
        return ()
    return (session, *(f"{session}.r{number}" for number in range(2, int(attempt))))


@dataclass(eq=False, slots=True)
class PendingRun:
    """One run that a caller waits for."""

    run_id: str
    task: Task
    sample_index: int
    avoid: frozenset[str]
    done: asyncio.Future[SessionResult]
    needs: Mapping[str, float] = field(default_factory=dict)
    member: Member | None = None
    fetching: bool = False
    """True if its end is being fetched."""
    ended: bool = False
    """True if its node has reported its end."""

    def finish(self, end: RunEnd) -> None:
        """Set the end of the run (its result or error), unless it has one."""
        if not self.done.done():
            if isinstance(end, BaseException):
                self.done.set_exception(end)
            else:
                self.done.set_result(end)

    def never_began(self) -> SessionResult:
        """Return the result of a run that was cancelled while it waited for a node."""
        outcome = Outcome(
            self.run_id,
            SessionStatus.CANCELLED,
            time.time(),
            reward=None,
            cause=Cause.CANCELLED,
            error="cancelled while it waited for a node",
        )
        return uncaptured_result(self.task, self.sample_index, plan(self.task).harness, outcome)


T = TypeVar("T")

RELEASE_S = 60.0
"""Time limit for ending a hold; it also applies after a failure or a cancelled trainer."""

LOAD_S = 600.0
"""Time that the engines of a gateway may take to load weights."""


class Steered(Protocol):
    """A gateway, in this process or another."""

    @property
    def name(self) -> str:
        """Name of the gateway in messages."""

    async def steer(self, wanted: SetPolicy) -> JSON:
        """Set the gateway's policy; returns its policy then. `EngineError` if an engine failed."""


class Here:
    """A gateway of this process."""

    name = "this gateway"

    def __init__(self, gateway: GatewayServer) -> None:
        self._gateway = gateway

    async def steer(self, wanted: SetPolicy) -> JSON:
        """Set the policy of this process's gateway; returns its policy then."""
        await self._gateway.set_policy(wanted)
        return self._gateway.policy()


class There:
    """A gateway at a URL, steered over its control routes; an async context manager."""

    def __init__(self, url: str, token: str) -> None:
        self.name = url.rstrip("/")
        self._token = token

    async def __aenter__(self) -> Self:
        """Open the connection pool; connect to nothing yet."""
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def steer(self, wanted: SetPolicy) -> JSON:
        """Set the policy of the gateway at the URL by `POST /policy`; returns its policy then."""
        body = wanted.model_dump(mode="json", exclude_unset=True)
        limit = aiohttp.ClientTimeout(total=None, sock_read=wanted.timeout_s + SLACK_S)
        url = f"{self.name}/policy"
        try:
            async with self._http.post(url, json=body, timeout=limit) as answer:
                status: JSON = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(
                f"the gateway gave no answer: {type(error).__name__}: {error}"
            ) from error
        if answer.status != 200:
            raise EngineError(str((status.get("error") or {}).get("message", answer.status)))
        return status


@asynccontextmanager
async def updating(
    gateways: Sequence[Steered], version: int, *, mode: PauseMode = "abort", timeout_s: float = 60.0
) -> AsyncGenerator[list[JSON]]:
    """Hold all sampling within the context; at its end every gateway gets `version`, and all
    resume.

    It gives what each gateway reports of its policy, `replicas` among it. `mode` is what a hold
    does to running calls. `EngineError` if a gateway could not be held within `timeout_s`, or did
    not take the version. When the body raises, no version is published.
    """
    try:
        states = await _all(gateways, SetPolicy(hold=mode, timeout_s=timeout_s))
        yield states
        await _all(gateways, SetPolicy(version=version))
    except BaseException:
        with suppress(EngineError):  # the first error is the one to report
            await run_shielded(_all(gateways, SetPolicy(hold=False)), timeout_s=RELEASE_S)
        raise
    await run_shielded(_all(gateways, SetPolicy(hold=False)), timeout_s=RELEASE_S)


async def update(
    gateways: Sequence[Steered],
    weights: str,
    version: int,
    *,
    mode: PauseMode = "abort",
    timeout_s: float = 60.0,
) -> None:
    """Load the weights in the folder `weights` as `version` into all engines of all gateways.

    Sessions continue. A server that several gateways name alike loads once. `EngineError` names
    engines that did not take the weights; the version is then published nowhere.
    """
    async with updating(gateways, version, mode=mode, timeout_s=timeout_s) as states:
        shares = _shares([one["replicas"] for one in states])
        load = SetPolicy(weights=weights, version=version, timeout_s=LOAD_S)
        await all_of(
            (one.name, partial(one.steer, load.model_copy(update={"replicas": tuple(share)})))
            for one, share in zip(gateways, shares, strict=True)
            if share
        )


def _shares(named: list[list[str]]) -> list[list[str]]:
    """Return the replicas that each gateway loads: a server's URL once, an embedded one always."""
    seen: set[str] = set()
    shares = []
    for names in named:
        share = [name for name in names if "://" not in name or name not in seen]
        seen.update(share)
        shares.append(share)
    return shares


async def _all(gateways: Iterable[Steered], wanted: SetPolicy) -> list[JSON]:
    """Have all do the same at once; `EngineError` names those that did not."""
    return await all_of((one.name, partial(one.steer, wanted)) for one in gateways)


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
        self._removed = set[str]()
        """Names of engines that were removed at run time; a node may have been away then."""
        self._followed = set[str]()

    def members(self) -> list[Member]:
        return list(self._members.values())

    def live(self) -> list[Member]:
        """Return the nodes that can be called now."""
        return [one for one in self._members.values() if one.state in ("live", "draining")]

    def nodes(self) -> list[JSON]:
        """Return each node's name, state, slots, resources and policy as JSON."""
        return [member.json() for member in self._members.values()]

    # ---- policy and engines

    def policy(self) -> JSON:
        """Return the lowest policy version of all nodes; paused or held if one of them is."""
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
        nodes = self.live()
        if not nodes:
            raise EngineError(
                "no node is live, so no policy could be set; try again later", retryable=True
            )
        if wanted.released is not None:
            await self._hand_over(nodes, wanted)
        elif wanted.weights is None or wanted.version is None or wanted.rolling:
            await _all(nodes, wanted)
        else:
            await update(
                nodes, wanted.weights, wanted.version, mode=wanted.mode, timeout_s=wanted.timeout_s
            )
            if wanted.paused is not None:
                await _all(nodes, SetPolicy(paused=wanted.paused))
        # Weights that a trainer has loaded by itself are with the engines that the nodes share.
        changes = wanted.model_dump(include={"version", "paused"}, exclude_none=True)
        if wanted.version is not None:
            changes |= {"weights": wanted.weights, "only_older": wanted.weights is not None}
        self.common = (self.common or SetPolicy()).model_copy(update=changes)
        return self.policy()

    async def _hand_over(self, nodes: list[Member], wanted: SetPolicy) -> None:
        """Release engines on all nodes, or resume them; one node has them load their weights."""
        if wanted.weights is not None:
            await nodes[0].steer(wanted)
            nodes, wanted = nodes[1:], wanted.model_copy(update={"weights": None})
        await _all(nodes, wanted)
        replicas = wanted.replicas
        ended = [one for one in self.released if replicas is None or one.replicas == replicas]
        self.released = [one for one in self.released if one not in ended]
        self.released += [wanted] if wanted.released else []

    async def release_on(self, member: Member) -> None:
        """Tell a node that has just connected which engines are released to a trainer."""
        for release in self.released:
            with suppress(ConfigError, EngineError):  # it has no such engine
                member.policy = await member.node.set_policy(release)

    def has_released(self, engine: str) -> bool:
        """Return whether this engine is released to a trainer, so that no node may probe it."""
        name = without_user_info(engine)
        return any(
            one.replicas is None or not {name, engine_id(name)}.isdisjoint(one.replicas)
            for one in self.released
        )

    async def give_engines(self, member: Member) -> None:
        """Remove and add engines on a node that has just connected, as was done on the others."""
        for name in self._removed.intersection(member.policy.get("replicas", ())):
            try:
                member.policy = await member.node.remove_replica(name, 0.0)
            except (ConfigError, EngineError) as error:
                log.warning("an engine cannot leave", engine=name, error=str(error))
        for engine in self.replicas:
            if self.has_released(engine):
                continue
            try:
                member.policy = await member.node.add_replica(engine)
            except EngineError as error:  # it may be gone; the others are there
                log.warning(
                    "an engine cannot join", engine=without_user_info(engine), error=str(error)
                )

    async def add_replica(self, engine: str) -> JSON:
        """Add an inference server on every node. `EngineError` names the nodes that failed, and
        why.
        """
        self._removed.discard(without_user_info(engine))
        await self._on_all(lambda node: node.add_replica(engine))
        if engine not in self.replicas:
            self.replicas.append(engine)
        return self.policy()

    async def remove_replica(self, name: str, drain_s: float) -> JSON:
        """Remove an inference server from every node. `EngineError` names the nodes that failed,
        and why.
        """
        for engine in [*self.replicas]:
            if without_user_info(engine) == without_user_info(name):
                self.replicas.remove(engine)
        await self._on_all(lambda node: node.remove_replica(name, drain_s))
        self._removed.add(without_user_info(name))
        return self.policy()

    async def follow_engines(self, wanted: Collection[str], *, drain_s: float) -> None:
        """Add the inference servers in `wanted`, and remove those that an earlier call added and
        this one does not name.

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
        """Return the metrics of each node's gateway as Prometheus text, by the name of the node.

        All nodes are asked at once; each has `METRICS_S` seconds to answer.
        """
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
        """Return the content of a run's log or kept file from the node that has it; `None` = none
        has.
        """
        for member in self.live():
            with suppress(NodeLostError, StoreError):
                content = await member.node.artifact(run_id, name)
                if isinstance(content, bytes):
                    return content
        return None

    async def remove(self, run_id: str) -> None:
        """Delete the files of a run on every node; a node that cannot be reached keeps them."""
        for member in self.live():
            with suppress(NodeLostError):
                await member.node.remove(run_id)

    async def kept_bytes(self) -> int:
        """Return the bytes that runs occupy on the disks of all reachable nodes."""
        total = 0
        for member in self.live():
            with suppress(NodeLostError):
                total += await member.node.kept_bytes()
        return total

    async def _on_all(self, call: Callable[[RemoteNode], Awaitable[JSON]]) -> None:
        """Change the policy of every node by a call that returns it."""

        async def change(member: Member) -> None:
            member.policy = await call(member.node)

        await all_of((one.name, partial(change, one)) for one in self.live())


def _merged(engines: Iterable[JSON]) -> list[JSON]:
    """Return each engine once; of what nodes say of one, what is not `serving` counts."""
    merged: dict[str, JSON] = {}
    for one in engines:
        known = merged.setdefault(one["name"], one)
        if known["state"] == "serving":
            merged[one["name"]] = one
    return list(merged.values())


async def all_of(calls: Iterable[tuple[str, Callable[[], Awaitable[T]]]]) -> list[T]:
    """Make all calls at once, await every one and return their results in order.

    A call is a name and a function. `EngineError` has the names of those that failed.
    """
    failed: list[str] = []

    async def one(name: str, call: Callable[[], Awaitable[T]]) -> list[T]:
        try:
            return [await call()]
        except BridleError as error:
            failed.append(f"{name}: {error}")
            return []

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(name, call)) for name, call in calls]
    if failed:
        raise EngineError("; ".join(failed))
    return [result for task in tasks for result in task.result()]
