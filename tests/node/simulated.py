"""Sessions that only take time, on a real node: how busy its run slots are.

The node, its pools, the gateway and the store are the real ones. The runtime waits in place of
working, for as long as its task says, on a clock that jumps (`bridle.testing.JumpingLoop`).
"""

import asyncio
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.loops import JumpingLoop
from tests.node.house import a_node

from bridle.config import AgentSpec, Budgets, EvaluatorSpec, RuntimeSpec, Task
from bridle.node.base import SessionChanged
from bridle.node.local import LocalExecutor
from bridle.runtimes.base import ExecResult
from bridle.runtimes.local import LocalRuntime

MEAN_S = 100.0
"""Of a run."""


class WaitingRuntime:
    """Takes `init_s` to start, `run_s` for its first command and `stop_s` to stop."""

    contains = True
    workdir = home = "/nowhere"

    def __init__(self, spec, session_id, scratch, mounts=()):
        self._kwargs = spec.kwargs

    inside = LocalRuntime.inside
    gateway_url = LocalRuntime.gateway_url

    async def start(self):
        await asyncio.sleep(self._kwargs["init_s"])

    async def exec(self, command, **_):
        await asyncio.sleep(self._kwargs["run_s"])
        return ExecResult(0, None, False, b"", b"", False, self._kwargs["run_s"])

    async def kill(self):
        pass

    async def stop(self):
        await asyncio.sleep(self._kwargs["stop_s"])


@dataclass(frozen=True)
class Busy:
    """Load of run slots at steady state."""

    share: float
    """Of the time of all run slots, from a fifth of the sessions being started to the last one."""
    ready: float
    """Mean number of runtimes that stood ready, waiting for a run slot."""
    hours: float
    """What the whole batch took."""


def tasks(sessions, *, sigma, init_share, seed):
    """Runs of log-normal length with mean `MEAN_S`; init takes its share of the mean, log-normal
    too (sigma 0.5)."""
    draw = random.Random(seed)
    for n in range(sessions):
        run_s = draw.lognormvariate(math.log(MEAN_S) - sigma**2 / 2, sigma)
        init_s = init_share * draw.lognormvariate(math.log(MEAN_S) - 0.125, 0.5)
        yield Task(
            task_id=f"s-{n}",
            instruction="Wait.",
            runtime=RuntimeSpec(
                backend="tests.node.simulated:WaitingRuntime",
                kwargs={"init_s": init_s, "run_s": run_s, "stop_s": 0.02 * MEAN_S},
            ),
            agent=AgentSpec(harness="empty"),
            evaluator=EvaluatorSpec(strategy="session_completed"),
            budgets=Budgets(init_s=1e6, agent_s=1e6, teardown_s=1e6),
        )


def simulate(sessions, *, sigma=1.0, init_share=0.2, seed=0, **settings):
    """Return how busy the run slots of a node with `settings` were."""

    async def run(folder):
        batch = list(tasks(sessions, sigma=sigma, init_share=init_share, seed=seed))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        changes: list[tuple[float, str]] = []

        def note(event):
            if isinstance(event, SessionChanged):
                changes.append((loop.time(), str(event.status)))

        async with a_node(folder, settings={"reap_s": 1e9, **settings}) as node:
            began = loop.time()
            with node.events.listening(note), loop.jumping():
                async with LocalExecutor(node).run(batch) as results:
                    ended = [result.status async for result in results]
            assert ended == ["COMPLETED"] * sessions
            return busy(changes, node.settings.run_slots, began)

    with (
        tempfile.TemporaryDirectory(prefix="bridle-slots-") as folder,
        asyncio.Runner(loop_factory=JumpingLoop) as runner,
    ):
        return runner.run(run(Path(folder)))


def busy(changes, slots, began):
    """`Busy` of a run with `slots`, from (time, status) as they came."""
    running = ready = 0
    starts = [at for at, status in changes if status == "RUNNING"]
    since, until = starts[len(starts) // 5], starts[-1]
    used = stood = 0.0
    before = since
    for at, status in changes:
        if since <= at <= until:
            used += running * (at - before)
            stood += ready * (at - before)
            before = at
        running += (status == "RUNNING") - (status == "BUILDING")
        ready += (status == "READY") - (status == "RUNNING")
    span = until - since
    return Busy(used / (slots * span), stood / span, (changes[-1][0] - began) / 3600)
