"""The state alone: what is accepted, leased, given back, and how often."""

from collections import Counter, deque
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text
from tests.server.house import FakeWorkers, a_service, database_of, ended, submission, until

from bridle.errors import ConfigError
from bridle.server.finalize import ConflictError
from bridle.server.queries import Queries
from bridle.server.schemas import EndedRun, SessionState, TaskState
from bridle.server.storage import Database
from bridle.server.store import ClaimLimits, FairShares, QuotaError, TaskStore
from bridle.types import Cause

NOW = 1000.0


class Whole(TaskStore):
    """A state with its views."""

    def __init__(self, database):
        super().__init__(database)
        self.queries = Queries(database)


@asynccontextmanager
async def a_state(tmp_path):
    async with await Database.open(database_of(tmp_path)) as database:
        yield Whole(database)


async def claim(state, slots=10, *, groups=None, owner="me", now=NOW, lease_s=60.0):
    return await state.claim(ClaimLimits(slots, groups), owner=owner, now=now, lease_s=lease_s)


def done(one, status="COMPLETED", *, usable=True, **more):
    return EndedRun(one.session_id, one.attempt, status, None, usable=usable, result={}, **more)


async def submit(state, *submissions, owner="o", now=NOW, quota=None):
    return await state.submit(submissions, owner=owner, now=now, quota=quota)


async def test_a_resubmitted_task_is_accepted_once_and_a_changed_body_refused(tmp_path):
    async with a_state(tmp_path) as state:
        assert await submit(state, submission("a"), submission("b")) == [True, True]
        assert await submit(state, submission("b"), submission("c")) == [False, True]
        with pytest.raises(ConflictError, match="'b' was submitted"):
            await submit(state, submission("d"), submission("b", samples=2))
        names = [row["task_id"] for row in await state.queries.tasks(after=0, limit=9)]
        assert names == ["a", "b", "c"]  # a batch is accepted whole or not at all


async def test_owner_cannot_queue_more_samples_than_its_quota(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", samples=3), quota=4)
        with pytest.raises(QuotaError, match=r"4 samples queued .* has 3; 2 more do not fit"):
            await submit(state, submission("b", samples=2), quota=4)
        with pytest.raises(ConfigError, match="5 samples were submitted at once"):
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


async def test_queued_session_has_no_row(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", samples=1000))
        await claim(state, 3)
        counts = await state.queries.counts()
        assert counts.sessions == {"RUNNING": 3}
        assert counts.waiting == 997


async def test_group_limits_hold_back_new_groups_but_not_started_ones(tmp_path):
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
        assert (await state.queries.session("a.0"))["state"] == SessionState.COMPLETED


async def test_a_dead_servers_lease_is_taken_over_and_its_late_result_changes_nothing(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"))
        (one,) = await claim(state, owner="slow", lease_s=10)
        assert await state.queries.leases() == {"slow": NOW + 10}
        await state.renew(owner="slow", until=NOW + 20)
        assert await state.queries.leases() == {"slow": NOW + 20}
        assert await state.take_over(["else"], owner="other", now=NOW + 15, lease_s=10) == []
        (taken,) = await state.take_over(["slow"], owner="other", now=NOW + 21, lease_s=10)
        assert taken == one
        await state.put_back("a.0", 1, owner="other", why="interrupted", now=NOW + 21)
        (again,) = await claim(state, owner="other", now=NOW + 21)
        assert again.run_id == "a.0.r2"
        assert (await state.finish(done(one), owner="slow", now=NOW + 22)).what == "lost"
        assert (await state.finish(done(again), owner="other", now=NOW + 23)).what == "final"


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
async def test_clock_jump_loses_no_session(tmp_path, jump_s):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", 2))
        one, two = await claim(state, 2)
        then = NOW + jump_s
        assert (await state.finish(done(one), owner="me", now=then)).what == "final"
        await submit(state, submission("b"), now=then)
        (three,) = await claim(state, now=then)
        assert (await state.finish(done(two), owner="me", now=NOW)).task_id == "a"
        assert (await state.finish(done(three), owner="me", now=then)).task_id == "b"
        groups = await state.queries.groups(after=0, limit=9)
        assert [row["task_id"] for row in groups] == ["a", "b"]  # in the order of their ends
        assert await state.ack(cursor=2, task_ids=(), now=then) == 2


async def test_server_takes_over_its_own_leases_at_once(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a"), submission("b"))
        claims = await claim(state)
        assert await state.take_over(["me"], owner="me", now=NOW, lease_s=10) == claims


async def test_retried_session_waits_for_its_backoff(tmp_path):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", retry_backoff_s=5.0), submission("b"))
        one = (await claim(state, 1))[0]
        failed = EndedRun(
            "a.0", 1, "ERROR", Cause.INFRASTRUCTURE, usable=False, result={"error": "x"}
        )
        assert (await state.finish(failed, owner="me", now=NOW)).what == "again"
        assert await state.next_due() == NOW + 5
        assert [c.session_id for c in await claim(state, now=NOW + 4)] == ["b.0"]
        (again,) = await claim(state, now=NOW + 5)
        assert (again.session_id, again.attempt) == (one.session_id, 2)
        assert await state.next_due() is None


@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_clock_jump_does_not_block_a_retried_session(tmp_path, jump_s):
    async with a_state(tmp_path) as state:
        await submit(state, submission("a", retry_backoff_s=5.0))
        await claim(state)
        failed = EndedRun(
            "a.0", 1, "ERROR", Cause.INFRASTRUCTURE, usable=False, result={"error": "x"}
        )
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
        assert (await state.queries.counts()).unacked == 0


async def test_reserved_id_is_refused_later(tmp_path):
    async with a_state(tmp_path) as state:
        await state.reserve("a", owner="o", now=NOW)
        await state.reserve("a", owner="o", now=NOW)
        with pytest.raises(ConflictError):
            await submit(state, submission("a"))
        row = await state.queries.task("a")
        assert (row["state"], row["target"], row["done_seq"]) == (TaskState.CANCELLED, 0, 1)
        assert await claim(state) == []


async def test_policy_version_is_stored_and_copied_to_tasks_and_sessions(tmp_path):
    async with a_state(tmp_path) as state:
        await state.set_number("policy_version", 9)
    async with a_state(tmp_path) as state:
        assert await state.number("policy_version") == 9
        await submit(state, submission("a"))
        await claim(state)
        assert (await state.queries.task("a"))["version"] == 9
        assert (await state.queries.session("a.0"))["version_started"] == 9


def owners(claims):
    return Counter(one.owner for one in claims)


async def flood(state, owner="a", tasks=20, samples=1000):
    bodies = [
        submission(f"{owner}-{number}", samples, dispatch_priority=100) for number in range(tasks)
    ]
    await submit(state, *bodies, owner=owner)


async def test_high_priority_flood_leaves_the_next_slot_to_another_owner(tmp_path):
    async with a_state(tmp_path) as state:
        await flood(state)
        first, *_ = await claim(state, 8)
        await submit(state, submission("b", 3), owner="b")
        assert await claim(state, 0) == []
        await state.finish(done(first), owner="me", now=NOW)
        assert [one.session_id for one in await claim(state, 1)] == ["b.0"]


async def test_priorities_count_within_one_owner(tmp_path):
    async with a_state(tmp_path) as state:
        await flood(state, tasks=1)
        await submit(state, submission("low"), owner="b")
        await submit(state, submission("high", dispatch_priority=1), owner="b")
        claims = await claim(state, 4)
        assert [one.task_id for one in claims if one.owner == "b"] == ["high", "low"]


async def test_unused_share_of_an_owner_goes_to_the_others(tmp_path):
    async with a_state(tmp_path) as state:
        await flood(state)
        await submit(state, submission("b", 1), owner="b")
        await submit(state, submission("c", 2), owner="c")
        assert owners(await claim(state, 9)) == {"a": 6, "b": 1, "c": 2}


async def test_owner_weights_divide_the_claimed_sessions(tmp_path):
    async with a_state(tmp_path) as state:
        weighted = TaskStore(state.database, FairShares({"a": 3.0}))
        for owner in "ab":
            await flood(state, owner)
        room = ClaimLimits(8)
        assert owners(await weighted.claim(room, owner="me", now=NOW, lease_s=9.0)) == {
            "a": 6,
            "b": 2,
        }


async def test_retried_sessions_count_in_their_owners_share(tmp_path):
    async with a_state(tmp_path) as state:
        await flood(state, tasks=1)
        for one in await claim(state, 4):
            failed = EndedRun(
                one.session_id, 1, "ERROR", Cause.INFRASTRUCTURE, usable=False, result={"error": ""}
            )
            await state.finish(failed, owner="me", now=NOW)
        await submit(state, submission("b", 9), owner="b")
        claims = await claim(state, 4)
        assert owners(claims) == {"a": 2, "b": 2}
        assert [one.attempt for one in claims if one.owner == "a"] == [2, 2]


async def test_group_limits_apply_to_each_owner(tmp_path):
    async with a_state(tmp_path) as state:
        for owner in "ab":
            await submit(state, *(submission(f"{owner}{n}") for n in range(4)), owner=owner)

        async def claimed(slots):
            limits = [(2, await state.queries.inflight_groups())]
            return await state.claim(
                ClaimLimits(slots, None, limits), owner="me", now=NOW, lease_s=9.0
            )

        assert owners(await claimed(9)) == {"a": 2, "b": 2}
        assert await claimed(9) == []
        room = ClaimLimits(9, 1, [(3, await state.queries.inflight_groups())])
        assert len(await state.claim(room, owner="me", now=NOW, lease_s=9.0)) == 1


@pytest.mark.parametrize("limit", ["max_inflight_groups", "max_unacked_groups"])
async def test_group_limits_of_one_owner_do_not_block_another_owner(tmp_path, limit):
    workers = FakeWorkers(capacity=2, held=limit == "max_inflight_groups")
    async with a_service(tmp_path, workers, **{limit: 1}) as service:
        await service.submit([submission("a"), submission("a-2")], owner="a")
        if not workers.held:
            await ended(service, "a")  # and nobody acknowledges it
        await until(lambda: "a.0" in workers.ran)
        await service.submit([submission("b")], owner="b")
        await until(lambda: "b.0" in workers.ran)
        assert "a-2.0" not in workers.ran
        for run in list(workers.living):
            workers.let(run)
        await ended(service, "b")


async def test_flood_of_one_owner_delays_another_by_at_most_one_session(tmp_path):
    """On the real dispatcher: the second owner's session is the next one that starts."""
    workers = FakeWorkers(capacity=3, held=True)
    async with a_service(tmp_path, workers) as service:
        bodies = [submission(f"a-{n}", 1000, dispatch_priority=100) for n in range(10)]
        await service.submit(bodies, owner="a")
        await until(lambda: len(workers.living) == 3)
        await service.submit([submission("b", 4)], owner="b")
        for _ in range(20):
            count = len(workers.ran)
            workers.let(next(iter(workers.living)))
            await until(lambda: len(workers.ran) > count and len(workers.living) == 3)  # noqa: B023
        started = [run.partition(".")[0] for run in workers.ran[3:]]
        assert started[0] == "b"
        assert started.count("b") == 4
        assert started.index("b", 3) < 10  # and they go on with equal shares


async def test_claim_queries_use_an_index_and_no_temporary_sort(tmp_path):
    async with a_state(tmp_path) as state:
        if not state.database.is_sqlite:
            return
        queries = {
            "SELECT min(owner) FROM tasks WHERE open = 1 AND owner > 'a'": "ix_tasks_open",
            "SELECT min(owner) FROM sessions WHERE state = 'QUEUED' AND owner > 'a'": (
                "ix_sessions_state"
            ),
            "SELECT * FROM tasks WHERE open = 1 AND owner = 'a' AND priority ="
            " (SELECT max(priority) FROM tasks WHERE open = 1 AND owner = 'a')"
            " ORDER BY seq": "ix_tasks_open",
            "SELECT * FROM tasks WHERE owner = 'a' AND seq > 1 ORDER BY seq": "ix_tasks_owner",
            "SELECT * FROM tasks WHERE owner = 'a' AND acked_at IS NULL AND done_seq > 1"
            " ORDER BY done_seq": "ix_tasks_groups",
            "SELECT sum(target - expanded) FROM tasks WHERE open = 1 AND owner = 'a'": (
                "ix_tasks_open"
            ),
        }
        async with state.database.read() as connection:
            for query, index in queries.items():
                plan = (await connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))).all()
                result = " ".join(str(row[-1]) for row in plan)
                assert index in result, query
                assert "TEMP B-TREE" not in result, query


def run(shares, capacity, waiting, sessions, *, length=1):
    """Start `sessions` one after the other as slots become free; each takes `length` starts."""
    running, started = deque[str](), list[str]()
    for _ in range(sessions):
        while len(running) >= capacity * length:
            running.popleft()
        (owner,) = shares.divide(1, waiting, Counter(list(running)[-capacity + 1 :]))
        shares.started(waiting, {owner: 1})
        running.append(owner)
        started.append(owner)
    return started


def test_free_slots_are_divided_evenly():
    assert FairShares().divide(6, ["a", "b", "c"], {}) == {"a": 2, "b": 2, "c": 2}


def test_free_slots_go_to_owners_with_fewer_running_sessions():
    assert FairShares().divide(2, ["a", "b"], {"a": 6}) == {"b": 2}
    assert FairShares().divide(4, ["a", "b"], {"a": 3, "b": 1}) == {"a": 1, "b": 3}


def test_an_owner_without_waiting_sessions_leaves_its_slots_to_the_others():
    assert FairShares().divide(3, ["a"], {"b": 9}) == {"a": 3}
    assert FairShares().divide(3, [], {"b": 9}) == {}


def test_fair_shares_divide_slots_by_owner_weight():
    shares = FairShares({"a": 3.0})
    assert shares.divide(8, ["a", "b"], {}) == {"a": 6, "b": 2}


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_owners_alternate_if_there_are_fewer_slots_than_owners(capacity):
    started = run(FairShares(), capacity, "abcd", 40)
    for begin in range(0, 36, 4):
        assert len(set(started[begin : begin + 5])) >= 3
    assert set(Counter(started).values()) <= {9, 10, 11}


def test_owner_with_a_small_weight_gets_a_slot_from_time_to_time():
    started = Counter(run(FairShares({"a": 9.0}), 1, "ab", 100))
    assert 8 <= started["b"] <= 12


def test_new_owner_gets_the_next_slot():
    shares = FairShares()
    run(shares, 4, "a", 100)
    assert shares.divide(1, "ab", {"a": 3}) == {"b": 1}
    assert shares.divide(1, "ab", {}) == {"b": 1}
