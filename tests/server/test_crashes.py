"""Law 6 at random points, over SQLite and a real PostgreSQL.

The server, its node, PostgreSQL and the receiver of callbacks are killed with `kill -9` while a
trainer works, which dies too. Every accepted session ends exactly once in the trainer's hands, and
none is run again after it had ended.

`BRIDLE_TEST_CRASHES` is the number of kills (`make long`: 200; else a drawn 20), and
`BRIDLE_TEST_CRASH_SEED` draws others, so that many can be done in pieces.
"""

import asyncio
import os
import random

import pytest
from tests.server.cluster import Cluster, Pair
from tests.server.killing import crash_run

KILLS = int(os.environ.get("BRIDLE_TEST_CRASHES", "20"))
SEED = int(os.environ.get("BRIDLE_TEST_CRASH_SEED", "1"))


@pytest.fixture
def victim():
    """A PostgreSQL that no other test is using."""
    with Cluster() as running:
        yield running


@pytest.mark.postgres
@pytest.mark.timeout(120 + 20 * KILLS)
async def test_over_postgresql_every_accepted_session_ends_exactly_once(victim, tmp_path):
    drawn = random.Random(SEED)

    async def postgres():
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(drawn.uniform(0, 0.3))
        await asyncio.to_thread(victim.start)

    others = {"postgres": postgres}
    came_to = await crash_run(tmp_path, victim.fresh(), kills=KILLS, seed=SEED, others=others)
    assert sum(came_to["kills"].values()) == KILLS
    print(came_to)  # noqa: T201 - with -s, the numbers


@pytest.mark.postgres
@pytest.mark.timeout(120 + 20 * KILLS)
async def test_over_promoted_standbys_every_accepted_session_ends_exactly_once(tmp_path):
    drawn = random.Random(SEED)
    kills = max(4, KILLS // 5)

    async def primary():
        await asyncio.to_thread(pair.kill_primary)
        await asyncio.sleep(drawn.uniform(0, 0.3))
        await asyncio.to_thread(pair.promote)
        await asyncio.to_thread(pair.replace_standby)

    with Pair() as pair:
        others = {"primary": primary}
        came_to = await crash_run(tmp_path, pair.fresh(), kills=kills, seed=SEED, others=others)
    assert came_to["kills"]["primary"] >= 1
    print(came_to)  # noqa: T201 - with -s, the numbers


@pytest.mark.postgres
@pytest.mark.timeout(120 + 20 * KILLS)
async def test_over_sqlite_every_accepted_session_ends_exactly_once(tmp_path):
    database = tmp_path / "server.sqlite"
    came_to = await crash_run(tmp_path, database, kills=KILLS, seed=SEED)
    assert sum(came_to["kills"].values()) == KILLS
    print(came_to)  # noqa: T201 - with -s, the numbers
