from tests.server.house import submission
from tests.server.test_finalize import failed
from tests.server.test_store import NOW, a_state, claim, done, submit

from bridle.server.queries import is_final
from bridle.server.schemas import CallbackState, TaskState


async def end(state, *names):
    """End the one session of each of these tasks, in this order."""
    claims = {one.task_id: one for one in await claim(state)}
    for name in names:
        await state.finish(done(claims[name]), owner="me", now=NOW)


async def names(state, **query):
    return [
        row["task_id"] for row in await state.queries.groups(**{"after": 0, "limit": 9, **query})
    ]


async def test_groups_are_ordered_by_end_submission_or_priority(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(
            state,
            submission("a"),
            submission("b", dispatch_priority=5),
            submission("c"),
            submission("d"),
        )
        await end(state, "c", "a", "b")
        assert await names(state) == ["c", "a", "b"]
        assert await names(state, order="submitted") == ["a", "b", "c"]
        assert await names(state, order="priority") == ["b", "c", "a"]
        assert await names(state, after=1) == ["a", "b"]
        assert await names(state, limit=1) == ["c"]


async def test_submission_order_waits_for_earlier_groups(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, *(submission(name) for name in "abc"))
        await end(state, "a", "c")
        assert await names(state, order="submitted") == ["a"]


async def test_acknowledged_groups_come_only_when_asked_for(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"), submission("b"))
        await end(state, "a", "b")
        await state.ack(cursor=None, task_ids=["a"], now=NOW)
        assert await names(state) == ["b"]
        assert await names(state, acked=True) == ["a", "b"]


async def test_next_page_begins_after_the_cursor(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, *(submission(name, 3) for name in "abc"))
        first = await state.queries.tasks(after=0, limit=2)
        rest = await state.queries.tasks(after=first[-1]["seq"], limit=2)
        assert [row["task_id"] for row in [*first, *rest]] == ["a", "b", "c"]
        await claim(state, 3)
        sessions = await state.queries.sessions(first[0]["seq"], after=0, limit=1)
        assert [row["session_id"] for row in sessions] == ["a.1"]
        assert await state.queries.sessions(first[0]["seq"], final=True) == []
        queued = await state.queries.tasks(after=0, limit=9, state=TaskState.QUEUED)
        assert [row["task_id"] for row in queued] == ["b", "c"]


async def test_counts_report_tasks_sessions_callbacks_and_groups_by_state(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", callback_url="http://h/x"), submission("b", 2))
        one, two = await claim(state, 2)
        await state.finish(failed(one), owner="me", now=NOW)
        counts = await state.queries.counts()
        assert counts.tasks == {"failed": 1, "running": 1}
        assert counts.sessions == {"ERROR": 1, "RUNNING": 1}
        assert (counts.waiting, counts.unacked) == (1, 1)
        assert counts.callbacks == {"pending": 2}
        assert await state.queries.inflight_groups() == {"o": 1}
        assert await state.queries.unacked_groups() == {"o": 1}
        assert await state.queries.started_groups() == 2
        running = await state.queries.running_since(1)
        assert [row["session_id"] for row in running] == [two.session_id]
        assert is_final(await state.queries.task("a"))
        assert not is_final(await state.queries.task("b"))
        assert await state.queries.file_bytes() == 0


async def test_callbacks_are_due_in_their_order(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", callback_url="http://h/x"))
        assert await state.queries.next_callback() is None
        await end(state, "a")
        first, last = await state.queries.due_callbacks(now=NOW, limit=9)
        assert (first["session_id"], last["session_id"]) == ("a.0", None)
        later = {"tries": 1, "fault": "500", "dead": False, "now": NOW, "next_at": NOW + 5}
        await state.record_attempt(first["delivery_id"], **later)
        due = await state.queries.due_callbacks(now=NOW, limit=9)
        assert [row["session_id"] for row in due] == [None]
        assert await state.queries.next_callback() == NOW
        await state.record_attempt(last["delivery_id"], **(later | {"dead": True}))
        dead = await state.queries.callbacks(after=0, limit=9, state=CallbackState.DEAD)
        assert [row["error"] for row in dead] == ["500"]
        assert await state.replay(None, now=NOW) == 1
        assert await state.replay(first["delivery_id"], now=NOW) == 0
