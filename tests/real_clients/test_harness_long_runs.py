"""Ten turns of programs that start no agents of their own; the others' are in the next file."""

import pytest
from tests.real_clients.matrix import wanted
from tests.real_clients.side_by_side import Run, Script, never_forked, side_by_side, succeeded
from tests.real_clients.work import TEN, TOOLS, ten_turns, the_files_are_right

from bridle.prompting.renderer import load_renderer
from bridle.types import Dialect, Kind

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]

CASES = (
    ("google_adk", "google", {}),
    ("google_adk", "google", {"stream": True}),
    *(("mini_swe_agent", str(dialect), {}) for dialect in Dialect),
    ("openai_agents", "openai_responses", {}),
    ("openai_agents", "openai_chat", {"stream": True}),
    ("openclaw", "openai_chat", {}),
    ("openhands", "openai_chat", {}),
    ("openhands", "anthropic", {}),
    *(("pi", str(dialect), {}) for dialect in Dialect),
)
MASKING = 12
"""Outputs after which Gemini CLI has taken some away."""
EXAMPLES = 3
"""Assistant messages that aider shows before the first call."""


def script(harness: str) -> Script:
    """Its one conversation."""

    def conversations(mark, folder):
        # openclaw's file tools follow no link out of its own folder.
        place = "." if harness == "openclaw" else folder
        return [{"when": {"user_contains": mark}, "turns": ten_turns(harness, place)}]

    return conversations


@pytest.mark.core
async def test_ten_turns_of_a_harness_are_one_trace_without_forks(tmp_path, subtests):
    runs = [
        Run(harness, dialect, script(harness), the_files_are_right(), settings)
        for harness, dialect, settings in CASES
        if wanted(harness)
    ]
    for ran in await side_by_side(tmp_path, runs):
        with subtests.test(ran.run.name):
            succeeded(ran)
            assert len(ran.exchanges) == TEN
            never_forked(ran, roots={Kind.AGENT: 1})


@pytest.mark.drawn_with("aider")
async def test_aider_s_retry_after_a_failed_test_starts_a_root_and_excludes_no_token(
    tmp_path,
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
    assert [e.root_reason for e in ran.exchanges] == ["foreign", "history_changed"], ran.table()
    assert ran.stats["tokens_excluded"] == {}


@pytest.mark.drawn_with("gemini_cli")
async def test_gemini_cli_s_output_masking_starts_a_root_and_excludes_no_token(tmp_path):
    """Beyond some 50k tokens of outputs it puts stubs in the place of the oldest, now and then."""
    words = "an old output that nobody needs and that fills the context with its words"

    def conversations(mark, _):
        shell = TOOLS["gemini_cli"].run
        turns = [
            {
                "content": f"Step {n}.",
                "tool_calls": [shell(f"yes '{n} {words}' | head -c 38000; echo {n} > at.txt")],
            }
            for n in range(MASKING)
        ]
        return [{"when": {"user_contains": mark}, "turns": [*turns, {"content": "Done."}]}]

    run = Run("gemini_cli", "google", conversations, f'test "$(cat at.txt)" = {MASKING - 1}')
    (ran,) = await side_by_side(tmp_path, [run], context_length=1_000_000)
    succeeded(ran)
    first, *masked = ran.roots()
    assert first[0].root_reason == "first", ran.table()
    assert len(masked) >= 1, ran.table()
    before = first
    for tree in masked:
        assert tree[0].root_reason == "history_changed", ran.table()
        assert tree[0].continues in {e.exchange_id for e in before}, ran.table()
        assert len(tree) > 1, ran.table()
        assert "tool_output_masked" in load_renderer("builtin").decode(tree[0].suffix_ids)
        before = tree
    assert {e.kind for e in ran.exchanges} == {Kind.AGENT}, ran.table()
    assert len(ran.exchanges) == MASKING + 1, ran.table()
    assert ran.stats["tokens_excluded"] == {}, ran.table()
