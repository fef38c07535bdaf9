"""Groups become rows; what must not train does not, and is counted."""

import numpy as np
import pytest
from tests.bridges.by_hand import CALLS, DONE, RESULT, Player, group, session, trace

from bridle.bridges.base import Shape, TaskTable, by_task, fit_trace, play, rows_of, turns_of
from bridle.config import Task
from bridle.errors import ConfigError

TASKS = [Task(task_id=name, instruction="go") for name in "ab"]


def test_every_trained_trace_is_a_row_and_row_weights_of_a_session_sum_to_1():
    nothing = trace("t2", loss_mask=trace().loss_mask * 0)
    groups = [group(session("a", 1.0, trace(), trace("t1"), nothing), session("b", 0.0, trace()))]
    rows, counts = rows_of(groups)
    assert [(row.sample, row.trace.trace_id, row.weight) for row in rows] == [
        (0, "t0", 0.5), (0, "t1", 0.5), (1, "t0", 1.0),
    ]  # fmt: skip
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0]
    assert rows[0].lags == (3, 4)
    assert counts.json("x") == {"x/sessions": 2, "x/rows": 3, "x/tokens_trained": 15}


def test_row_weights_are_proportional_to_trained_tokens():
    tiny = np.array([1, 0, 0, 0, 0, 0, 0], np.uint8)
    calls = [trace(f"own{number}", loss_mask=tiny) for number in range(100)]
    (work, *own), _ = rows_of([group(session("a", 1.0, trace("work"), *calls))])
    trained = int(work.mask.sum())
    assert work.weight == pytest.approx(trained / (trained + 100))
    assert sum(row.weight for row in (work, *own)) == pytest.approx(1.0)


def test_a_row_has_the_reward_of_its_trace_or_else_of_its_session():
    tokens = np.array([1, 1, 0, 0, 0, 0, 0.5], np.float32)
    traces = trace(), trace("t1", reward=0.25), trace("t2", token_rewards=tokens)
    rows, _ = rows_of([group(session("a", 1.0, *traces))])
    assert [row.reward for row in rows] == [1.0, 0.25, 2.5]


def test_a_session_without_a_reward_is_masked_and_gets_the_mean_of_its_group():
    (good, bad, unknown), counts = rows_of(
        [group(session("a", 1.0, trace()), session("b", 0.0, trace()), session("c", None, trace()))]
    )
    assert unknown.reward == 0.5 == np.mean([good.reward, bad.reward])
    assert not unknown.known
    assert not unknown.mask.any()
    assert not unknown.logprobs.any()
    assert counts.left_out == {"unknown": 1}


def test_a_session_without_trained_tokens_is_a_blank_row_when_blanks_are_on():
    groups = [group(session("a", 1.0, trace()), session("b", 0.0))]
    rows, counts = rows_of(groups, Shape(blanks=True))
    assert [row.trace.trace_id for row in rows] == ["t0", "b/blank"]
    assert rows[1].lags is None
    assert (len(rows[1].prompt_ids), len(rows[1].response_ids)) == (1, 1)
    assert counts.left_out == {"empty": 1}
    assert [row.trace.trace_id for row in rows_of(groups)[0]] == ["t0"]


@pytest.mark.parametrize(
    ("policy", "ids", "trained"),
    [("mask", [4, 5, 6, 7, 8], 0), ("truncate", [4, 5, 6, 7, 8], 3), ("drop", None, 0)],
)
def test_an_overlong_response_is_masked_cut_or_dropped_as_the_setting_says(policy, ids, trained):
    cut = fit_trace(
        trace(token_rewards=np.ones(7, np.float32)), Shape(max_response=5, overlong=policy)
    )
    assert (cut and cut.response_ids.tolist()) == ids
    if cut:
        assert cut.loss_mask.sum() == trained
        assert cut.turn_ends == (2, 5)
        assert cut.token_rewards is not None
        assert len(cut.token_rewards) == 5


def test_an_overlong_prompt_is_cut_at_its_beginning_and_its_row_is_masked():
    cut = fit_trace(trace(), Shape(max_prompt=2, overlong="truncate"))
    assert cut is not None
    assert cut.prompt_ids.tolist() == [2, 3]
    assert not cut.loss_mask.any()


def test_a_session_with_only_overlong_traces_is_a_blank_row_when_blanks_are_on():
    groups = [group(session("a", 1.0, trace()))]
    rows, counts = rows_of(groups, Shape(max_response=2, overlong="drop", blanks=True))
    assert [row.trace.trace_id for row in rows] == ["a/blank"]
    assert counts.left_out == {"overlong": 1}


def test_each_token_of_a_row_has_the_temperature_of_its_call():
    result = trace(metadata={"temperatures": [0.0, None]})
    rows, _ = rows_of([group(session("s", 1.0, result, trace()))])
    assert rows[0].temperatures.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert rows[1].temperatures.tolist() == [1.0] * 7
    (cut,), counts = rows_of(
        [group(session("s", 1.0, result))], Shape(max_response=1, overlong="truncate")
    )
    assert cut.temperatures.tolist() == [0]
    assert counts.left_out == {"overlong": 1}


def test_tasks_are_played_as_groups_in_order():
    player = Player(*(session(name, 1.0) for name in "wxyz"))
    groups = play(player, TASKS, 2)
    assert player.asked == [["a", "a", "b", "b"]]
    assert [(g.task_id, [s.session_id for s in g.sessions]) for g in groups] == [
        ("a", ["w", "x"]), ("b", ["y", "z"]),
    ]  # fmt: skip


def test_trajectories_are_grouped_by_task_id():
    groups = by_task([session("x", task="u"), session("y"), session("z", task="u")])
    assert [(g.task_id, len(g.sessions)) for g in groups] == [("u", 2), ("t", 1)]


def test_a_task_table_refuses_unknown_and_duplicate_task_ids():
    table = TaskTable(TASKS)
    assert table["a"] is TASKS[0]
    assert [*table] == TASKS
    with pytest.raises(ConfigError, match="'c', which is not in the task file"):
        table["c"]
    with pytest.raises(ConfigError, match="same task_id"):
        TaskTable([*TASKS, *TASKS])


def test_turns_of_a_trace_have_their_token_span_and_messages():
    first, second = turns_of(trace())
    assert (first.start, first.end, first.given, first.said) == (0, 2, (), (CALLS,))
    assert (second.start, second.end, second.given, second.said) == (4, 7, (RESULT,), (DONE,))
    assert second.exchange_id == "e1"


def test_turns_have_no_messages_when_messages_and_turns_do_not_match():
    turns = turns_of(trace(response_messages=[DONE, RESULT, DONE, RESULT, DONE]))
    assert [turn.said for turn in turns] == [(), ()]
