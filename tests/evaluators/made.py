"""What the tests of this room share: a context over a real local runtime."""

import secrets
from contextlib import asynccontextmanager

from bridle.config import AgentSpec, EvaluatorSpec, RuntimeSpec, Task
from bridle.evaluators.base import EvaluationContext
from bridle.runtimes.base import ExecResult
from bridle.runtimes.local import LocalRuntime
from bridle.trajectory.sample import Trajectory

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
