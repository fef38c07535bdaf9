"""What the tests of this room share: a context over a real local runtime."""

import secrets
from contextlib import asynccontextmanager

import numpy as np

from bridle.config import AgentSpec, EvaluatorSpec, RuntimeSpec, Task
from bridle.evaluators.base import EvaluationContext
from bridle.runtimes.base import ExecResult
from bridle.runtimes.local import LocalRuntime
from bridle.trajectory.sample import Trace, Trajectory

ENDED_WELL = ExecResult(0, None, False, b"", b"", False, 1.0)


@asynccontextmanager
async def evaluation(folder, *, env=None, harness=ENDED_WELL):
    """An `EvaluationContext` in `folder`; its runtime is started and stopped."""
    scratch = folder / "scratch"
    scratch.mkdir()
    runtime = LocalRuntime(RuntimeSpec(), f"s-{secrets.token_hex(8)}", scratch)
    await runtime.start()
    task = Task(
        task_id="t-1",
        instruction="do it",
        agent=AgentSpec(harness="command", command="true"),
        evaluator=EvaluatorSpec(env=env or {}),
    )
    trajectory = Trajectory("s-1", "RUNNING", (), None, None, {})
    try:
        yield EvaluationContext(task, "s-1", runtime, harness, trajectory, folder / "logs", folder)
    finally:
        await runtime.stop()


def trace(*messages):
    """A trace in which `messages` (role, text) were said; its one token does not matter."""
    said = [{"role": role, "content": text} for role, text in messages]
    return Trace(
        trace_id="s-1/0",
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array([2], np.int32),
        loss_mask=np.array([1], np.uint8),
        response_logprobs=np.array([-0.5], np.float32),
        versions=np.array([0], np.int32),
        reasons=np.array([0], np.uint8),
        exchange_ids=("e-1",),
        turn_ends=(1,),
        finish_reason="stop",
        logprob_mode="raw",
        prompt_messages=said[:1],
        response_messages=said[1:],
    )
