"""Law 6 on a real PostgreSQL: the server, PostgreSQL and the receiver of callbacks are killed with
`kill -9` at random points while a trainer works, which dies too; every accepted session ends once.

`BRIDLE_TEST_CRASHES` is the number of kills: a drawn few unless it is given (`make long`: 100).
"""

import asyncio
import os
import random
from collections import Counter

import pytest
from tests.server.cluster import Cluster
from tests.server.killing import KilledReceiver, crash_run

KILLS = int(os.environ.get("BRIDLE_TEST_CRASHES", "20"))


@pytest.fixture
def victim():
    """A PostgreSQL that no other test is using."""
    with Cluster() as running:
        yield running


@pytest.mark.postgres
@pytest.mark.timeout(120 + 20 * KILLS)
async def test_every_accepted_session_ends_exactly_once_whoever_is_killed(victim, tmp_path):
    drawn = random.Random(KILLS)
    receiver = KilledReceiver(tmp_path)
    killed: Counter[str] = Counter()

    async def postgres():
        killed["postgres"] += 1
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(drawn.uniform(0, 0.3))
        await asyncio.to_thread(victim.start)

    async def callbacks():
        killed["receiver"] += 1
        receiver.kill()
        await asyncio.sleep(drawn.uniform(0, 0.3))
        receiver.start()

    came_to = await crash_run(
        tmp_path,
        victim.fresh(),
        tasks=20 + 5 * KILLS,
        kills=KILLS,
        seed=KILLS,
        others=(postgres, callbacks),
        told_to=receiver,
    )
    assert came_to["kills"] + killed.total() == KILLS
    assert min(came_to["kills"], *killed.values()) > 0
    print(came_to, dict(killed))  # noqa: T201 - with -s, the numbers
