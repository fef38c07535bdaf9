import pytest

from bridle.server.states import (
    DELIVERIES,
    FINAL_SESSIONS,
    FINAL_TASKS,
    SESSIONS,
    TASKS,
    DeliveryState,
    SessionState,
    TaskState,
    step,
)


@pytest.mark.parametrize(
    ("table", "states"),
    [(TASKS, TaskState), (SESSIONS, SessionState), (DELIVERIES, DeliveryState)],
)
def test_every_state_has_its_row(table, states):
    assert set(table) == set(states)


def test_final_states_lead_nowhere_but_to_completed_by_a_reward():
    failed = {TaskState.FAILED: {TaskState.COMPLETED}, SessionState.ERROR: {SessionState.COMPLETED}}
    assert all(TASKS[state] == failed.get(state, set()) for state in FINAL_TASKS)
    assert all(SESSIONS[state] == failed.get(state, set()) for state in FINAL_SESSIONS)


def test_every_state_can_be_left_towards_a_final_one():
    for table, final in ((TASKS, FINAL_TASKS), (SESSIONS, FINAL_SESSIONS)):
        reached = set(final)
        for _ in table:
            reached |= {state for state, after in table.items() if after & reached}
        assert reached == set(table)


def test_a_step_that_the_table_lacks_is_an_error():
    assert step(SESSIONS, SessionState.RUNNING, SessionState.QUEUED) is SessionState.QUEUED
    assert step(TASKS, TaskState.RUNNING, TaskState.RUNNING) is TaskState.RUNNING
    with pytest.raises(AssertionError, match="COMPLETED does not lead to RUNNING"):
        step(SESSIONS, SessionState.COMPLETED, SessionState.RUNNING)
