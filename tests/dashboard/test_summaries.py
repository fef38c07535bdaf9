"""Groups, filters and totals of sessions, the overview page, training curves."""

from __future__ import annotations

import pytest

from bridle.dashboard.summaries import (
    NEWEST,
    RunFacts,
    SampleGroup,
    SessionFilter,
    SessionRow,
    TrajectoryFacts,
    ends_over_time,
    failures_of,
    groups_of,
    last_attempts,
    most_different,
    overview_of,
    set_of,
    sort_rows,
    statuses_of,
    training_of,
)


def line(number, status="COMPLETED", **more):
    return SessionRow(f"s{number}", ".", task_id="t", sample_index=number, status=status, **more)


def test_advantages_are_relative_to_the_group_and_ignore_unknown_rewards():
    group = SampleGroup("t", [line(2), line(0, reward=1.0), line(1, reward=0.0)])

    assert [sample.advantage for sample in group.samples] == [1.0, -1.0, None]
    assert group.mean == 0.5
    assert group.deviation == 0.5
    assert not group.is_flat


def test_a_group_of_equal_rewards_is_flat():
    assert SampleGroup("t", [line(0, reward=1.0), line(1, reward=1.0)]).is_flat
    assert not SampleGroup("t", [line(0, reward=1.0)]).is_flat
    assert SampleGroup("t", [line(0)]).mean is None


def test_sample_groups_are_formed_per_run_and_task_newest_first():
    old = SessionRow("a", "one", task_id="t", opened_at=1.0)
    new = SessionRow("b", "two", task_id="t", opened_at=2.0)

    assert [group.run for group in groups_of([old, new])] == ["two", "one"]


def test_only_the_last_attempt_of_a_repeated_session_counts():
    names = ("t.0.r3", "t.0", "t.0.r2", "t.1", "t.2.r10", "t.2.r9", "odd.r2")
    lines = [SessionRow(name, ".", task_id="t") for name in names]

    assert [line.session_id for line in last_attempts(lines)] == [
        *("t.0.r3", "t.1", "t.2.r10", "odd.r2"),
    ]
    assert len(groups_of(lines)[0].lines) == 4


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (SessionFilter(), ["s0", "s1", "s2"]),
        (SessionFilter(status="failed"), ["s1", "s2"]),
        (SessionFilter(status="TIMEOUT"), ["s2"]),
        (SessionFilter(cause="evaluator"), ["s1"]),
        (SessionFilter(text="BROKE"), ["s1"]),
        (SessionFilter(task="u"), []),
        (SessionFilter(harness="pi", run="."), ["s0"]),
    ],
)
def test_session_filter_selects_by_status_cause_text_task_and_harness(wanted, names):
    lines = [
        line(0, harness="pi"),
        line(1, "ERROR", cause="evaluator", error="it broke"),
        line(2, "TIMEOUT", cause="timeout"),
    ]

    assert [one.session_id for one in filter(wanted.takes, lines)] == names


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("reward", ["s2", "s1", "s3"]),
        ("-reward", ["s1", "s2", "s3"]),
        ("session", ["s1", "s2", "s3"]),
        ("-opened", ["s3", "s2", "s1"]),
        ("", ["s3", "s2", "s1"]),
        ("no such column", ["s3", "s2", "s1"]),
    ],
)
def test_rows_are_sorted_by_a_column_with_unknown_values_last(sort, order):
    rows = [line(n, reward=reward, opened_at=n) for n, reward in ((1, 1.0), (2, 0.0), (3, None))]

    assert [row.session_id for row in sort_rows(rows, sort)] == order


def test_counterpart_of_a_sample_has_the_most_different_reward_in_its_group():
    rows = [line(n, reward=reward) for n, reward in ((1, 1.0), (2, 0.5), (3, 0.0))]
    group = SampleGroup("t", rows)

    assert [group.counterpart(row) for row in rows] == [rows[2], rows[0], rows[0]]
    assert SampleGroup("t", rows[:1]).counterpart(rows[0]) is None


def test_most_different_task_is_chosen_among_tasks_with_rewards_in_both_sets():
    def row(name, task, reward):
        return SessionRow(name, ".", task_id=task, reward=reward)

    one = [row("a0", "a", 1.0), row("a1", "a", 0.0), row("b0", "b", 1.0), row("c0", "c", 0.5)]
    two = [row("a2", "a", 1.0), row("a3", "a", None), row("b1", "b", None), row("c1", "c", 0.25)]
    found = most_different(set_of("one", one), set_of("two", two))

    assert found == ("a", one[1], two[0])  # b failed in two, which is no reward of 0
    assert most_different(set_of("two", two), set_of("one", one)) == ("a", two[0], one[1])
    assert most_different(set_of("one", one[2:3]), set_of("two", two)) is None


def test_failures_are_counted_by_cause_most_frequent_first():
    lines = [line(n, "ERROR", cause="evaluator", ended_at=n) for n in range(4)]
    lines += [line(9, "TIMEOUT"), line(10)]

    found = failures_of(lines)

    assert [(one.cause, one.count) for one in found] == [("evaluator", 4), ("timeout", 1)]
    assert [one.session_id for one in found[0].latest] == ["s3", "s2", "s1"]


def test_statuses_are_listed_in_a_fixed_order():
    lines = [line(0, "RUNNING"), line(1, "ODD"), line(2), line(3, "ERROR"), line(4)]

    assert list(statuses_of(lines).items()) == [
        ("COMPLETED", 2), ("ERROR", 1), ("RUNNING", 1), ("ODD", 1),
    ]  # fmt: skip


def test_every_ended_session_is_in_one_column_of_the_time_chart():
    lines = [line(n, ended_at=float(n)) for n in range(10)]
    lines += [line(10, "ERROR", ended_at=9.0), line(11)]

    columns = ends_over_time(lines, columns=3)

    assert sum(done for _, done, _ in columns) == 10
    assert columns[-1][2] == 1
    assert ends_over_time(lines[:1]) == []


def test_session_duration_ends_at_its_end_or_its_last_record():
    assert line(0, opened_at=1.0, ended_at=4.0).seconds == 3.0
    assert line(0, opened_at=1.0, last_at=2.0).seconds == 1.0
    assert line(0).seconds is None


STATS = {
    "exchanges": 2, "traces": 1, "tokens_captured": 30, "tokens_trained": 20,
    "tokens_excluded": {"cut": 10}, "breaks": [], "drift": {"exact": 1}, "merge_ratio": 1.0,
}  # fmt: skip


def seen_of(lines, runs, trainings, *, now):
    return overview_of(lines, runs, trainings, now=now)


def ended(number, at, **more):
    values = {"status": "COMPLETED", "opened_at": at - 1, "ended_at": at, "sampled": 30}
    return SessionRow(f"s{number}", ".", task_id=f"t{number % 2}", **(values | more))


def test_token_balance_is_summed_over_measured_sessions():
    measured = TrajectoryFacts(STATS, (3, 5), 2)

    seen = seen_of([ended(0, 10, measured=measured), ended(1, 11)], [], [], now=12.0)

    assert seen.report.captured == 30
    assert seen.report.trained + sum(seen.report.excluded.values()) == 30
    assert seen.report.sessions == 1
    assert seen.versions == (3, 5)
    assert seen_of([ended(1, 11)], [], [], now=12.0).report is None


def test_rate_is_recent_while_sessions_end_and_overall_afterwards():
    lines = [ended(n, 1000.0 + 10 * n) for n in range(200)]

    live = seen_of(lines, [], [], now=3000.0).rate
    over = seen_of(lines, [], [], now=9000.0).rate

    assert live.live
    assert not over.live
    assert abs(live.sessions_per_minute - 6) < 0.2
    assert abs(over.sessions_per_minute - 6) < 0.1
    assert abs(over.tokens_per_second - 3) < 0.1
    assert seen_of([], [], [], now=1.0).rate is None


def test_expected_session_count_is_unknown_if_any_run_lacks_one():
    known, unknown = RunFacts("a", finished=False, expected=4), RunFacts("b", finished=False)

    assert seen_of([], [known], [], now=0.0).expected == 4
    assert seen_of([], [known, unknown], [], now=0.0).expected is None


def test_a_group_counts_as_ended_when_its_last_session_has_ended():
    lines = [ended(0, 5), ended(1, 5), SessionRow("x", ".", task_id="t1", opened_at=1.0)]

    seen = seen_of(lines, [], [], now=6.0)

    assert seen.groups == {"ended": 1, "running": 1}
    assert seen.total == 3


def test_list_of_newest_sessions_is_limited():
    assert len(seen_of([ended(n, n) for n in range(50)], [], [], now=60.0).newest) == NEWEST


STEP = {
    "step": 1,
    "reward": 0.25,
    "waited_s": 3.0,
    "published_s": 0.1,
    "update": {"logprob_error": 1e-6, "lags": {"0": 10, "2": 30}, "norm": 0.5, "seconds": 2.0},
}


def answer(course):
    return training_of(".", course)


def curves(training):
    return {curve.name: list(curve.values) for chart in training.curves.values() for curve in chart}


def test_training_steps_and_evaluations_share_the_step_axis_of_charts():
    course = {
        "steps": [STEP, {"step": 2, "reward": None, "update": None}],
        "evaluations": [{"step": 0, "reward": 0.1}, {"step": 2, "reward": 0.6}],
    }

    found = answer(course)

    assert found.steps == [0, 1, 2]
    assert curves(found)["reward"] == [None, 0.25, None]
    assert curves(found)["held_out"] == [0.1, None, 0.6]
    assert curves(found)["logprob_error"] == [None, 1e-6, None]
    assert curves(found)["lag"] == [None, 1.5, None]
    assert found.held_out == [(0, 0.1), (2, 0.6)]
    assert found.rows[0][0] == 2
    assert len(found.labels) == len(found.rows[0][1])


def test_a_chart_without_a_number_is_left_out():
    found = answer({"steps": [{"step": 1, "reward": 1.0}], "evaluations": []})

    assert [chart["curves"][0]["name"] for chart in found.charts] == ["reward"]


def test_a_malformed_course_is_read_as_none():
    assert answer({}) is None
    assert answer({"steps": 3, "evaluations": []}) is None
    assert answer({"steps": [], "evaluations": []}).charts == []
