"""Lists: groups, filters, failures, ends over time."""

import pytest

from bridle.dashboard.lines import (
    Group,
    Line,
    Wanted,
    ends_over_time,
    failures_of,
    groups_of,
    last_attempts,
    statuses_of,
)


def line(number, status="COMPLETED", **more):
    return Line(f"s{number}", ".", task_id="t", sample_index=number, status=status, **more)


def test_advantages_are_against_the_group_and_unknown_rewards_take_no_part():
    group = Group("t", [line(2), line(0, reward=1.0), line(1, reward=0.0)])

    assert [sample.advantage for sample in group.samples] == [1.0, -1.0, None]
    assert group.mean == 0.5
    assert group.deviation == 0.5
    assert not group.is_flat


def test_a_group_of_equal_rewards_is_flat():
    assert Group("t", [line(0, reward=1.0), line(1, reward=1.0)]).is_flat
    assert not Group("t", [line(0, reward=1.0)]).is_flat
    assert Group("t", [line(0)]).mean is None


def test_groups_are_by_run_and_task_newest_first():
    old = Line("a", "one", task_id="t", opened_at=1.0)
    new = Line("b", "two", task_id="t", opened_at=2.0)

    assert [group.run for group in groups_of([old, new])] == ["two", "one"]


def test_of_a_session_that_was_run_again_the_last_run_counts():
    names = ("t.0.r3", "t.0", "t.0.r2", "t.1", "t.2.r10", "t.2.r9", "odd.r2")
    lines = [Line(name, ".", task_id="t") for name in names]

    assert [line.session_id for line in last_attempts(lines)] == [
        *("t.0.r3", "t.1", "t.2.r10", "odd.r2"),
    ]
    assert len(groups_of(lines)[0].lines) == 4


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(), ["s0", "s1", "s2"]),
        (Wanted(status="failed"), ["s1", "s2"]),
        (Wanted(status="TIMEOUT"), ["s2"]),
        (Wanted(cause="evaluator"), ["s1"]),
        (Wanted(text="BROKE"), ["s1"]),
        (Wanted(task="u"), []),
        (Wanted(harness="pi", run="."), ["s0"]),
    ],
)
def test_a_list_shows_what_is_wanted(wanted, names):
    lines = [
        line(0, harness="pi"),
        line(1, "ERROR", cause="evaluator", error="it broke"),
        line(2, "TIMEOUT", cause="timeout"),
    ]

    assert [one.session_id for one in filter(wanted.takes, lines)] == names


def test_failures_are_by_cause_the_most_frequent_first():
    lines = [line(n, "ERROR", cause="evaluator", ended_at=n) for n in range(4)]
    lines += [line(9, "TIMEOUT"), line(10)]

    found = failures_of(lines)

    assert [(one.cause, one.count) for one in found] == [("evaluator", 4), ("timeout", 1)]
    assert [one.session_id for one in found[0].latest] == ["s3", "s2", "s1"]


def test_statuses_have_one_order():
    lines = [line(0, "RUNNING"), line(1, "ODD"), line(2), line(3, "ERROR"), line(4)]

    assert list(statuses_of(lines).items()) == [
        ("COMPLETED", 2), ("ERROR", 1), ("RUNNING", 1), ("ODD", 1),
    ]  # fmt: skip


def test_every_end_is_in_one_column():
    lines = [line(n, ended_at=float(n)) for n in range(10)]
    lines += [line(10, "ERROR", ended_at=9.0), line(11)]

    columns = ends_over_time(lines, columns=3)

    assert sum(done for _, done, _ in columns) == 10
    assert columns[-1][2] == 1
    assert ends_over_time(lines[:1]) == []


def test_a_session_took_until_its_end_or_until_it_was_last_heard_of():
    assert line(0, opened_at=1.0, ended_at=4.0).seconds == 3.0
    assert line(0, opened_at=1.0, last_at=2.0).seconds == 1.0
    assert line(0).seconds is None
