import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from bridle.config import Task
from bridle.server.schemas import (
    CALLBACK_TRANSITIONS,
    FINAL_SESSIONS,
    FINAL_TASKS,
    SESSION_TRANSITIONS,
    TASK_TRANSITIONS,
    CallbackState,
    Claim,
    EndedRun,
    SessionState,
    TaskState,
    metadata,
    run_id,
    session_id,
    step,
)
from bridle.server.storage import Database


async def test_migrations_create_exactly_the_tables_of_the_schema(tmp_path):
    """Compared by alembic, both ways: nothing is missing, nothing is left over."""
    async with await Database.open(tmp_path / "a.sqlite"):
        pass
    engine = create_engine(f"sqlite:///{tmp_path / 'a.sqlite'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


@pytest.mark.parametrize(
    ("table", "states"),
    [
        (TASK_TRANSITIONS, TaskState),
        (SESSION_TRANSITIONS, SessionState),
        (CALLBACK_TRANSITIONS, CallbackState),
    ],
)
def test_every_state_has_transitions(table, states):
    assert set(table) == set(states)


def test_final_states_change_only_to_completed_by_a_reward():
    failed = {TaskState.FAILED: {TaskState.COMPLETED}, SessionState.ERROR: {SessionState.COMPLETED}}
    assert all(TASK_TRANSITIONS[state] == failed.get(state, set()) for state in FINAL_TASKS)
    assert all(SESSION_TRANSITIONS[state] == failed.get(state, set()) for state in FINAL_SESSIONS)


def test_every_state_leads_to_a_final_one():
    for table, final in ((TASK_TRANSITIONS, FINAL_TASKS), (SESSION_TRANSITIONS, FINAL_SESSIONS)):
        reached = set(final)
        for _ in table:
            reached |= {state for state, after in table.items() if after & reached}
        assert reached == set(table)


def test_transition_missing_from_the_table_raises():
    assert (
        step(SESSION_TRANSITIONS, SessionState.RUNNING, SessionState.QUEUED) is SessionState.QUEUED
    )
    assert step(TASK_TRANSITIONS, TaskState.RUNNING, TaskState.RUNNING) is TaskState.RUNNING
    with pytest.raises(AssertionError, match="COMPLETED does not lead to RUNNING"):
        step(SESSION_TRANSITIONS, SessionState.COMPLETED, SessionState.RUNNING)


IDS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,199}\Z")


def test_the_first_run_has_the_id_of_its_session():
    assert run_id("t.0", 1) == "t.0"
    assert run_id("t.0", 3) == "t.0.r3"
    assert Claim("t.0", "t", 0, 2, "{}").run_id == "t.0.r2"


@given(IDS, st.integers(0, 10_000), st.integers(1, 30))
def test_run_ids_have_at_most_200_characters(task_id, index, attempt):
    Task(task_id=task_id, instruction="x")
    assert len(run_id(session_id(task_id, index), attempt)) <= 200


@given(IDS, IDS, st.integers(0, 20), st.integers(0, 20))
def test_session_ids_differ_for_different_tasks_or_samples(one, other, first, second):
    same = (one, first) == (other, second)
    assert (session_id(one, first) == session_id(other, second)) == same


def test_long_task_ids_give_distinct_session_ids():
    assert session_id("a" * 199 + "b", 0) != session_id("a" * 199 + "c", 0)


def test_error_of_an_ended_run_is_that_of_its_result():
    ended = EndedRun("s", 1, "ERROR", None, usable=False, result={"error": "why"})
    assert ended.error == "why"
