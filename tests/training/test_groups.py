"""Groups begin in order, as far as they are allowed, and again after a resume."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.training.made import session, trace

from bridle.config import Task
from bridle.errors import StoreError
from bridle.training.groups import LABEL, History, TaskDraws, evaluation_of, local_groups


@dataclass
class Result:
    task_id: str
    sample_index: int
    reward: float | None

    @property
    def trajectory(self):
        return session(self.reward, trace([1], [2]), name=f"{self.task_id}.{self.sample_index}")


@dataclass
class Players:
    """An executor whose sessions end when they are let go, the last sample first."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    fault: Exception | None = None

    @asynccontextmanager
    async def run(self, tasks):
        async def results():
            await self.gate.wait()
            if self.fault is not None:
                raise self.fault
            for task in tasks:
                for n in reversed(range(task.num_samples)):
                    yield Result(task.task_id, n, None if n == 2 else float(n))

        self.begun += [task.task_id for task in tasks]
        try:
            yield results()
        finally:
            self.ended += [task.task_id for task in tasks]


def draws(count=6):
    made = [Task(task_id=f"t{n}", instruction="go", num_samples=3) for n in range(count)]
    return TaskDraws(made, History(), seed=1)


ORDER = [draws().draw(n).task_id for n in range(6)]


async def begun(players, count):
    async with asyncio.timeout(60):
        while len(players.begun) < count:  # noqa: ASYNC110 - no event of its own
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    return players.begun


async def test_local_groups_start_no_more_groups_than_allowed():
    players = Players()
    async with local_groups(players, draws()) as source:
        source.allow(2)
        assert await begun(players, 2) == ORDER[:2]
        source.allow(1)
        assert await begun(players, 3) == ORDER[:3]
    assert sorted(players.ended) == sorted(ORDER[:3])


async def test_sessions_of_a_group_are_in_sample_order():
    players = Players()
    players.gate.set()
    async with local_groups(players, draws()) as source:
        source.allow(1)
        group = await source.take()

    assert (group.index, group.task_id) == (0, ORDER[0])
    assert [s.session_id for s in group.sessions] == [f"{ORDER[0]}.{n}" for n in range(3)]
    assert group.rewards[:2] == [0.0, 1.0]


async def test_groups_started_and_not_taken_start_again_after_a_resume():
    players = Players()
    async with local_groups(players, draws()) as source:
        source.allow(3)
        await begun(players, 3)
        players.gate.set()
        await source.take()
        cursor = source.cursor()
    assert cursor["next"] == 3
    assert len(cursor["open"]) == 2

    again = Players()
    again.gate.set()
    async with local_groups(again, draws(), cursor=cursor) as source:
        assert source.cursor() == cursor
        source.allow(3)
        taken = [await source.take() for _ in range(3)]
        assert source.cursor() == {"next": 4, "open": []}
    assert {group.index for group in taken} == {*[index for index, _ in cursor["open"]], 3}


async def test_an_evaluation_is_the_mean_of_the_known_rewards():
    players = Players()
    players.gate.set()
    held_out = [Task(task_id=name, instruction="go", num_samples=3) for name in "ab"]
    async with local_groups(players, draws(), held_out=held_out) as source:
        found = await source.evaluate()

    assert found is not None
    assert found.rewards == {"a": [0.0, 1.0, None], "b": [0.0, 1.0, None]}
    assert found.json() == {"reward": 0.5, "sessions": 6, "unknown": 2, "half_width": 0.0}
    async with local_groups(players, draws()) as source:
        assert await source.evaluate() is None


def test_evaluation_rewards_are_reported_separately_for_other_harnesses():
    own = [Task(task_id=name, instruction="go") for name in "ab"]
    other = [Task(task_id=f"x:{name}", instruction="go", metadata={LABEL: "x"}) for name in "ab"]
    rewards: dict[str, list[float | None]]
    rewards = {"a": [1.0], "b": [None], "x:a": [0.0, 1.0], "x:b": [1.0, 1.0]}

    found = evaluation_of([*own, *other], rewards)

    assert found.json() == {
        "reward": 1.0,
        "sessions": 2,
        "unknown": 1,
        "others": {
            "x": {
                "reward": 0.75,
                "sessions": 4,
                "unknown": 0,
                "half_width": pytest.approx(0.49, abs=1e-4),
            }
        },
    }
    assert found.others["x"].rewards == {"x:a": [0.0, 1.0], "x:b": [1.0, 1.0]}


async def test_an_error_of_the_executor_is_raised_when_a_group_is_taken():
    players = Players(fault=StoreError("disk full"))
    players.gate.set()

    async def taking():
        async with local_groups(players, draws()) as source:
            source.allow(1)
            await source.take()

    with pytest.raises(StoreError, match="disk full"):
        await taking()
