"""INITIALIZING: a key at the gateway, a runtime that is ready, the harness in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.capture.sqlite import SqliteReader
from bridle.config import ForkSpec
from bridle.errors import BridleError, RuntimeFailure, boundary
from bridle.gateway.replay import Replay, replay_of
from bridle.harness_rules.base import Varying
from bridle.harnesses.base import Launch, LaunchContext
from bridle.lifecycle.artifacts import began_at
from bridle.lifecycle.ending import Ending, failed
from bridle.lifecycle.preparing import place, prepare
from bridle.runtimes import make_runtime
from bridle.runtimes.base import Mount, Runtime
from bridle.types import JSON, Cause

if TYPE_CHECKING:
    from bridle.lifecycle.session import Session


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that is ready to run."""

    runtime: Runtime
    launch: Launch
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
    runtime = owned_runtime(session, stack, bundle)
    stack.push_async_callback(session.seal)
    if task.fork is not None:
        noise = getattr(session.plan.harness, "noise", ())
        session.replay = await asyncio.to_thread(read_replay, task.fork, session.base, noise)
    handle = await gateway.open_session(
        session.session_id,
        task_id=task.task_id,
        metadata=_facts_of(session, runtime),
        sampling=task.sampling,
        limits=task.limits,
        replay=session.replay,
    )
    await start(session, runtime)
    launch = session.plan.harness.launch(
        LaunchContext(
            instruction=task.instruction,
            base_urls={name: runtime.gateway_url(url) for name, url in handle.base_urls.items()},
            key=handle.key,
            model_name=task.agent.model_name,
            workdir=runtime.workdir,
            home=runtime.home,
            bundle="" if bundle is None else runtime.inside(bundle),
            session_id=session.session_id,
            context_length=gateway.info.context_length,
            task_id=task.task_id,
            sample_index=session.sample_index,
        )
    )
    await place(runtime, launch)
    return Opened(runtime, launch, await began_at(session, runtime))


def owned_runtime(session: Session, stack: AsyncExitStack, bundle: Path | None) -> Runtime:
    """A runtime that is not started yet and that `stack` stops."""
    scratch = session.node.scratch.session(session.session_id)
    harness, spec = session.plan.harness, session.task.runtime
    mounts = [] if bundle is None else [Mount(bundle, f"/opt/bridle/{harness.name}")]
    if spec.image is None:
        mounts += [Mount(folder, str(folder)) for folder in getattr(harness, "sees", ())]
    runtime = make_runtime(spec, session.session_id, scratch, mounts)
    stack.push_async_callback(session.stop, runtime)
    return runtime


async def fresh_runtime(session: Session, stack: AsyncExitStack) -> Runtime:
    """A started runtime, prepared as the agent's was and without a harness; `stack` stops it."""
    runtime = owned_runtime(session, stack, None)
    await start(session, runtime)
    return runtime


async def start(session: Session, runtime: Runtime) -> None:
    """Start a runtime and do the task's prepare steps in it."""
    await runtime.start()
    actions, log = session.task.runtime.prepare, session.log("prepare")
    await prepare(runtime, actions, stage="prepare", base=session.base, log=log)


def read_replay(fork: ForkSpec, base: Path, noise: Sequence[Varying] = ()) -> Replay:
    """Read the replies that a fork begins with. `StoreError` or `ConfigError` if it cannot.

    `base` is the task's folder, which a relative `fork.capture` begins at; `noise` is the
    harness's.
    """
    with SqliteReader(base / fork.capture) as reader:
        return replay_of(reader.read(fork.session), fork.at, noise)


def _facts_of(session: Session, runtime: Runtime) -> JSON:
    """Return the facts that capture needs to build the same result again."""
    task, harness = session.task, session.plan.harness
    forked = {} if task.fork is None else {"fork": task.fork.model_dump(mode="json")}
    return {
        **forked,
        "sample_index": session.sample_index,
        "harness": harness.name,
        "harness_version": harness.version,
        "kind_rules": [
            rule.model_dump(mode="json", exclude_none=True) for rule in task.agent.kind_rules
        ],
        "runtime": task.runtime.backend,
        "contains": runtime.contains,
        "builder": task.builder.model_dump(mode="json"),
        "train": [str(kind) for kind in task.train],
        "rejected": task.rejected,
        "rejected_reward": task.rejected_reward,
        "task_metadata": task.metadata,
        "owner": task.owner,
    }
