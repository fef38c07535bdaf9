"""Law 6: every accepted session ends exactly once in the trainer's hands, whoever is killed.

`BRIDLE_TEST_KILLS` draws more random points than the few of the default run; `BRIDLE_TEST_DATABASE`
names another database than a file.
"""

import os

import pytest
from tests.server.house import database_of
from tests.server.killing import crash_run

KILLS = int(os.environ.get("BRIDLE_TEST_KILLS", "2"))


@pytest.mark.timeout(60 + 20 * KILLS)
async def test_every_accepted_session_ends_exactly_once_over_kills_of_server_and_trainer(tmp_path):
    came_to = await crash_run(
        tmp_path, database_of(tmp_path), tasks=10 + 10 * KILLS, kills=KILLS, seed=KILLS
    )
    assert came_to["kills"] == KILLS
    print(came_to)  # noqa: T201 - with -s, the numbers
