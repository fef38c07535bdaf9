"""No way to a reward without the work: each is tried where it bites, and then against a session."""

import secrets
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.sandbox.conftest import CONTAINING
from tests.sandbox.forgeries import CHECKERS, WAYS
from tests.sandbox.images import spec_of

from bridle.config import AgentSpec, EvaluatorSpec, RuntimeSpec, Task
from bridle.errors import BridleError
from bridle.evaluators import open_evaluator
from bridle.evaluators.base import EvaluationContext, Unscorable
from bridle.node.workspace import SessionPlaces
from bridle.runtimes import make_runtime
from bridle.runtimes.base import Mount
from bridle.trajectory.sample import Trajectory

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

PYTEST = Path(pytest.__file__).parent.parent
FOLDERS = {"bubblewrap": {"kwargs": {"folders": ["/tests", "/logs"]}}, "docker": {}}


class Scene:
    """A session whose agent forges, in runtimes of one kind."""

    def __init__(self, backend, checker, folder, *, trusted):
        self.backend, self.checker, self.folder = backend, checker, folder
        self.trusted = trusted

    async def runtime(self, resources):
        scratch = self.folder / secrets.token_hex(4)
        scratch.mkdir(parents=True)
        known = await spec_of(self.backend, large=self.checker.programs)
        spec = RuntimeSpec(**{**known, **FOLDERS[self.backend]})
        mounts = [Mount(PYTEST, "/opt/site")] if self.checker.programs else []
        runtime = make_runtime(spec, f"forgery-{secrets.token_hex(4)}", scratch, mounts)
        resources.push_async_callback(runtime.stop)
        await runtime.start()
        begun = await runtime.exec(self.checker.begin)
        assert begun.ok, begun.stderr
        return runtime

    async def prepare(self, runtime):
        """Bring the checker, as `eval_prepare` does: whole folders, else single files."""
        if self.checker.strategy == "harbor":
            return
        for top in {name.partition("/")[0] for name in self.checker.files}:
            await runtime.upload(self.source / top, top)

    @property
    def source(self):
        return self.folder / "source"

    async def reward(self, agents, resources):
        """Return what the session is worth; `None` = nothing can be said."""
        for name, text in self.checker.files.items():
            path = self.source / ("tests" if self.checker.strategy == "harbor" else "") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        places = SessionPlaces(
            agents=agents,
            make=self.runtime,
            prepare=self.prepare,
            stop=lambda runtime: runtime.stop(),
            folder=self.folder / "left",
            resources=resources,
            targets=sorted({name.partition("/")[0] for name in self.checker.files}),
            trusted=self.trusted,
        )
        spec = EvaluatorSpec(
            strategy=self.checker.strategy, config=self.checker.config, env=self.checker.env
        )
        agent = AgentSpec(harness="command", command="true")
        task = Task(task_id="t", instruction="Write 42.", agent=agent, evaluator=spec)
        trajectory = Trajectory("s", "RUNNING", (), None, None, {})
        context = EvaluationContext(
            task, "s", places, None, trajectory, self.folder / "logs", self.source
        )
        try:
            return (await open_evaluator(spec).evaluate(context)).reward
        except Unscorable:
            return 0.0
        except BridleError as error:
            print(error)  # noqa: T201 - for whoever looks into a failure
            return None


async def tried(backend, way, folder, *, trusted):
    """(whether `way.shown` succeeds where the agent was, the reward)."""
    scene = Scene(backend, CHECKERS[way.checker], folder, trusted=trusted)
    async with AsyncExitStack() as resources:
        agents = await scene.runtime(resources)
        await agents.exec(way.left)
        shown = way.shown is not None and (await agents.exec(way.shown, timeout_s=10)).ok
        await agents.kill()
        return shown, await scene.reward(agents, resources)


def cases():
    """Every way in every runtime."""
    for backend in CONTAINING:
        for way in WAYS:
            name = f"{backend}-{way.name}"
            yield pytest.param(backend, way, id=name, marks=pytest.mark.drawn_with(name))


@pytest.mark.parametrize(("backend", "way"), list(cases()))
async def test_a_forgery_without_the_work_gets_reward_0(backend, way, tmp_path):
    shown, reward = await tried(backend, way, tmp_path / "apart", trusted=False)
    assert reward == 0.0
    if way.shown is not None:
        assert shown
        return
    _, in_place = await tried(backend, way, tmp_path / "trusted", trusted=True)
    assert (in_place == 1.0) is not way.shut


@pytest.mark.parametrize("backend", CONTAINING)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.drawn_with(name)) for name in sorted(CHECKERS)]
)
async def test_each_checker_rewards_a_correct_solution(backend, name, tmp_path):
    checker = CHECKERS[name]
    scene = Scene(backend, checker, tmp_path, trusted=False)
    async with AsyncExitStack() as resources:
        agents = await scene.runtime(resources)
        line = (
            "printf 42 > code.txt"
            if checker.strategy == "test_on_output"
            else "printf 42 > answer.txt"
        )
        if name in ("temp", "cache", "tools", "sub"):
            line += "; echo >> answer.txt"
        assert (await agents.exec(line)).ok
        await agents.kill()
        assert await scene.reward(agents, resources) == 1.0


@pytest.mark.core
def test_at_least_40_distinct_forgeries_are_tried():
    assert len({way.name for way in WAYS}) == len(WAYS) >= 40
