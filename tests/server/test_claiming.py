"""Free slots among owners, and what one owner's flood costs another."""

from collections import Counter

import pytest
from sqlalchemy import text
from tests.server.house import FakeWorkers, a_service, ended, submission, until
from tests.server.test_state import NOW, a_state, claim, done, submit

from bridle.server.claiming import Room, Shares
from bridle.server.state import State
from bridle.server.states import Ended
from bridle.types import Cause


def owners(claims):
    return Counter(one.owner for one in claims)


async def flood(state, owner="a", tasks=20, samples=1000):
    bodies = [
        submission(f"{owner}-{number}", samples, dispatch_priority=100) for number in range(tasks)
    ]
    await submit(state, *bodies, owner=owner)


async def test_a_flood_at_high_priority_leaves_the_next_slot_to_another_owner(tmp_path):
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


async def test_what_an_owner_does_not_need_goes_to_the_others(tmp_path):
    async with a_state(tmp_path) as state:
        await flood(state)
        await submit(state, submission("b", 1), owner="b")
        await submit(state, submission("c", 2), owner="c")
        assert owners(await claim(state, 9)) == {"a": 6, "b": 1, "c": 2}


async def test_weights_divide_the_slots(tmp_path):
    async with a_state(tmp_path) as state:
        weighted = State(state._database, Shares({"a": 3.0}))
        for owner in "ab":
            await flood(state, owner)
        room = Room(8)
        assert owners(await weighted.claim(room, owner="me", now=NOW, lease_s=9.0)) == {
            "a": 6,
            "b": 2,
        }


async def test_sessions_to_be_run_again_come_out_of_their_owners_share(tmp_path):
    async with a_state(tmp_path) as state:
        await flood(state, tasks=1)
        for one in await claim(state, 4):
            failed = Ended(
                one.session_id, 1, "ERROR", Cause.INFRASTRUCTURE, usable=False, result={"error": ""}
            )
            await state.finish(failed, owner="me", now=NOW)
        await submit(state, submission("b", 9), owner="b")
        claims = await claim(state, 4)
        assert owners(claims) == {"a": 2, "b": 2}
        assert [one.attempt for one in claims if one.owner == "a"] == [2, 2]


async def test_limits_of_groups_are_each_owners_own(tmp_path):
    async with a_state(tmp_path) as state:
        for owner in "ab":
            await submit(state, *(submission(f"{owner}{n}") for n in range(4)), owner=owner)

        async def claimed(slots):
            limits = [(2, await state.views.inflight_groups())]
            return await state.claim(Room(slots, None, limits), owner="me", now=NOW, lease_s=9.0)

        assert owners(await claimed(9)) == {"a": 2, "b": 2}
        assert await claimed(9) == []
        room = Room(9, 1, [(3, await state.views.inflight_groups())])
        assert len(await state.claim(room, owner="me", now=NOW, lease_s=9.0)) == 1


@pytest.mark.parametrize("limit", ["max_inflight_groups", "max_unacked_groups"])
async def test_another_owners_groups_hold_nobody_back(tmp_path, limit):
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


async def test_a_flood_of_one_owner_delays_another_by_one_session_at_most(tmp_path):
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


async def test_a_claim_reads_what_it_takes_and_not_the_queue(tmp_path):
    async with a_state(tmp_path) as state:
        if not state._database.is_sqlite:
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
        async with state._database.read() as connection:
            for query, index in queries.items():
                plan = (await connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))).all()
                told = " ".join(str(row[-1]) for row in plan)
                assert index in told, query
                assert "TEMP B-TREE" not in told, query
