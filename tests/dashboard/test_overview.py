"""The first page's numbers."""

from bridle.dashboard.lines import Line, Measured
from bridle.dashboard.overview import NEWEST, overview_of
from bridle.dashboard.runs import Facts

STATS = {
    "exchanges": 2, "traces": 1, "tokens_captured": 30, "tokens_trained": 20,
    "tokens_excluded": {"cut": 10}, "breaks": [], "drift": {"exact": 1}, "merge_ratio": 1.0,
}  # fmt: skip


def seen_of(lines, runs, trainings, *, now):
    return overview_of(lines, runs, trainings, now=now)


def ended(number, at, **more):
    values = {"status": "COMPLETED", "opened_at": at - 1, "ended_at": at, "sampled": 30}
    return Line(f"s{number}", ".", task_id=f"t{number % 2}", **(values | more))


def test_law_2_is_added_up_over_what_is_measured():
    measured = Measured(STATS, (3, 5), 2)

    seen = seen_of([ended(0, 10, measured=measured), ended(1, 11)], [], [], now=12.0)

    assert seen.report.captured == 30
    assert seen.report.trained + sum(seen.report.excluded.values()) == 30
    assert seen.report.sessions == 1
    assert seen.versions == (3, 5)
    assert seen_of([ended(1, 11)], [], [], now=12.0).report is None


def test_the_rate_is_that_of_the_last_time_while_sessions_end():
    lines = [ended(n, 1000.0 + 10 * n) for n in range(200)]

    live = seen_of(lines, [], [], now=3000.0).rate
    over = seen_of(lines, [], [], now=9000.0).rate

    assert live.live
    assert not over.live
    assert abs(live.sessions_per_minute - 6) < 0.2
    assert abs(over.sessions_per_minute - 6) < 0.1
    assert abs(over.tokens_per_second - 3) < 0.1
    assert seen_of([], [], [], now=1.0).rate is None


def test_what_is_expected_is_known_when_every_run_knows_it():
    known, unknown = Facts("a", finished=False, expected=4), Facts("b", finished=False)

    assert seen_of([], [known], [], now=0.0).expected == 4
    assert seen_of([], [known, unknown], [], now=0.0).expected is None


def test_groups_end_with_their_last_session():
    lines = [ended(0, 5), ended(1, 5), Line("x", ".", task_id="t1", opened_at=1.0)]

    seen = seen_of(lines, [], [], now=6.0)

    assert seen.groups == {"ended": 1, "under way": 1}
    assert seen.total == 3


def test_the_newest_are_few():
    assert len(seen_of([ended(n, n) for n in range(50)], [], [], now=60.0).newest) == NEWEST
