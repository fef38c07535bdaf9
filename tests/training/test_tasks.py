"""Draws are functions of seed, number and history."""

from collections import Counter

import pytest
from tests.training.made import group, session, trace

from bridle.config import Task
from bridle.errors import ConfigError
from bridle.training.groups import History, Record, TaskDraws


def tasks(count):
    return [Task(task_id=f"t{n}", instruction="go") for n in range(count)]


def test_every_task_is_drawn_once_per_epoch_in_an_order_set_by_the_seed():
    draws = TaskDraws(tasks(7), History(), seed=3)
    ids = [draws.draw(n).task_id for n in range(14)]

    assert sorted(ids[:7]) == sorted(ids[7:]) == [f"t{n}" for n in range(7)]
    assert ids[:7] != ids[7:]
    assert [TaskDraws(tasks(7), History(), seed=3).draw(n).task_id for n in range(14)] == ids
    assert [TaskDraws(tasks(7), History(), seed=4).draw(n).task_id for n in range(14)] != ids


def test_curriculum_learnable_draws_learnable_tasks_more_often_and_all_sometimes():
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


def test_a_task_history_counts_group_outcomes_and_survives_a_json_round_trip():
    history = History()
    history.add(group(session(1.0, trace([1], [2])), session(0.0, trace([1], [2])), task_id="a"))
    history.add(group(session(1.0, trace([1], [2])), session(None), task_id="a"))

    record = History.of(history.json()).records["a"]
    assert record == Record(groups=2, sessions=3, reward=2.0, flat=1, unknown=1)
    assert record.success == pytest.approx(2.5 / 4)


def test_an_empty_task_set_and_duplicate_task_ids_are_refused():
    with pytest.raises(ConfigError, match="no tasks"):
        TaskDraws([], History(), seed=0)
    with pytest.raises(ConfigError, match="two tasks"):
        TaskDraws([*tasks(1), *tasks(1)], History(), seed=0)


def test_a_checkpoint_s_task_that_is_missing_is_named():
    draws = TaskDraws(tasks(1), History(), seed=0)
    assert draws.named("t0").task_id == "t0"
    with pytest.raises(ConfigError, match="'gone', which is not among the given tasks"):
        draws.named("gone")
