"""Every packaged program, unmodified, in every wire format that it speaks: three calls, no fork.

Once with replies that leave whole, and once with live ones. The sessions run beforehand, some at a
time; each test judges one.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tests.real_clients.matrix import HAS_NO_STREAM, MINI_ENDS, ONE_ROW, cases
from tests.real_clients.real import TURNS, at_once, chosen, did_its_work, run

from bridle.harnesses import open_harness
from bridle.types import Dialect

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("claude_agent_sdk", {}),
    ("claude_code", {}),
    ("claude_code", {"bare": True}),
    ("cline", {"api": "openai_chat"}),
    ("cline", {"api": "openai_responses"}),
    ("cline", {"api": "anthropic"}),
    ("cline", {"api": "google"}),
    ("codex", {}),
    ("copilot", {"api": "openai_chat"}),
    ("copilot", {"api": "openai_responses"}),
    ("copilot", {"api": "anthropic"}),
    ("gemini_cli", {}),
    ("google_adk", {}),
    ("google_adk", {"stream": True}),
    ("hermes", {"api": "openai_chat"}),
    ("hermes", {"api": "anthropic"}),
    ("hermes", {"api": "openai_responses"}),
    *(("mini_swe_agent", {"api": str(dialect)}) for dialect in Dialect),
    ("openai_agents", {"api": "openai_responses"}),
    ("openai_agents", {"api": "openai_responses", "stream": True}),
    ("openai_agents", {"api": "openai_chat"}),
    ("openai_agents", {"api": "openai_chat", "stream": True}),
    *(("openclaw", {"api": str(dialect)}) for dialect in Dialect),
    ("opencode", {"api": "openai_chat"}),
    ("opencode", {"api": "openai_responses"}),
    ("opencode", {"api": "anthropic"}),
    ("opencode", {"api": "google"}),
    ("openhands", {"api": "openai_chat"}),
    ("openhands", {"api": "anthropic"}),
    *(("pi", {"api": str(dialect)}) for dialect in Dialect),
    ("qwen_code", {"api": "openai_chat"}),
    ("qwen_code", {"api": "anthropic"}),
    ("qwen_code", {"api": "google"}),
]


ROWS = {case.row for case in cases()}


@dataclass(frozen=True)
class Work:
    """One session: its harness, its wire format, its settings, how its replies leave."""

    harness: str
    dialect: str
    settings: tuple[tuple[str, Any], ...]
    live: bool

    def __str__(self):
        result = (v if k == "api" else k for k, v in self.settings)
        return "-".join((self.harness, *map(str, result), *(("live",) if self.live else ())))

    @property
    def columns(self):
        """Cells that it fills."""
        return ("live",) if self.live else ("plain", "parallel")

    async def run(self, folder):
        """Its result, and its exchanges."""
        folder.mkdir()
        agent: dict[str, Any] = {"settings": dict(self.settings)}
        if (self.harness, self.dialect) == ("cline", "google"):
            agent["model_name"] = "gemini-3-bridle"
        turns = TURNS
        if self.harness == "mini_swe_agent":
            turns = [*TURNS[:-1], {**TURNS[-1], "shell": [MINI_ENDS]}]
        return await run(folder, self.harness, agent=agent, turns=turns, live=self.live)


def works():
    """Every case with whole replies, and with live ones each row that can stream.

    Of a program with one row the other wire formats have live replies only.
    """
    for harness, settings in CASES:
        dialect = str(settings.get("api", open_harness(harness).dialect))
        live = harness in ONE_ROW and (harness, dialect) not in ROWS
        yield Work(harness, dialect, tuple(settings.items()), live=live)
    for case in cases():
        if case.streams and case.harness != "aider":
            yield Work(*case.row, tuple(case.settings.items()), live=True)


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """Work -> its outcome."""
    folder = tmp_path_factory.mktemp("works")
    to_do = sorted(chosen(request, "work"), key=str)
    return asyncio.run(at_once({work: partial(work.run, folder / str(work)) for work in to_do}))


@pytest.mark.parametrize("work", list(works()), ids=str)
def test_each_harness_completes_a_task_through_the_gateway_in_each_dialect(ran, tried, work):
    with ExitStack() as cells:
        if (work.harness, work.dialect) in ROWS:
            for column in work.columns:
                cells.enter_context(tried(work.harness, work.dialect, column))
        result, exchanges = ran[work].result()
        did_its_work(result, exchanges)
        assert {str(exchange.dialect) for exchange in exchanges} == {work.dialect}
        if work.live:
            assert [exchange.extra["stream"] for exchange in exchanges] == ["live"] * 3


@pytest.mark.core
def test_harnesses_without_streaming_have_no_live_result_in_the_table(cell):
    for case in cases():
        if not case.streams:
            cell(*case.row, "live", "n/a", HAS_NO_STREAM)


@pytest.mark.drawn_with("openhands")
async def test_openhands_text_protocol_forks_where_it_appends_to_the_sampled_text(tmp_path):
    """It stops the model before `</function>` and sends the turn back with it: not what was
    sampled, so the next call starts anew and says which call it continues and why."""
    call = "<function=terminal>\n<parameter=command>echo hello > made.txt</parameter>\n</function>"
    finish = "<function=finish>\n<parameter=message>made</parameter>\n</function>"
    result, exchanges = await run(
        tmp_path,
        "openhands",
        agent={"settings": {"native_tool_calling": False}},
        turns=[{"content": f"I make it.\n\n{call}"}, {"content": f"Done.\n\n{finish}"}],
        check='test "$(cat made.txt)" = hello',
    )
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    first, second = exchanges
    assert (second.root_reason, second.continues) == ("text_appended", first.exchange_id)
    stats = result.trajectory.metadata["stats"]
    assert (stats["roots"], stats["traces"], stats["merge_ratio"]) == (2, 2, 0.0)
    assert stats["tokens_captured"] == stats["tokens_trained"]


@pytest.mark.drawn_with("aider")
@pytest.mark.parametrize("git", [False, True])
async def test_aider_writes_files_from_text_and_adds_no_git_files_to_the_work_folder(
    tmp_path, git, cell
):
    """In the repository its replies come live."""
    files = "\n\n".join(f"{n}\n```\n{t}\n```" for n, t in [("made.txt", "hello"), ("one.txt", 1)])
    check = 'test "$(cat made.txt)" = hello && test "$(cat one.txt)" = 1 && test ! -e .gitignore'
    actions = [{"type": "exec", "command": "git init -q"}] if git else []
    result, exchanges = await run(
        tmp_path,
        "aider",
        agent={"settings": {"files": ["made.txt"]}},
        runtime={"prepare": actions},
        turns=[{"content": files}],
        check=check if git else f"{check} && test ! -e .git",
        live=git,
    )
    did_its_work(result, exchanges, calls=1)
    assert exchanges[0].extra["stream"] == ("live" if git else "whole")
    cell("aider", "openai_chat", "live" if git else "plain")
    cell("aider", "openai_chat", "parallel", "n/a", "It has no tools: it reads files from text.")
