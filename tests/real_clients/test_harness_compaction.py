"""Programs that shorten their history when the engine's context fills up, as they do by themselves.

Each turn prints some thousand tokens. What asks for the summary is of kind `compaction` and trains;
what goes on from the summary is a new root that says what it continues. Nothing else forks, and
`PLANNED` says of each program where its own way of compacting makes a root.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from tests.real_clients.door import Door
from tests.real_clients.matrix import cases, wanted
from tests.real_clients.side_by_side import Run, side_by_side, succeeded
from tests.real_clients.work import TOOLS, Turn, tool

from bridle.harnesses import open_harness
from bridle.types import Kind

pytestmark = [pytest.mark.harnesses, pytest.mark.core, pytest.mark.timeout(1800)]

CONTEXT = 100_000
STEPS = 16
"""Enough to fill the context, whatever else a prompt holds."""

LEAST = 6
"""Calls until the context is full. Slow turns are fewer: Qwen Code puts 2,000 tokens of reminders
behind some of them."""


@dataclass(frozen=True)
class Plan:
    """A program's way of compaction."""

    lines: int
    """What a turn prints: numbers, about six tokens each."""
    asks: dict[str, str]
    """What its request for the summary shows."""
    asked_as: str | None
    """Root reason of that request; `None` = it extends the conversation."""
    why: str
    """Why that is so."""
    goes_on: tuple[str, ...]
    """Root reason of what follows; where it keeps turns or not, both."""
    later: str = ""
    """Why one call more after it is a root; empty = none is."""


TEXT = "it writes the history into one message, under a system prompt of its own"
CHANGED = "history_changed"
KEPT = (CHANGED,)
"""The last turns are kept behind the summary; their ids tell."""
QUOTED = ("summarised",)
"""Nothing is kept; the summary's text tells."""

PLANNED = {
    "claude_agent_sdk": Plan(900, {"last_contains": "TEXT ONLY"}, None, "same head", KEPT),
    "claude_code": Plan(900, {"last_contains": "TEXT ONLY"}, None, "same head", KEPT),
    "cline": Plan(1600, {"system_contains": "Summarize the provided"}, "first", TEXT, KEPT),
    "codex": Plan(
        1500,
        {"last_contains": "CONTEXT CHECKPOINT"},
        "tools_removed",
        "it asks without tools",
        QUOTED,
    ),
    "copilot": Plan(
        1050, {"last_contains": "Please create a detailed summary"}, None, "same head", KEPT
    ),
    "gemini_cli": Plan(
        1300,
        {"system_contains": "state_snapshot"},
        CHANGED,
        "it puts another system prompt before",
        KEPT,
    ),
    "opencode": Plan(1500, {"system_contains": "context summarization"}, "first", TEXT, KEPT),
    "hermes": Plan(1000, {"last_contains": "a summarization agent"}, "first", TEXT, KEPT),
    "openclaw": Plan(
        1200, {"system_contains": "context summarization"}, "first", TEXT, KEPT + QUOTED
    ),
    "openhands": Plan(1500, {"system_contains": "state summary"}, "first", TEXT, KEPT + QUOTED),
    "pi": Plan(1700, {"system_contains": "context summarization"}, "first", TEXT, KEPT),
    "qwen_code": Plan(
        950,
        {"last_contains": "component that summarizes"},
        None,
        "same head",
        KEPT,
        later="what it tells at a start is put back before the summary one call later",
    ),
}

SETTINGS: dict[str, dict[str, Any]] = {
    # By itself it keeps twenty messages: more than this context has room for.
    "hermes": {"config": {"compression": {"protect_last_n": 4}}},
}

WITHOUT_THINKING = {("qwen_code", "google"): "template_args_changed"}
"""In this format the request for the summary switches thinking off, which makes it a root."""

ASKED_ONLY = "the SDK compacts only where its user's script asks for it"
NEVER = {
    "aider": "one instruction is one or two calls",
    "google_adk": ASKED_ONLY,
    "mini_swe_agent": "the program never shortens its history",
    "openai_agents": ASKED_ONLY,
}
CASES = [case.row for case in cases() if case.harness not in NEVER]


def script(harness, prints=None):
    """The summary, then three turns after it, then the turns that fill the context.

    `prints` gives the command that each of these runs; `None` = as planned, for `CONTEXT`.
    """
    plan = PLANNED[harness]
    prints = prints or (lambda number: f"seq {number}000 {number * 1000 + plan.lines}")

    def conversations(mark, _):
        shell = TOOLS[harness].run

        def fill(number):
            return f"echo '{mark}'; {prints(number)}"

        summed = f"Numbers were printed {mark} summed-up."
        summary: Turn = {
            "reasoning": "What counts?",
            "content": f"<analysis>\nA few.\n</analysis>\n\n<summary>\n{summed}\n</summary>",
        }
        if plan.asks.get("system_contains") == "state_snapshot" or harness == "qwen_code":
            summary["content"] = f"<state_snapshot>\n{summed}\n</state_snapshot>"
        end: Turn = {"content": "All is done."}
        if harness == "openhands":
            end = {"tool_calls": [tool("finish", message="All is done.")]}
        after, shown = summed_up(harness, summed, mark)
        steps = [
            {"reasoning": "On.", "content": f"Step {n}.\n", "tool_calls": [shell(fill(n))]}
            for n in range(10, 10 + STEPS)
        ]
        if harness == "gemini_cli":
            # Seeing a loop it speaks as the user, and it compresses before a user's words only.
            steps[5:10] = [steps[5]] * 5
        first = {"content": "I go on.", "tool_calls": [shell("echo on-one")]}
        second = {"tool_calls": [shell("echo 'a b' > on.txt; echo on-two")]}
        return [
            {"when": {**plan.asks, "user_contains": mark}, "turns": [summary]},
            *(
                {"when": {**after, "results_contain": [*shown, *result]}, "turns": [turn]}
                for result, turn in ((["on-two"], end), (["on-one"], second), ([], first))
            ),
            {"when": {"user_contains": mark}, "turns": steps},
        ]

    return conversations


def summed_up(harness, summed, mark):
    """Return what a request shows that goes on from the summary, and what its tool results show."""
    if harness == "opencode":  # there the model tells the summary
        return {"last_contains": "Continue if you have next steps"}, [mark]
    return {"user_contains": summed}, []


async def test_a_harness_s_compaction_call_trains_and_later_calls_are_linked_to_it(
    tmp_path, subtests, tried
):
    runs = [
        Run(
            harness,
            dialect,
            script(harness),
            check='test "$(cat on.txt)" = "a b"',
            settings=SETTINGS.get(harness, {}),
        )
        for harness, dialect in CASES
        if wanted(harness)
    ]
    for ran in await side_by_side(tmp_path, runs, context_length=CONTEXT):
        with (
            subtests.test(ran.run.name),
            tried(ran.run.harness, ran.run.dialect, "compaction"),
        ):
            succeeded(ran)
            compacted(ran)
            assert ran.stats["tokens_excluded"] == {}, ran.table()


def compacted(ran):
    """Two conversations of the agent, the second linked to the first; the summary's beside them."""
    plan = PLANNED[ran.run.harness]
    trees = ran.roots()
    before, after, *later = (t for t in trees if t[0].kind is Kind.AGENT)
    summaries = [e for e in ran.exchanges if e.kind is Kind.COMPACTION]
    assert before[0].root_reason == "first", ran.table()
    assert len(after) + sum(map(len, later)) == 3, ran.table()
    assert len(later) == bool(plan.later), ran.table()
    assert all(tree[0].root_reason == CHANGED for tree in later), ran.table()
    assert after[0].root_reason in plan.goes_on, ran.table()
    of_before = {e.exchange_id for e in (*before, *summaries)}
    assert after[0].continues in of_before, ran.table()
    assert len(before) + len(summaries) >= LEAST, ran.table()
    asked_as = WITHOUT_THINKING.get((ran.run.harness, ran.run.dialect), plan.asked_as)
    assert {e.root_reason for e in summaries} == {asked_as}, ran.table()
    own = [] if asked_as is None else summaries
    assert [t[0] for t in trees if t not in (before, after, *later)] == own, ran.table()


def test_harnesses_that_never_compact_have_a_noted_table_cell(cell):
    others = [case for case in cases() if case.harness in NEVER]
    assert {case.harness for case in others} == NEVER.keys()
    for case in others:
        cell(*case.row, "compaction", "n/a", NEVER[case.harness])


OVERFLOWS = {"claude_code": 2, "codex": 11, "opencode": 9, "qwen_code": 2}
"""Program -> how many outputs at once are more than the context has room for."""
FULL = 115_000


def overflowing(harness):
    """One turn, then one whose results no request has room for; the summary; one turn after it."""

    def conversations(mark, _):
        shell = TOOLS[harness].run
        asks = {**PLANNED[harness].asks, "user_contains": mark}
        after = {"user_contains": f"{mark} summed-up"}
        if harness == "opencode":  # there the model tells the summary, and the mark in it
            after = {"last_contains": "The previous request exceeded"}
        if harness == "qwen_code":
            asks = {"system_contains": "component that summarizes"}
        summed = f"<state_snapshot>\nNumbers were printed {mark} summed-up.\n</state_snapshot>"
        summary: Turn = {
            "content": f"<analysis>\nFew.\n</analysis>\n\n<summary>\n{summed}\n</summary>"
        }
        if harness == "qwen_code":
            summary = {"content": summed}
        # What Qwen Code has not read of its terminal when a command ends it never reads.
        end = "; sleep 2" if harness == "qwen_code" else ""
        many = [shell(f"seq {n}0000 {n}4900{end}") for n in range(1, OVERFLOWS[harness] + 1)]
        main: list[Turn] = [
            {"content": "One.", "tool_calls": [shell(f"seq 90000 94900{end}")]},
            {"content": "Many.", "tool_calls": many},
        ]
        work = {"content": "On.", "tool_calls": [shell("echo 'a b' > on.txt; echo on-one")]}
        return [
            {"when": asks, "turns": [summary]},
            {"when": {**after, "results_contain": "on-one"}, "turns": [{"content": "Done."}]},
            {"when": after, "turns": [work]},
            {"when": {"user_contains": mark}, "turns": main},
        ]

    return conversations


async def test_harnesses_compact_on_the_gateway_s_context_overflow_error(tmp_path, subtests):
    """Check it against the provider's own error. opencode continues with the error's exit code;
    Codex compacts by numbers alone and ends."""
    runs = [
        Run(
            harness,
            "anthropic" if harness == "claude_code" else str(open_harness(harness).dialect),
            overflowing(harness),
            check='test "$(cat on.txt)" = "a b"',
        )
        for harness in OVERFLOWS
        if wanted(harness)
    ]
    async with Door() as door:
        rans = await side_by_side(tmp_path, runs, context_length=FULL, door=door)
    in_stream = sum(run.harness == "codex" for run in runs)
    assert door.refused >= len(runs) - in_stream
    for ran in rans:
        with subtests.test(ran.run.name):
            kinds = [e.kind for e in ran.exchanges]
            if ran.run.harness == "codex":
                assert (ran.result.cause, ran.result.exit_code) == ("harness_model_error", 1)
                assert "prompt is too long" in str(ran.result.error)
                assert set(kinds) == {Kind.AGENT}, ran.table()
                continue
            if ran.run.harness == "opencode":
                assert (ran.result.cause, ran.result.exit_code) == ("harness_crash", 1), ran.table()
            else:
                succeeded(ran)
            assert kinds[:3] == [Kind.AGENT, Kind.AGENT, Kind.COMPACTION], ran.table()
            assert kinds[-1] == Kind.AGENT, ran.table()
            assert ran.stats["tokens_excluded"] == {}, ran.table()
