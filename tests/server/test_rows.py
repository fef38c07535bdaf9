from hypothesis import given
from hypothesis import strategies as st

from bridle.config import Task
from bridle.server.states import Claim, Ended, run_id, session_id

IDS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,199}\Z")


def test_the_first_run_has_the_id_of_its_session():
    assert run_id("t.0", 1) == "t.0"
    assert run_id("t.0", 3) == "t.0.r3"
    assert Claim("t.0", "t", 0, 2, "{}").run_id == "t.0.r2"


@given(IDS, st.integers(0, 10_000), st.integers(1, 30))
def test_the_id_of_a_run_can_be_one_of_a_session_at_the_gateway(task_id, index, attempt):
    Task(task_id=task_id, instruction="x")
    assert len(run_id(session_id(task_id, index), attempt)) <= 200


@given(IDS, IDS, st.integers(0, 20), st.integers(0, 20))
def test_two_sessions_never_have_one_id(one, other, first, second):
    same = (one, first) == (other, second)
    assert (session_id(one, first) == session_id(other, second)) == same


def test_tasks_with_a_long_common_beginning_stay_apart():
    assert session_id("a" * 199 + "b", 0) != session_id("a" * 199 + "c", 0)


def test_the_error_of_an_end_is_its_results():
    ended = Ended("s", 1, "ERROR", None, usable=False, result={"error": "why"})
    assert ended.error == "why"
