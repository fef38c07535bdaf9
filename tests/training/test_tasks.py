"""Draws are functions of seed, number and history."""

from collections import Counter

import pytest
from tests.training.made import group, session, trace

from bridle.config import Task
from bridle.errors import ConfigError
from bridle.training.groups import History, Record, TaskDraws


def tasks(count):
    return [Task(task_id=f"t{n}", instruction="go") for n in range(count)]


def test_every_task_comes_once_per_epoch_in_an_order_of_the_seeds():
    draws = TaskDraws(tasks(7), History(), seed=3)
    ids = [draws.draw(n).task_id for n in range(14)]

    assert sorted(ids[:7]) == sorted(ids[7:]) == [f"t{n}" for n in range(7)]
    assert ids[:7] != ids[7:]
    assert [TaskDraws(tasks(7), History(), seed=3).draw(n).task_id for n in range(14)] == ids
    assert [TaskDraws(tasks(7), History(), seed=4).draw(n).task_id for n in range(14)] != ids


def test_learnable_tasks_come_more_often_and_none_never():
    history = History(
        {
            "t0": Record(sessions=20, reward=20),
            "t1": Record(sessions=20, reward=10),
            "t2": Record(sessions=20),
        }
    )
    draws = TaskDraws(tasks(3), history, seed=0, curriculum="learnable")
    drawn = Counter(draws.draw(n).task_id for n in range(500))

    assert drawn["t1"] > 2 * max(drawn["t0"], drawn["t2"])
    assert min(drawn["t0"], drawn["t2"]) > 20
    assert draws.draw(5) == draws.draw(5)


def test_a_history_counts_what_groups_came_to_and_survives_json():
    history = History()
    history.add(group(session(1.0, trace([1], [2])), session(0.0, trace([1], [2])), task_id="a"))
    history.add(group(session(1.0, trace([1], [2])), session(None), task_id="a"))

    record = History.of(history.json()).records["a"]
    assert record == Record(groups=2, sessions=3, reward=2.0, flat=1, unknown=1)
    assert record.success == pytest.approx(2.5 / 4)


def test_a_set_without_tasks_or_with_one_id_twice_is_refused():
    with pytest.raises(ConfigError, match="no tasks"):
        TaskDraws([], History(), seed=0)
    with pytest.raises(ConfigError, match="two tasks"):
        TaskDraws([*tasks(1), *tasks(1)], History(), seed=0)


def test_a_task_of_a_checkpoint_that_is_gone_is_named():
    draws = TaskDraws(tasks(1), History(), seed=0)
    assert draws.named("t0").task_id == "t0"
    with pytest.raises(ConfigError, match="'gone', which is not there"):
        draws.named("gone")
