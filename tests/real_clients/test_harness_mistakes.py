"""Unmodified programs with a model that makes mistakes, or whose calls are refused for good.

In one session the model calls a tool that nobody offers, then the shell tool with arguments that
are no JSON, and then does the work: each program tells it what was wrong, and nothing forks. A 400
(of the engine, through the gateway) and a 404 (in the dialect's own shape) end a run: its session
says so, whatever the exit code is. At least one program of each dialect.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tests.real_clients.door import Door, Nowhere
from tests.real_clients.real import at_once, chosen, run

from bridle.capture.sqlite import SqliteReader

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]

REPAIRED = "It repairs the arguments, and runs the call."
RENAMED = "It makes a call of its own tool `invalid` of it."
GONE = "It asks {}, and ends with exit code {}."
TIMES = {1: "once", 2: "twice"}
CUT_OFF = '{"command": "echo x > odd.txt", '


@dataclass(frozen=True)
class Habit:
    """Behaviour of one program."""

    dialect: str
    shell: str
    unknown: str
    """Words of what it says of a tool that it does not have."""
    malformed: str | None
    """Words of what it says of arguments that are no JSON; `None` = it repairs them."""
    refused: int
    """Exit code after a 400."""
    missing: int
    """Exit code after a 404."""
    renames: bool = False
    """Whether the call comes back under another name."""


HABITS = {
    "claude_code": Habit(
        "anthropic", "Bash", "No such tool available: look_around", "InputValidationError", 1, 1
    ),
    "codex": Habit(
        "openai_responses", "exec_command", "unsupported call: look_around", "failed to parse", 1, 1
    ),
    "gemini_cli": Habit(
        "google", "run_shell_command", 'Tool "look_around" not found', "required property", 144, 1
    ),
    "opencode": Habit(
        "openai_chat", "bash", "unavailable tool 'look_around'", "Invalid input", 1, 1, renames=True
    ),
    "pi": Habit("openai_chat", "bash", "Tool look_around not found", None, 0, 0),
    "qwen_code": Habit(
        "openai_chat", "run_shell_command", 'Tool "look_around" not found', None, 1, 1
    ),
}
AGAIN = {("claude_code", "404"): 2, ("codex", "404"): 6}
"""How often a program asks what was refused; else once."""
ONE_DIALECT = {"claude_code", "codex", "gemini_cli"}
WORKS = [(name, what) for name in HABITS for what in ("mistakes", "400", "404")]


def mistakes(harness: str) -> list[dict[str, Any]]:
    """The conversations of a model that is wrong twice."""
    broken = f'{{"name": "{HABITS[harness].shell}", "arguments": {CUT_OFF}}}'
    wrong = [
        {"content": "I look.", "tool_calls": [{"name": "look_around", "arguments": {"at": "it"}}]},
        {"raw": f"I do it.\n<tool_call>\n{broken}\n</tool_call>"},
    ]
    work = {"content": "Again.", "shell": ["echo x > made.txt; echo did-it"]}
    end = {"when": {"results_contain": "did-it"}, "turns": [{"content": "It is done."}]}
    return [end, {"turns": [*wrong, work]}]


async def play(folder, harness, what):
    """The result of one session, its capture, and how often the model was asked in vain."""
    folder.mkdir()
    refusing = [{"turns": [{"content": "no", "fault": 400}]}]
    agent = {} if harness in ONE_DIALECT else {"settings": {"api": HABITS[harness].dialect}}
    async with Nowhere() if what == "404" else Door() as door:
        result, _ = await run(
            folder,
            harness,
            agent=agent,
            check="test -e made.txt",
            turns=[],
            conversations=mistakes(harness) if what == "mistakes" else refusing,
            door=door,
        )
    with SqliteReader(folder / "capture.sqlite") as reader:
        capture = reader.read(result.session_id)
    return result, capture, door.asked if isinstance(door, Nowhere) else door.refused


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """(harness, what) -> its outcome."""
    folder = tmp_path_factory.mktemp("mistakes")
    works = {
        work: partial(play, folder / "-".join(work), *work)
        for work in sorted(chosen(request, "work"))
    }
    return asyncio.run(at_once(works))


@pytest.mark.parametrize("work", [(h, w) for h, w in WORKS if w == "mistakes"], ids="-".join)
def test_harnesses_report_malformed_tool_calls_to_the_model_and_continue(played, tried, work):
    harness, _ = work
    habit = HABITS[harness]
    result, capture, _ = played[work].result()
    note = REPAIRED if habit.malformed is None else RENAMED if habit.renames else ""
    row = (harness, habit.dialect)
    stats = result.trajectory.metadata["stats"]
    outcome = b"\n".join(capture.bodies.values()).decode().replace('\\"', '"')
    with (
        tried(*row, "unknown_tool", RENAMED if habit.renames else ""),
        tried(*row, "bad_arguments", note),
    ):
        assert (result.status, result.reward, result.exit_code) == ("COMPLETED", 1.0, 0)
        assert (stats["exchanges"], stats["roots"], stats["branches"]) == (4, 1, 0), stats
        assert (stats["merge_ratio"], stats["tokens_excluded"]) == (1.0, {}), stats
        assert habit.unknown in outcome
        if habit.malformed is None:
            assert stats["drift"] == {"exact": 2, "rewritten_args": 1}
        else:
            assert habit.malformed in outcome
            rewritten = {"exact": 1, "rewritten_call": 2} if habit.renames else {"exact": 3}
            assert stats["drift"] == rewritten


@pytest.mark.parametrize("work", [(h, w) for h, w in WORKS if w != "mistakes"], ids="-".join)
def test_a_model_call_refused_with_a_permanent_status_ends_the_session_with_an_error(
    played, cell, work
):
    harness, status = work
    habit = HABITS[harness]
    result, capture, asked = played[work].result()
    exit_code = habit.refused if status == "400" else habit.missing
    assert (result.status, result.reward, result.exit_code) == ("ERROR", None, exit_code)
    assert asked == AGAIN.get(work, 1)
    assert not capture.exchanges
    note = GONE.format(TIMES.get(asked, f"{asked} times"), exit_code)
    cell(harness, habit.dialect, status, "fails", note)
