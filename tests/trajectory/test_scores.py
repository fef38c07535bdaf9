import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.trajectory.scores import Attempted, clustered_mean, from_summaries, pass_at_k, scores_of
from bridle.types import Cause


def attempted(reward=None, *, task="t", cause=None, status="COMPLETED", harness="pi", among="set"):
    return Attempted(among, harness, task, status, cause, reward)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    draws = list(combinations(outcomes, k))
    share = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(share)


def test_sessions_are_scored_by_harness_and_task_set():
    scores = scores_of(
        [
            *(attempted(reward, task="a") for reward in (1.0, 0.0, 0.0, 1.0)),
            *(attempted(reward, task="b") for reward in (0.0, 0.0)),
            attempted(1.0, harness="codex"),
            attempted(0.5, among="other"),
        ]
    )
    assert [(score.task_set, score.harness) for score in scores] == [
        ("other", "pi"), ("set", "codex"), ("set", "pi"),
    ]  # fmt: skip
    last = scores[-1]
    assert (last.tasks, last.sessions, last.attempts, last.scored) == (2, 6, 6, 6)
    assert last.pass_at == {1: 0.25, 2: pytest.approx((1 - 1 / 6) / 2), 4: 1.0}
    assert last.tasks_at == {1: 2, 2: 2, 4: 1}
    assert last.mean == pytest.approx(1 / 3)
    low, high = last.as_json()["interval"]
    assert (low + high) / 2 == pytest.approx(1 / 3)
    assert scores[0].pass_at == {1: 0.0}
    assert scores[0].half_width is None


@pytest.mark.parametrize(
    ("cause", "status", "counts"),
    [
        (Cause.HARNESS_CRASH, "ERROR", True),
        (Cause.HARNESS_NO_CALL, "ERROR", True),
        (Cause.HARNESS_MODEL_ERROR, "ERROR", True),
        (Cause.LIMIT, "TIMEOUT", True),
        (Cause.TIMEOUT, "TIMEOUT", True),
        (Cause.TIMEOUT, "ERROR", False),
        (Cause.INFRASTRUCTURE, "ERROR", False),
        (Cause.EVALUATOR, "ERROR", False),
        (Cause.CANCELLED, "CANCELLED", False),
    ],
)
def test_only_failures_caused_by_the_agent_count_as_attempts(cause, status, counts):
    (score,) = scores_of([attempted(1.0), attempted(cause=cause, status=status)])
    assert score.attempts == 1 + counts
    assert score.pass_at[1] == (0.5 if counts else 1.0)
    assert (score.mean, score.scored, score.causes) == (1.0, 1, {str(cause): 1})


def test_scores_without_an_attempt_have_no_pass_rate_and_no_mean():
    (score,) = scores_of([attempted(cause=Cause.EVALUATOR, status="ERROR")])
    assert (score.pass_at, score.mean) == ({}, None)
    assert score.as_json()["interval"] is None


def test_the_confidence_interval_clusters_samples_by_task():
    mean, width = clustered_mean([[1.0] * 50, [0.0] * 50])
    assert mean == 0.5
    assert width == pytest.approx(1.96 * 0.5, rel=1e-3)
    assert clustered_mean([[0.5], [0.5]]) == (0.5, 0.0)
    assert clustered_mean([]) == (None, None)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=1), min_size=2, max_size=30))
def test_the_clustered_interval_with_one_sample_per_task_is_the_plain_standard_error(clusters):
    values = [value for (value,) in clusters]
    mean, width = clustered_mean(clusters)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    assert width == pytest.approx(1.959964 * spread / math.sqrt(len(values)), rel=1e-6, abs=1e-9)


def test_scores_are_computed_from_a_run_s_summary_lines():
    line = {"harness": "pi", "task_id": "a", "status": "COMPLETED", "cause": None, "reward": 1.0}
    (score,) = scores_of(from_summaries([line, {**line, "reward": 0.0}]))
    assert score.as_json() == {
        "task_set": "-",
        "harness": "pi",
        "tasks": 1,
        "sessions": 2,
        "attempts": 2,
        "scored": 2,
        "reward_mean": 0.5,
        "interval": None,
        "pass_at": {"1": 0.5, "2": 1.0},
        "tasks_at": {"1": 1, "2": 1},
        "causes": {},
    }
