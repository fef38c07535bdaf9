"""`place = "host"`: the harness lives beside the sandbox, and only its commands run in it.

Its own place is a sandbox of bubblewrap with a private home, a way to the gateway and the session's
work folder, seen under the path that it has in the session's own sandbox; so built-in tools that
edit files and commands that run there speak of the same files. Only a session in `local`, which
contains nothing, has its harness as plain processes too: nobody who is kept to runtimes that
contain gets out of them by asking for a place on the host.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from bridle.config import AgentSpec, RuntimeSpec
from bridle.errors import ConfigError
from bridle.harnesses import HARNESSES, open_harness
from bridle.harnesses.base import Harness, places_of
from bridle.runtimes.base import Mount, Runtime, Shares
from bridle.runtimes.bubblewrap import BubblewrapRuntime
from bridle.runtimes.door import Door, mounts_of
from bridle.runtimes.local import LocalRuntime, search_path
from bridle.runtimes.view import ENVIRONMENT

if TYPE_CHECKING:
    from bridle.lifecycle.session import Session

SEEN = "/opt/bridle/door"
"""Where a contained harness sees the door."""


@dataclass(frozen=True, slots=True)
class Host:
    """A harness's own place, started, and its way into the session's sandbox."""

    place: Runtime
    door: Door
    workdir: str
    """The session's work folder, as the harness sees it."""
    env: dict[str, str]
    """What makes the harness find the door; not for what we run there ourselves."""


def refuse_place(agent: AgentSpec, harness: Harness, runtime: Runtime) -> None:
    """Raise `ConfigError` where a task wants a harness on the host that can't be there."""
    if agent.place == "sandbox":
        return
    if agent.place not in places_of(harness):
        names = ", ".join(name for name in sorted(HARNESSES) if _hosted(name))
        message = (
            f"agent.place: harness {harness.name!r} runs in the sandbox only, because not all of "
            f"its commands go through a shell that can be named; 'host' is for {names}"
        )
        raise ConfigError(message)
    share_of(runtime)


def _hosted(name: str) -> bool:
    try:
        return "host" in places_of(open_harness(name))
    except ConfigError:
        return False


def share_of(runtime: Runtime) -> Shares:
    """A sandbox's side of serving a harness on the host. Raises `ConfigError` if it has none."""
    if not isinstance(runtime, Shares):
        message = (
            f"agent.place: {type(runtime).__name__} cannot share its work folder with a harness on "
            "the host; the runtimes local, bubblewrap and docker can"
        )
        raise ConfigError(message)
    return runtime


def share(runtime: Runtime) -> Path:
    """The folder of this machine that will hold the sandbox's work folder."""
    return share_of(runtime).share()


async def open_host(
    session: Session, stack: AsyncExitStack, sandbox: Runtime, folder: Path, bundle: Path | None
) -> Host:
    """A started place for the harness, and an open door; `stack` owns both.

    Raises `RuntimeFailure` where a session that is contained would need bubblewrap for it.
    """
    shares = share_of(sandbox)
    name = f"{session.session_id}.host"
    scratch = session.node.scratch.session(name)
    contained = sandbox.contains
    shared = shares.shared_at if contained else str(folder)
    at = scratch / "door"
    seen = SEEN if contained else str(at)
    door = await stack.enter_async_context(Door(shares, at, seen=seen, shared=shared))
    harness = session.plan.harness
    mounts = [Mount(folder, shared, writable=True), *mounts_of(at, seen)]
    if bundle is not None:
        mounts.append(Mount(bundle, f"/opt/bridle/{harness.name}"))
    targets = {mount.target for mount in mounts}
    sees = (str(each) for each in getattr(harness, "sees", ()))
    mounts += [Mount(Path(each), each) for each in sees if each not in targets]
    path = ENVIRONMENT["PATH"] if contained else search_path()
    workdir = PurePosixPath(shared, PurePosixPath(sandbox.workdir).relative_to(shares.shared_at))
    spec = RuntimeSpec(
        backend="bubblewrap" if contained else "local",
        network="open" if session.task.runtime.network == "open" else "gateway_only",
        workdir=str(workdir) if contained else None,
    )
    kind = BubblewrapRuntime if contained else LocalRuntime
    place = kind(spec, name, scratch, mounts)
    stack.push_async_callback(session.stop, place)
    await place.start()
    env = {"PATH": f"{door.programs}:{path}", "SHELL": f"{door.programs}/bash"}
    return Host(place, door, str(workdir), env)
