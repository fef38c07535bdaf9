"""BUILDING and EVALUATING: exchanges to a trajectory, the session to a reward.

Both return what came out beside the fault that kept it from coming out, if there was one.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from bridle.aio import run_shielded
from bridle.capture.records import Outcome
from bridle.config import FieldPolicy, SamplingPolicy
from bridle.errors import BridleError, EvaluatorError, StoreError, boundary
from bridle.evaluators.base import (
    Evaluation,
    EvaluationContext,
    ModelAccess,
    Unscorable,
    controlled,
)
from bridle.lifecycle.ending import Ending, failed
from bridle.lifecycle.opening import Opened, fresh_runtime
from bridle.lifecycle.places import SessionPlaces
from bridle.lifecycle.preparing import Prewarmed, prepare
from bridle.lifecycle.results import trajectory_of
from bridle.trajectory.result import writable
from bridle.trajectory.sample import Trajectory
from bridle.types import Cause, SessionStatus

if TYPE_CHECKING:
    from bridle.capture.store import Store
    from bridle.lifecycle.manager import ModelGateway
    from bridle.lifecycle.session import Session

MODEL_END_S = 30.0
"""How long the last commits of an evaluator's own session may take."""


async def build(session: Session) -> tuple[Trajectory | None, Ending | None]:
    """The trajectory of what was captured, in a thread of its own."""
    budget_s = session.task.budgets.build_s
    store, session_id = session.node.store, session.session_id
    try:
        async with asyncio.timeout(budget_s):
            with boundary(StoreError, "building the trajectory"):
                return await asyncio.to_thread(lambda: trajectory_of(store.read(session_id))), None
    except TimeoutError:
        return None, failed(Cause.TIMEOUT, f"build: its budget of {budget_s:g} s ran out")
    except BridleError as error:
        return None, failed(Cause.INFRASTRUCTURE, f"build: {error}")


async def evaluate(
    session: Session, opened: Opened, fresh: Prewarmed | None, trajectory: Trajectory
) -> tuple[Evaluation | None, Ending | None]:
    """Score the session. Failures here are the evaluator's (law 5), unless only what
    the agent left can have caused it.
    """
    try:
        with boundary(EvaluatorError, "the evaluator"):
            return await _evaluate(session, opened, fresh, trajectory), None
    except BridleError as error:
        return None, failed(Cause.EVALUATOR, f"evaluate: {error}")


async def _evaluate(
    session: Session, opened: Opened, fresh: Prewarmed | None, trajectory: Trajectory
) -> Evaluation:
    async with AsyncExitStack() as resources:
        places = _places(session, opened, fresh, resources)
        context = EvaluationContext(
            task=session.task,
            session_id=session.session_id,
            places=places,
            harness=session.harness_result,
            trajectory=trajectory,
            logs=session.folder,
            task_dir=session.base,
            open_model=lambda: _model_of(session),
            budget_s=session.task.budgets.evaluate_s,
            completed=session.completed,
        )
        try:
            evaluation = await controlled(session.plan.evaluator, context)
        except Unscorable as error:
            evaluation = Evaluation(0.0, metadata={"unscorable": str(error)})
    rewards = (evaluation.reward, *(evaluation.trace_rewards or ()))
    if not all(math.isfinite(reward) for reward in rewards):
        raise EvaluatorError(f"a reward must be a finite number, not {rewards}")
    return replace(evaluation, metadata=writable({**evaluation.metadata, **places.facts()}))


def _places(
    session: Session, opened: Opened, fresh: Prewarmed | None, resources: AsyncExitStack
) -> SessionPlaces:
    actions, log = session.task.runtime.eval_prepare, session.log("eval_prepare")
    return SessionPlaces(
        agents=opened.runtime,
        make=lambda stack: fresh_runtime(session, stack),
        prepare=lambda runtime: prepare(
            runtime, actions, stage="eval_prepare", base=session.base, log=log
        ),
        stop=session.stop,
        folder=session.node.scratch.session(session.session_id),
        resources=resources,
        targets=[action.target for action in actions if action.target],
        trusted=session.task.evaluator.in_place,
        shared=session.task.evaluator.shared,
        prewarmed=None if fresh is None else fresh.get,
    )


@asynccontextmanager
async def _model_of(session: Session) -> AsyncIterator[ModelAccess]:
    """A gateway session for the evaluator of `session`: a key of its own, and nothing trains."""
    gateway, store = session.node.gateway, session.node.store
    as_asked = FieldPolicy(mode="respect")
    name = f"{session.session_id[:185]}.judge-{secrets.token_hex(3)}"
    handle = await gateway.open_session(
        name,
        task_id=session.task.task_id,
        metadata={"judge_of": session.session_id, "train": [], "owner": session.task.owner},
        sampling=SamplingPolicy(temperature=as_asked, top_p=as_asked, top_k=as_asked),
    )
    try:
        yield ModelAccess(name, handle.base_urls["openai"], handle.key)
    finally:
        await run_shielded(_end_model(gateway, store, name), timeout_s=MODEL_END_S)


async def _end_model(gateway: ModelGateway, store: Store, name: str) -> None:
    await gateway.seal(name)
    await store.close_session(Outcome(name, SessionStatus.COMPLETED, time.time(), None))
