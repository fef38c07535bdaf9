"""Nodes on the machines of a Ray cluster: one actor per machine, pinned to it, restarted by Ray.

An actor (`NodeActor`) holds a `NodeHost`: gateway, sessions, capture, harness bundles. It is
detached and has a name, so it and its sessions outlive the process that made it, and the next one
finds it. `RayCluster` watches which machines offer the resource and adds each to the runner.
`RayNode` is a proxy: its calls are actor calls, and results go through the object store.

Ray restarts an actor whose process died; the new process takes the first folder that no process
holds, as a rule its own, and so has the runs that had ended there. The actor of a machine that died
is lost; a machine that comes back gets a new one, on the folder that is on its disk.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import ray
import structlog
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bridle.aio import Nursery
from bridle.errors import BridleError, ConfigError, NodeLostError
from bridle.folders import FolderLock
from bridle.node.base import REMOTE_METHODS, NodeOpener, RemoteNode
from bridle.node.cluster import ClusterRunner
from bridle.node.fleet import RaySettings
from bridle.node.host import NodeHost, node_name

T = TypeVar("T")

HEALTH: Final = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""Health checks by which a cluster that we start detects a dead machine in 5 s, not Ray's 16."""

CALLS: Final = 10_000
"""Calls that an actor serves at once, polls that wait included."""

REMAKE_S: Final = 10.0
"""Seconds between two attempts to start the actor of a machine."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ActorResult:
    """Result of an actor's method: a value, or the error that it raised."""

    value: Any = None
    error: BridleError | None = None


class NodeActor:
    """The node of one machine; made by `RayCluster`, one per machine.

    The node is opened by the first `connect`, and by the next one if that failed.
    """

    def __init__(self, base: str, cwd: str, opens: NodeOpener, cpus: float | None) -> None:
        self._base = Path(base)
        self._opens = opens
        self._cpus = cpus
        if Path(cwd).is_dir():
            os.chdir(cwd)  # relative paths of a config mean what they mean to the server
        self._nursery = Nursery(lambda error: log.error("a node has failed", error=repr(error)))
        self._host: NodeHost | None = None
        self._opening = asyncio.Lock()
        self._leaving = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def call(self, method: str, *given: Any) -> ActorResult:  # noqa: ANN401 - of any method
        """Call one of the methods in `base.REMOTE_METHODS` on the node of this actor."""
        try:
            host = await self._up() if method == "connect" else self._host
            if host is None:
                raise NodeLostError(
                    "the node's process has just been started and takes no calls yet",
                    may_return=True,
                )
            return ActorResult(await host.call(method, *given))
        except BridleError as error:
            return ActorResult(error=error)

    async def leave(self) -> None:
        """End all sessions of this node, so that the actor can be killed."""
        self._leaving.set()
        if self._life is not None:
            await asyncio.wait([self._life])

    async def _up(self) -> NodeHost:
        async with self._opening:
            if self._host is None:
                ready: asyncio.Future[NodeHost] = asyncio.get_running_loop().create_future()
                self._life = self._nursery.start(self._live(ready), name="node")
                self._host = await ready
            return self._host

    async def _live(self, ready: asyncio.Future[NodeHost]) -> None:
        """Open the node and hold it open until it is to leave."""
        try:
            async with AsyncExitStack() as stack:
                folder, lock = await asyncio.to_thread(take_folder, self._base)
                stack.enter_context(lock)
                node = await stack.enter_async_context(self._opens(folder, self._cpus))
                host = NodeHost(node, node_id=node_name(folder))
                await stack.enter_async_context(host)
                ready.set_result(host)
                await self._leaving.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(
                error
                if isinstance(error, BridleError)
                else ConfigError(f"cannot open the node: {error!r}")
            )


def take_folder(base: Path) -> tuple[Path, FolderLock]:
    """Return the first folder of this machine in `base` that no process has locked, and lock it."""
    for number in itertools.count():
        folder = base / socket.gethostname() / str(number)
        with suppress(ConfigError):
            return folder, FolderLock(folder)
    raise AssertionError


class RayNode:
    """A proxy for a node's actor; implements `base.RemoteNode`."""

    def __init__(self, name: str, offers: Mapping[str, float], actor: Any) -> None:  # noqa: ANN401 - ray's handle
        self.name = name
        self.offers = offers
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method not in REMOTE_METHODS:
            raise AttributeError(method)

        def call(*given: object) -> Awaitable[Any]:
            return actor_result(self._actor.call.remote(method, *given))

        return call

    async def leave(self) -> None:
        """Stop the node, then kill its actor."""
        with suppress(NodeLostError):
            await actor_result(self._actor.leave.remote())
        await asyncio.to_thread(ray.kill, self._actor)


async def actor_result(answer: Any) -> Any:  # noqa: ANN401 - what an actor's call gives
    """Await a call of a Ray actor and return its result, or raise the error that the call raised.

    Ray's own errors become `NodeLostError`.
    """
    try:
        reply = await answer
    except (ActorUnavailableError, RayTaskError) as error:
        raise NodeLostError(_short(error), may_return=True) from error
    except RayError as error:
        raise NodeLostError(_short(error)) from error
    if isinstance(reply, ActorResult):
        if reply.error is not None:
            raise reply.error
        return reply.value
    return reply


def _short(error: Exception) -> str:
    """Return the first and the last line of a message of Ray, cut."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0]} {lines[-1] if lines[1:] else ''}"[:400]


class RayCluster:
    """Adds the machines of a Ray cluster to a runner. Use as an async context manager, inside
    the runner's own.
    """

    def __init__(
        self, runner: ClusterRunner, settings: RaySettings, *, opens: NodeOpener, folder: Path
    ) -> None:
        """`folder` is that of nodes, on each machine, where the settings name none."""
        self._runner = runner
        self._settings = settings
        self._opens = opens
        self._folder = (settings.folder or folder).absolute()
        self._made: dict[str, float] = {}
        """Ray's node id -> the time at which its actor was last started."""
        self._left = set[str]()
        """Machines whose nodes were drained; no node is started there again."""
        self._nursery = Nursery(
            lambda error: log.error("the watch of machines has failed", error=repr(error))
        )
        self._connected = False

    async def __aenter__(self) -> Self:
        """Connect, and wait for the machines that the cluster has.

        `ConfigError` if there is no cluster, or if none of their nodes could be opened.
        """
        await asyncio.to_thread(self._connect)
        keep_signals()
        try:
            await self._look()
            await self._runner.first_contact()
            self._nursery.start(self._watch(), name="machines")
            if self._settings.engines_from is not None:
                self._nursery.start(self._follow(self._settings.engines_from), name="engines")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect; actors and their sessions continue."""
        await self._nursery.cancel()
        if self._connected:
            self._connected = False
            await asyncio.to_thread(ray.shutdown)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        common = {"namespace": self._settings.namespace, "log_to_driver": False}
        common["logging_level"] = "warning"
        address = self._settings.address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            try:
                if address != "local":
                    ray.init(address=address, **common)
            except ConnectionError:
                if self._settings.address is not None or "RAY_ADDRESS" in os.environ:
                    raise
            if not ray.is_initialized():
                start_here(self._settings, common)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"cannot connect to a Ray cluster at {address}: {error}") from error
        self._connected = True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.watch_s)
            try:
                await self._look()
            except (RayError, NodeLostError) as error:
                log.warning("the machines of the cluster cannot be listed", error=_short(error))

    async def _follow(self, source: str) -> None:
        """Have every node use the engines that `source` lists, until it is cancelled."""
        while True:
            try:
                lister = await asyncio.to_thread(engine_source, source)
                wanted = [str(one) for one in await lister.engines.remote()]
                await self._runner.follow_engines(wanted, drain_s=self._settings.engines_drain_s)
            except (RayError, ValueError, TypeError, ImportError) as error:
                log.warning(
                    "the list of engines cannot be read", source=source, error=_short(error)
                )
            await asyncio.sleep(self._settings.engines_s)

    async def _look(self) -> None:
        """Add the machines that are new, and remove those that have left."""
        machines = {one["NodeID"]: one for one in await asyncio.to_thread(ray.nodes)}
        wanted = {
            name: one["Resources"]
            for name, one in machines.items()
            if one["Alive"] and one["Resources"].get(self._settings.resource, 0) > 0
        }
        self._left &= wanted.keys()
        for name in await asyncio.to_thread(machines_leaving):
            if any(
                one.slots.name == name and one.state == "live" for one in self._runner.members()
            ):
                await self._runner.drain_node(name)
        for member in self._runner.members():
            name = member.slots.name
            if name not in wanted:
                self._runner.gone(name, "its machine has left the cluster")
            elif member.task is not None and member.task.done():
                self._runner.gone(name, "its actor has ended")
            elif member.state == "draining" and member.idle:
                await member.node.leave()
                self._left.add(name)
                self._runner.gone(name, "it was drained")
                log.info("node_left", node=member.slots.node_id)
        known = {member.slots.name for member in self._runner.members()}
        now = asyncio.get_running_loop().time()
        for name, resources in wanted.items():
            if name not in known | self._left and now - self._made.get(name, -REMAKE_S) >= REMAKE_S:
                self._made[name] = now
                actor = await asyncio.to_thread(self._actor, name, resources)
                node = RayNode(name, self._offers(resources), actor)
                self._runner.join(cast("RemoteNode", node))

    def _offers(self, resources: Mapping[str, float]) -> dict[str, float]:
        own = {"object_store_memory", self._settings.resource} - {"CPU"}
        return {
            name: much
            for name, much in resources.items()
            if name not in own and not name.startswith("node:")
        }

    def _actor(self, name: str, resources: Mapping[str, float]) -> Any:  # noqa: ANN401 - ray's handle
        """Return the actor of a machine, which is started if there is none."""
        made = ray.remote(NodeActor).options(
            name=f"node-{name}",
            namespace=self._settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
        )
        cpus = resources.get("CPU") or None
        return made.remote(str(self._folder), str(Path.cwd()), self._opens, cpus)


def engine_source(source: str) -> Any:  # noqa: ANN401 - ray's handle
    """Return the Ray actor or Serve deployment that the setting `RaySettings.engines_from` names.

    `ValueError` if there is none.
    """
    if source.startswith("serve:"):
        from ray import serve

        return serve.get_app_handle(source.removeprefix("serve:"))
    namespace, _, name = source.rpartition("/")
    return ray.get_actor(name, namespace or None)


def keep_signals() -> None:
    """Restore Python's handlers of SIGTERM and SIGINT, because Ray's own end the process at
    once.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)
                signal.siginterrupt(number, False)  # noqa: FBT003 - its own words


def machines_leaving() -> set[str]:
    """Return the machines that an autoscaler or `ray drain-node` is removing."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def address() -> str:
    """Return the address of the Ray cluster that this process is connected to."""
    found: str = ray.get_runtime_context().gcs_address
    return found


def start_here(settings: RaySettings, common: Mapping[str, Any]) -> None:
    """Start a Ray cluster of this machine alone; it ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    offered = {} if settings.resource == "CPU" else {settings.resource: 1.0}
    ray.init(
        address="local",
        include_dashboard=False,
        resources=offered,
        _system_config=HEALTH,
        **common,
    )
