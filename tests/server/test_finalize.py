"""Tests of the ends of groups: early, short, refilled, cancelled; and the accounts in any order."""

import itertools
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.house import submission
from tests.server.test_store import NOW, a_state, claim, done, submit

from bridle.server.finalize import MAX_INTERRUPTIONS, delivery_id
from bridle.server.schemas import EndedRun, SessionState, TaskState
from bridle.types import Cause

NUMBERS = itertools.count()
"""Examples share a database where the suite is PostgreSQL's."""

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["complete", "fail", "break", "claim", "cancel", "interrupt"]),
        st.integers(0, 7),
    ),
    max_size=25,
)


def failed(one, cause=Cause.HARNESS_CRASH):
    result = {"error": "it broke"}
    return EndedRun(one.session_id, one.attempt, "ERROR", cause, usable=False, result=result)


async def finish(state, *ends):
    return [await state.finish(one, owner="me", now=NOW) for one in ends]


async def states(state, task_id):
    task = await state.queries.task(task_id)
    rows = await state.queries.sessions(task["seq"])
    return task, {row["session_id"]: row["state"] for row in rows}


async def test_harness_failure_is_final_and_infrastructure_failure_is_retried(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2, max_attempts=2))
        first, second = await claim(state)
        ends = await finish(state, failed(first), failed(second, Cause.INFRASTRUCTURE))
        assert [one.what for one in ends] == ["final", "again"]
        (again,) = await claim(state)
        (last,) = await finish(state, failed(again, Cause.INFRASTRUCTURE))
        assert (last.what, last.task_id) == ("final", "a")
        row = await state.queries.session("a.1")
        assert (row["attempt"], '"why":"failed"' in row["earlier"]) == (2, True)
        assert (await state.queries.task("a"))["state"] == TaskState.FAILED


async def test_a_timeout_of_a_bridle_stage_is_retried_and_an_agent_timeout_is_not(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2, max_attempts=2))
        ours, agents = await claim(state)
        slow = replace(failed(agents, Cause.TIMEOUT), status="TIMEOUT")
        ends = await finish(state, failed(ours, Cause.TIMEOUT), slow)
        assert [one.what for one in ends] == ["again", "final"]


async def test_early_stop_cancels_running_and_unstarted_sessions(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 6, early_stop_min_usable_sessions=2))
        one, two, three, four = await claim(state, 4)
        await finish(state, done(one), failed(three))
        (stopped,) = await finish(state, done(two))
        assert stopped.run_ids == (four.run_id,)
        assert await claim(state) == []
        cancelled = EndedRun("a.3", 1, "CANCELLED", Cause.CANCELLED, usable=False, result={})
        (last,) = await finish(state, cancelled)
        assert last.task_id == "a"
        task, sessions = await states(state, "a")
        assert (task["state"], task["stopped"], task["usable"]) == ("completed", "early_stop", 2)
        assert list(sessions.values()) == [
            *("COMPLETED", "COMPLETED", "ERROR", "CANCELLED", "CANCELLED", "CANCELLED"),
        ]


async def test_a_group_completes_only_with_its_min_completed_fraction(tmp_path):
    async with a_state(tmp_path) as state:
        for name, fraction in (("a", 0.5), ("b", 0.51), ("c", 0.0)):
            await submit(state, submission(name, 2, min_completed_fraction=fraction))
        for one in await claim(state):
            await finish(state, done(one) if one.sample_index else failed(one))
        found = [(await state.queries.task(name))["state"] for name in "abc"]
        assert found == ["completed", "failed", "completed"]


async def test_unusable_sessions_are_refilled_up_to_max_refills(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2, max_refills=2))
        one, two = await claim(state)
        await finish(state, failed(one), done(two))
        (refill,) = await claim(state)
        assert refill.session_id == "a.2"
        await finish(state, failed(refill))
        (last,) = await claim(state)
        (end,) = await finish(state, failed(last))
        assert end.task_id == "a"
        task, _ = await states(state, "a")
        assert (task["samples"], task["target"], task["ended"], task["usable"]) == (2, 4, 4, 1)


async def test_a_cancelled_task_ends_when_its_last_run_does(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 3), submission("queued", 2))
        one, two = await claim(state, 2)
        await finish(state, failed(two, Cause.INFRASTRUCTURE))  # waits to be run again
        stopped = await state.stop_task("a", "cancelled", now=NOW)
        assert (stopped.run_ids, stopped.task_id) == ((one.run_id,), None)
        (end,) = await finish(state, done(one))
        assert end.task_id == "a"
        task, sessions = await states(state, "a")
        assert task["state"] == TaskState.CANCELLED
        assert list(sessions.values()) == ["COMPLETED", "CANCELLED", "CANCELLED"]
        assert (await state.stop_task("a", "cancelled", now=NOW)).what == "lost"
        assert (await state.stop_task("queued", "cancelled", now=NOW)).task_id == "queued"
        assert await state.stop_task("nobody", "cancelled", now=NOW) is None


async def test_stopping_a_waiting_session_cancels_only_that_session_at_once(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        one, two = await claim(state)
        await finish(state, failed(two, Cause.INFRASTRUCTURE))
        running = await state.stop_session("a.0", "cancelled", now=NOW)
        assert (running.what, running.run_ids) == ("lost", ("a.0",))
        assert (await state.stop_session("a.1", "cancelled", now=NOW)).what == "final"
        assert (await finish(state, done(one)))[0].task_id == "a"


async def test_a_session_whose_server_or_node_is_lost_20_times_fails(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"))
        for _ in range(MAX_INTERRUPTIONS):
            (one,) = await claim(state)
            ended = await state.put_back(
                one.session_id, one.attempt, owner="me", why="interrupted", now=NOW
            )
        assert ended.task_id == "a"
        result = (await state.queries.session("a.0"))["result"]
        assert "interrupted 20 times: each time its server or its node was lost" in result


async def test_callback_row_is_inserted_with_each_result_and_keeps_its_id(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2, callback_url="http://127.0.0.1:9/x"))
        await finish(state, *(done(one) for one in await claim(state)))
        rows = await state.queries.callbacks(after=0, limit=9)
        assert [row["session_id"] for row in rows] == ["a.0", "a.1", None]
        assert [row["delivery_id"] for row in rows] == [
            delivery_id("a", session) for session in ("a.0", "a.1", None)
        ]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=12
)
@given(
    EVENTS,
    st.integers(1, 4),
    st.integers(0, 2),
    st.none() | st.integers(1, 3),
)
async def test_every_sample_ends_exactly_once(tmp_path_factory, events, samples, refills, early):
    """The law of the room: accounts add up at every step, and everything comes to its end."""
    async with a_state(tmp_path_factory.mktemp("law")) as state:
        name = f"t{next(NUMBERS)}"
        task = submission(
            name, samples, max_refills=refills, max_attempts=2, early_stop_min_usable_sessions=early
        )
        await submit(state, task)
        running, finals = {}, []

        async def apply(what, which):
            if what == "claim":
                claims = await claim(state, 1 + which % 2)
                running.update({one.run_id: one for one in claims})
            elif what == "cancel":
                await state.stop_task(name, "cancelled", now=NOW)
            elif running:
                one = running.pop(sorted(running)[which % len(running)])
                if what == "interrupt":
                    ended = await state.put_back(
                        one.session_id, one.attempt, owner="me", why="interrupted", now=NOW
                    )
                else:
                    cause = Cause.INFRASTRUCTURE if what == "break" else Cause.HARNESS_CRASH
                    end = done(one) if what == "complete" else failed(one, cause)
                    ended = (await finish(state, end))[0]
                assert ended.what != "lost"
                finals.append(ended.task_id)

        for what, which in events:
            await apply(what, which)
            row = await state.queries.task(name)
            sessions = await state.queries.sessions(row["seq"])
            over = [one for one in sessions if one["ended_at"] is not None]
            assert row["ended"] == len(over)
            assert row["expanded"] == len(sessions)
            assert row["usable"] == sum(one["usable"] for one in sessions)
        for _ in range(100):
            await apply("claim", 1)
            if not running:
                break
            await apply("complete", 0)
        row, sessions = await states(state, name)
        assert TaskState(row["state"]) in (
            TaskState.COMPLETED,
            TaskState.FAILED,
            TaskState.CANCELLED,
        )
        assert len(sessions) == row["target"] >= samples
        assert not {SessionState.QUEUED, SessionState.RUNNING} & set(sessions.values())
        assert sum(one is not None for one in finals) <= 1
        assert row["done_seq"] is not None


async def test_a_group_that_is_not_handed_out_counts_as_acknowledged_at_its_end(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", hand_out=False), submission("b"))
        await finish(state, *(done(one) for one in await claim(state)))
        assert (await state.queries.task("a"))["acked_at"] == NOW
        handed = await state.queries.groups(after=0, limit=9)
        assert [row["name"] for row in handed] == ["b"]
        assert (await state.queries.counts()).unacked == 1
        assert await submit(state, submission("a", hand_out=False)) == [False]
