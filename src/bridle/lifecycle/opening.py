"""INITIALIZING: a key at the gateway, a runtime that is ready, the harness in it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import BridleError, RuntimeFailure, boundary
from bridle.harnesses.base import Launch, LaunchContext
from bridle.lifecycle.artifacts import began_at
from bridle.lifecycle.ending import Ending, failed
from bridle.lifecycle.hosting import open_host, share
from bridle.lifecycle.preparing import place, prepare
from bridle.runtimes import make_runtime
from bridle.runtimes.base import Mount, Runtime
from bridle.runtimes.door import Door
from bridle.types import JSON, Cause

if TYPE_CHECKING:
    from bridle.lifecycle.session import Session


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that is ready to run."""

    runtime: Runtime
    """The sandbox, which is scored."""
    launch: Launch
    place: Runtime
    """Where the harness runs: the sandbox, or its own place on the host."""
    workdir: str
    """The work folder, as the harness sees it."""
    door: Door | None = None
    """The way of a harness on the host into the sandbox."""
    began_at: str | None = None
    """The commit of the repository whose patch is kept (`artifacts`)."""


async def open_session(session: Session, stack: AsyncExitStack) -> Opened | Ending:
    """Make a session ready to run; `stack` owns what was opened. Failures are endings.

    The harness's installation, once per machine, is not in the session's budget.
    """
    budget_s = session.task.budgets.init_s
    try:
        with boundary(RuntimeFailure, "installing the harness"):
            bundle = await session.node.install(session.plan.harness)
        async with asyncio.timeout(budget_s):
            with boundary(RuntimeFailure, "starting the session"):
                return await session.timed("init", _open(session, stack, bundle))
    except TimeoutError:
        return failed(Cause.TIMEOUT, f"init: its budget of {budget_s:g} s ran out")
    except BridleError as error:
        return failed(Cause.INFRASTRUCTURE, f"init: {error}")


async def _open(session: Session, stack: AsyncExitStack, bundle: Path | None) -> Opened:
    task, gateway = session.task, session.node.gateway
    hosted = task.agent.place == "host"
    runtime = owned_runtime(session, stack, None if hosted else bundle)
    folder = share(runtime) if hosted else None
    stack.push_async_callback(session.seal)
    handle = await gateway.open_session(
        session.session_id,
        task_id=task.task_id,
        metadata=_facts_of(session, runtime),
        sampling=task.sampling,
        limits=task.limits,
    )
    await start(session, runtime)
    host = None if folder is None else await open_host(session, stack, runtime, folder, bundle)
    at = runtime if host is None else host.place
    launch = session.plan.harness.launch(
        LaunchContext(
            instruction=task.instruction,
            base_urls={name: at.gateway_url(url) for name, url in handle.base_urls.items()},
            key=handle.key,
            model_name=task.agent.model_name,
            workdir=runtime.workdir if host is None else host.workdir,
            home=at.home,
            bundle="" if bundle is None else at.inside(bundle),
            session_id=session.session_id,
            context_length=gateway.info.context_length,
            task_id=task.task_id,
            sample_index=session.sample_index,
            door="" if host is None else host.door.seen,
        )
    )
    await place(at, launch)
    began = await began_at(session, runtime)
    if host is None:
        return Opened(runtime, launch, at, runtime.workdir, began_at=began)
    host.door.withheld = {**launch.env, **task.agent.env}
    launch = replace(launch, env={**host.env, **launch.env})
    return Opened(runtime, launch, at, host.workdir, host.door, began)


def owned_runtime(session: Session, stack: AsyncExitStack, bundle: Path | None) -> Runtime:
    """A runtime that is not started yet and that `stack` stops."""
    scratch = session.node.scratch.session(session.session_id)
    harness, spec = session.plan.harness, session.task.runtime
    mounts = [] if bundle is None else [Mount(bundle, f"/opt/bridle/{harness.name}")]
    if spec.image is None and session.task.agent.place == "sandbox":
        mounts += [Mount(folder, str(folder)) for folder in getattr(harness, "sees", ())]
    runtime = make_runtime(spec, session.session_id, scratch, mounts)
    stack.push_async_callback(session.stop, runtime)
    return runtime


async def start(session: Session, runtime: Runtime) -> None:
    """Start a runtime and do the task's prepare steps in it."""
    await runtime.start()
    actions, log = session.task.runtime.prepare, session.log("prepare")
    await prepare(runtime, actions, stage="prepare", base=session.base, log=log)


def _facts_of(session: Session, runtime: Runtime) -> JSON:
    """What capture must know to build the same result again."""
    task, harness = session.task, session.plan.harness
    return {
        "sample_index": session.sample_index,
        "harness": harness.name,
        "harness_version": harness.version,
        "runtime": task.runtime.backend,
        "place": task.agent.place,
        "contains": runtime.contains,
        "builder": task.builder.model_dump(mode="json"),
        "train": [str(kind) for kind in task.train],
        "task_metadata": task.metadata,
    }
