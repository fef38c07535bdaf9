"""Real, unmodified harnesses on a real vLLM, whose tokens are scripted and nothing else.

Four programs, one for each dialect, side by side in one node. Each does ten turns of work or more;
three of them start two agents at once in one turn, the fourth fills its context and compacts. All
of it takes 85 s on two cores, because vLLM's model is as small as it can be.
"""

import pytest
from tests.real_clients import test_harness_compaction as compaction
from tests.real_clients import test_harness_subagents as agents
from tests.real_clients.side_by_side import Run, never_forked, side_by_side, succeeded
from tests.real_clients.work import TEN, the_files_are_right

from bridle.capture.sqlite import SqliteReader
from bridle.config import Budgets
from bridle.types import Dialect, Kind

from .checks import RecordingVllm, check_session

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WITH_AGENTS = {
    "claude_code": "anthropic",
    "codex": "openai_responses",
    "gemini_cli": "google",
}
COMPACTS = ("pi", "openai_chat")
DONE = 'test "$(cat on.txt)" = "a b"'
PATIENT = Budgets(agent_s=600)
"""Four programs at once, with prompts of up to 50,000 tokens, on a machine that may be busy."""


def filling(number):
    """What each turn of the compacting program prints: 4,000 tokens, and 13,000 characters.

    Pi counts characters to see whether there is enough to be summed up.
    """
    return f"seq -f 'and the other that was in the %g' {number}000 {number}360"


LINES = 900
"""Lines of the longest output that the others see; Gemini CLI shows all of it."""


def rollouts():
    """A run of each program."""
    made = " && ".join(f'test "$(cat {part}.txt)" = é' for part in agents.PARTS)
    check = f"{made} && {the_files_are_right()}"
    return [
        *(
            Run(
                name,
                dialect,
                agents.script(name, dialect, lines=LINES),
                check,
                agents.SETTINGS.get(name, {}),
                PATIENT,
            )
            for name, dialect in WITH_AGENTS.items()
        ),
        Run(*COMPACTS, compaction.script(COMPACTS[0], filling), DONE, budgets=PATIENT),
    ]


async def test_real_harnesses_of_all_dialects_train_on_the_engines_own_tokens(server, tmp_path):
    def play(conversations):
        server.say({"conversations": conversations})
        return RecordingVllm(server.url)

    everyone = await side_by_side(tmp_path, rollouts(), play=play)

    assert {ran.run.dialect for ran in everyone} == set(map(str, Dialect))
    with SqliteReader(tmp_path / "capture.sqlite") as store:
        for ran in everyone:
            succeeded(ran)
            compacts = ran.run.harness == COMPACTS[0]
            breaks = compaction.KEPT if compacts else ()
            session_id = ran.result.session_id
            trajectory = check_session(store, session_id, server.model, breaks=breaks)
            assert set(trajectory.metadata["stats"]["drift"]) == {"exact"}
            assert trajectory.metadata["stats"]["tokens_excluded"] == {}
            if compacts:
                compaction.compacted(ran)
                continue
            never_forked(ran, roots={Kind.AGENT: 1, Kind.SUBAGENT: 2})
            assert sorted(map(len, ran.roots())) == [3, 3, TEN + 2], ran.table()
