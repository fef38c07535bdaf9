"""The state alone: what is accepted, leased, given back, and how often."""

from contextlib import asynccontextmanager

import pytest
from tests.server.house import database_of, submission

from bridle.errors import ConfigError
from bridle.server.claiming import Room
from bridle.server.closing import ConflictError
from bridle.server.database import Database
from bridle.server.state import QuotaError, State
from bridle.server.states import Ended, SessionState, TaskState
from bridle.server.views import Views
from bridle.types import Cause

NOW = 1000.0


class Whole(State):
    """A state with its views."""

    def __init__(self, database):
        super().__init__(database)
        self.views = Views(database)


@asynccontextmanager
async def a_state(tmp_path):
    async with await Database.open(database_of(tmp_path)) as database:
        yield Whole(database)


async def claim(state, slots=10, *, groups=None, owner="me", now=NOW, lease_s=60.0):
    return await state.claim(Room(slots, groups), owner=owner, now=now, lease_s=lease_s)


def done(one, status="COMPLETED", *, usable=True, **more):
    return Ended(one.session_id, one.attempt, status, None, usable=usable, result={}, **more)


async def submit(state, *submissions, owner="o", now=NOW, quota=None):
    return await state.submit(submissions, owner=owner, now=now, quota=quota)


async def test_the_same_body_is_accepted_once_and_another_one_refused(tmp_path):
    async with a_state(tmp_path) as state:
        assert await submit(state, submission("a"), submission("b")) == [True, True]
        assert await submit(state, submission("b"), submission("c")) == [False, True]
        with pytest.raises(ConflictError, match="'b' is taken"):
            await submit(state, submission("d"), submission("b", samples=2))
        names = [row["task_id"] for row in await state.views.tasks(after=0, limit=9)]
        assert names == ["a", "b", "c"]  # a batch is accepted whole or not at all


async def test_an_owner_has_so_many_samples_queued_and_no_more(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", samples=3), quota=4)
        with pytest.raises(QuotaError, match=r"4 samples queued .* has 3; 2 more do not fit"):
            await submit(state, submission("b", samples=2), quota=4)
        with pytest.raises(ConfigError, match="5 samples at once"):
            await submit(state, submission("b", samples=5), quota=4)
        await submit(state, submission("a", samples=3), quota=4)  # nothing new
        await submit(state, submission("c", samples=2), owner="other", quota=4)
        await claim(state, 2)  # one of each owner's has started
        await submit(state, submission("b", samples=2), quota=4)


async def test_sessions_are_claimed_by_priority_and_then_in_order(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(
            state,
            submission("low", 2),
            submission("high", 2, dispatch_priority=9),
            submission("low-2", 2),
        )
        claims = await claim(state, 3)
        assert [one.session_id for one in claims] == ["high.0", "high.1", "low.0"]
        assert [one.session_id for one in await claim(state)] == ["low.1", "low-2.0", "low-2.1"]
        assert await claim(state) == []


async def test_a_queue_has_no_row_for_a_session_that_waits(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", samples=1000))
        await claim(state, 3)
        counts = await state.views.counts()
        assert counts.sessions == {"RUNNING": 3}
        assert counts.waiting == 997


async def test_held_back_are_new_groups_never_the_rest_of_one_that_began(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 3), submission("b", 2), submission("c", 1))
        assert [one.task_id for one in await claim(state, 1, groups=1)] == ["a"]
        assert [one.task_id for one in await claim(state, groups=0)] == ["a", "a"]
        assert await claim(state, groups=0) == []
        assert [one.task_id for one in await claim(state, groups=1)] == ["b", "b"]


async def test_only_the_holder_of_the_lease_ends_a_session(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"))
        (one,) = await claim(state)
        assert (await state.finish(done(one), owner="another", now=NOW)).what == "lost"
        first = await state.finish(done(one), owner="me", now=NOW)
        assert (first.what, first.task_id) == ("final", "a")
        assert (await state.finish(done(one, "ERROR"), owner="me", now=NOW)).what == "lost"
        assert (await state.views.session("a.0"))["state"] == SessionState.COMPLETED


async def test_a_dead_servers_lease_is_taken_over_and_its_late_result_changes_nothing(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"))
        (one,) = await claim(state, owner="slow", lease_s=10)
        assert await state.views.leases() == {"slow": NOW + 10}
        await state.renew(owner="slow", until=NOW + 20)
        assert await state.views.leases() == {"slow": NOW + 20}
        assert await state.take_over(["else"], owner="other", now=NOW + 15, lease_s=10) == []
        (taken,) = await state.take_over(["slow"], owner="other", now=NOW + 21, lease_s=10)
        assert taken == one
        await state.put_back("a.0", 1, owner="other", why="interrupted", now=NOW + 21)
        (again,) = await claim(state, owner="other", now=NOW + 21)
        assert again.run_id == "a.0.r2"
        assert (await state.finish(done(one), owner="slow", now=NOW + 22)).what == "lost"
        assert (await state.finish(done(again), owner="other", now=NOW + 23)).what == "final"


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
async def test_a_clock_that_jumps_loses_nothing(tmp_path, jump_s):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        one, two = await claim(state, 2)
        then = NOW + jump_s
        assert (await state.finish(done(one), owner="me", now=then)).what == "final"
        await submit(state, submission("b"), now=then)
        (three,) = await claim(state, now=then)
        assert (await state.finish(done(two), owner="me", now=NOW)).task_id == "a"
        assert (await state.finish(done(three), owner="me", now=then)).task_id == "b"
        groups = await state.views.groups(after=0, limit=9)
        assert [row["task_id"] for row in groups] == ["a", "b"]  # in the order of their ends
        assert await state.ack(cursor=2, task_ids=(), now=then) == 2


async def test_the_same_server_takes_its_own_leases_over_at_once(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"), submission("b"))
        claims = await claim(state)
        assert await state.take_over(["me"], owner="me", now=NOW, lease_s=10) == claims


async def test_a_session_that_is_to_be_run_again_waits_for_its_time(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", retry_backoff_s=5.0), submission("b"))
        one = (await claim(state, 1))[0]
        failed = Ended("a.0", 1, "ERROR", Cause.INFRASTRUCTURE, usable=False, result={"error": "x"})
        assert (await state.finish(failed, owner="me", now=NOW)).what == "again"
        assert await state.next_due() == NOW + 5
        assert [c.session_id for c in await claim(state, now=NOW + 4)] == ["b.0"]
        (again,) = await claim(state, now=NOW + 5)
        assert (again.session_id, again.attempt) == (one.session_id, 2)
        assert await state.next_due() is None


@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_a_session_that_waits_to_run_again_is_not_lost_to_a_clock_that_jumps(
    tmp_path, jump_s
):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", retry_backoff_s=5.0))
        await claim(state)
        failed = Ended("a.0", 1, "ERROR", Cause.INFRASTRUCTURE, usable=False, result={"error": "x"})
        await state.finish(failed, owner="me", now=NOW + 1)
        assert await claim(state, now=NOW + 2) == []
        (again,) = await claim(state, now=NOW + 2 + jump_s)
        assert (again.session_id, again.attempt) == ("a.0", 2)


async def test_groups_are_acknowledged_by_cursor_or_by_name_and_once(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, *(submission(name) for name in "abcd"))
        for one in (await claim(state))[:3]:
            await state.finish(done(one), owner="me", now=NOW)
        assert await state.ack(cursor=1, task_ids=(), now=NOW) == 1
        assert await state.ack(cursor=None, task_ids=["c", "d", "nobody"], now=NOW) == 1
        assert await state.ack(cursor=3, task_ids=["c"], now=NOW) == 1
        assert (await state.views.counts()).unacked == 0


async def test_an_id_that_was_barred_is_refused_later(tmp_path):
    async with a_state(tmp_path) as state:
        await state.bar("a", owner="o", now=NOW)
        await state.bar("a", owner="o", now=NOW)
        with pytest.raises(ConflictError):
            await submit(state, submission("a"))
        row = await state.views.task("a")
        assert (row["state"], row["target"], row["done_seq"]) == (TaskState.CANCELLED, 0, 1)
        assert await claim(state) == []


async def test_numbers_are_kept(tmp_path):
    async with a_state(tmp_path) as state:
        await state.set_number("policy_version", 9)
    async with a_state(tmp_path) as state:
        assert await state.number("policy_version") == 9
        await submit(state, submission("a"))
        await claim(state)
        assert (await state.views.task("a"))["version"] == 9
        assert (await state.views.session("a.0"))["version_started"] == 9
