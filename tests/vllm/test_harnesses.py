"""Real, unmodified harnesses on a real vLLM, whose tokens are scripted and nothing else.

All of it takes 85 s on two cores, because vLLM's model is as small as it can be.
"""

import pytest
from tests.real_clients import four_dialects
from tests.real_clients.side_by_side import side_by_side
from tests.real_clients.test_harness_compaction import KEPT

from bridle.capture.sqlite import SqliteReader
from bridle.types import Dialect

from .checks import RecordingVllm, check_session

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_harnesses_of_all_dialects_train_on_vllm_s_own_tokens(server, tmp_path):
    def play(conversations):
        server.say({"conversations": conversations})
        return RecordingVllm(server.url)

    everyone = await side_by_side(tmp_path, four_dialects.rollouts(), play=play)

    assert {ran.run.dialect for ran in everyone} == set(map(str, Dialect))
    with SqliteReader(tmp_path / "capture.sqlite") as store:
        for ran in everyone:
            four_dialects.check(ran)
            breaks = KEPT if four_dialects.compacts(ran) else ()
            check_session(store, ran.result.session_id, server.model, breaks=breaks)
