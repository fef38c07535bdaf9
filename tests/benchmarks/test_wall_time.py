"""The engine's busy share of the benchmark of wall time."""

from benchmarks.wall_time import busy
from hypothesis import given
from hypothesis import strategies as st

TIMES = st.integers(0, 20)


@given(st.lists(st.tuples(TIMES, TIMES).map(sorted)), TIMES, TIMES)
def test_engine_busy_time_is_the_seconds_with_a_call_in_flight(calls, began, ended):
    seconds = [at for at in range(began, ended) if any(a <= at < b for a, b in calls)]
    assert busy([(float(a), float(b)) for a, b in calls], began, ended) == len(seconds)
