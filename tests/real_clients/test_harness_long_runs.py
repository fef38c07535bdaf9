"""Ten turns of programs that start no agents of their own; the others' are in the next file."""

import pytest
from tests.real_clients.side_by_side import Run, Script, never_forked, side_by_side, succeeded
from tests.real_clients.work import TEN, ten_turns, the_files_are_right

from bridle.types import Kind

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900)]

CASES = (
    ("google_adk", "google", {}),
    ("google_adk", "google", {"stream": True}),
    ("mini_swe_agent", "openai_chat", {}),
    ("openai_agents", "openai_responses", {}),
    ("openai_agents", "openai_chat", {"stream": True}),
    ("openclaw", "openai_chat", {}),
    ("openhands", "openai_chat", {}),
    ("openhands", "anthropic", {}),
    ("pi", "openai_chat", {}),
)
EXAMPLES = 3
"""Assistant messages that aider shows before the first call."""
NO_AGENTS = {
    "aider": "the program starts no agents",
    "google_adk": "agents that start agents are for the SDK's user to write",
    "mini_swe_agent": "the program starts no agents",
    "openai_agents": "agents that start agents are for the SDK's user to write",
    "openhands": "its default agent starts no agents",
    "pi": "the program starts no agents",
}


def script(harness: str) -> Script:
    """Its one conversation."""

    def conversations(mark, folder):
        # openclaw's file tools follow no link out of its own folder.
        place = "." if harness == "openclaw" else folder
        return [{"when": {"user_contains": mark}, "turns": ten_turns(harness, place)}]

    return conversations


async def test_ten_turns_are_one_conversation(tmp_path, subtests, cell):
    runs = [
        Run(harness, dialect, script(harness), the_files_are_right(), settings)
        for harness, dialect, settings in CASES
    ]
    for ran in await side_by_side(tmp_path, runs):
        with subtests.test(ran.run.name):
            succeeded(ran)
            assert len(ran.exchanges) == TEN
            never_forked(ran, roots={Kind.AGENT: 1})
            if ran.run.harness in NO_AGENTS:
                cell(
                    ran.run.harness, ran.run.dialect, "subagent", "n/a", NO_AGENTS[ran.run.harness]
                )


async def test_aider_that_is_sent_back_by_a_test_starts_a_root_of_which_nothing_is_lost(
    tmp_path, cell
):
    """It shows the files anew before its history, so no earlier prompt is a prefix."""
    answers = [{"content": f"made.txt\n```\n{text}\n```"} for text in ("wrong", "right")]
    settings = {"config": {"auto-test": True, "test-cmd": "grep right made.txt"}}
    run = Run(
        "aider",
        "openai_chat",
        lambda *_: [{"skip": EXAMPLES, "turns": answers}],
        check='test "$(cat made.txt)" = right',
        settings=settings,
    )
    (ran,) = await side_by_side(tmp_path, [run])
    succeeded(ran)
    assert [e.root_reason for e in ran.exchanges] == ["foreign", "foreign"], ran.table()
    assert ran.stats["tokens_excluded"] == {}
    cell("aider", "openai_chat", "subagent", "n/a", NO_AGENTS[ran.run.harness])
    cell("aider", "openai_chat", "compaction", "n/a", "one instruction is one or two calls")
