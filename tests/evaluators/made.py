"""Shared by the tests of evaluators: a context over real local runtimes."""

import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from bridle.config import Action, AgentSpec, EvaluatorSpec, RuntimeSpec, Task
from bridle.evaluators.base import EvaluationContext
from bridle.node.workspace import SessionPlaces
from bridle.runtimes.base import ExecResult
from bridle.runtimes.local import LocalRuntime
from bridle.trajectory.sample import Trace, Trajectory

ENDED_WELL = ExecResult(0, None, False, b"", b"", False, 1.0)


@asynccontextmanager
async def evaluation(
    folder,
    *,
    env=None,
    harness=ENDED_WELL,
    trusted=False,
    prepare=None,
    eval_prepare=None,
    kind=LocalRuntime,
):
    """An `EvaluationContext` of a session that ran in `context.places.agents`.

    `prepare` is a shell line that was done there, and is in each fresh runtime; `eval_prepare` is
    one that is done in fresh runtimes only.
    """
    async with AsyncExitStack() as stack:

        async def started(resources):
            scratch = folder / f"scratch-{secrets.token_hex(4)}"
            scratch.mkdir()
            runtime = kind(RuntimeSpec(), f"s-{secrets.token_hex(8)}", scratch)
            resources.push_async_callback(runtime.stop)
            await runtime.start()
            if prepare is not None:
                assert (await runtime.exec(prepare)).ok
            return runtime

        async def prepared(runtime):
            if eval_prepare is not None:
                assert (await runtime.exec(eval_prepare)).ok

        steps = () if eval_prepare is None else (Action(type="exec", command=eval_prepare),)
        task = Task(
            task_id="t-1",
            instruction="do it",
            agent=AgentSpec(harness="command", command="true"),
            evaluator=EvaluatorSpec(env=env or {}),
            runtime=RuntimeSpec(eval_prepare=steps),
        )
        places = SessionPlaces(
            agents=await started(stack),
            make=started,
            prepare=prepared,
            stop=lambda runtime: runtime.stop(),
            folder=folder / "left",
            resources=stack,
            trusted=trusted,
        )
        trajectory = Trajectory("s-1", "RUNNING", (), None, None, {})
        yield EvaluationContext(task, "s-1", places, harness, trajectory, folder / "logs", folder)


LEAVE = "sleep 60 & echo $! > {}"
"""Shell line that leaves a process behind, whose id it writes to a file."""


def runs(pid):
    """Return whether the process whose id is in a file still runs."""
    stat = Path("/proc", pid.read_text().strip(), "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def watching(file, pid, alive):
    """A runtime that notes in `alive`, as `file` is copied out, whether a process still runs."""

    class Watching(LocalRuntime):
        async def download(self, source, target, *, most=None):
            if source.endswith(file):
                alive.append(runs(pid))
            return await super().download(source, target, most=most)

    return Watching


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
