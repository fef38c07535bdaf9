"""Law 6: every accepted session ends exactly once in the trainer's hands, whoever is killed.

The server, its node and the receiver of callbacks are killed once each, and the trainer dies now
and then, over the suite's own database. `test_crashes` does it at many random points.
"""

import pytest
from tests.server.house import database_of
from tests.server.killing import crash_run


@pytest.mark.timeout(120)
async def test_every_accepted_session_ends_exactly_once_after_kills(tmp_path):
    came_to = await crash_run(tmp_path, database_of(tmp_path), kills=3, seed=1)
    assert came_to["kills"] == {"server": 1, "node": 1, "receiver": 1}
