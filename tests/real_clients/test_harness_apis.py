"""Every packaged program, unmodified, in every wire format that it speaks: three calls, no fork."""

from contextlib import ExitStack

import pytest
from tests.real_clients.matrix import MINI_ENDS, ROWLESS
from tests.real_clients.real import TURNS, did_its_work, run

from bridle.harnesses import open_harness

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900)]

CASES = [
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
    ("mini_swe_agent", {}),
    ("openai_agents", {"api": "openai_responses"}),
    ("openai_agents", {"api": "openai_responses", "stream": True}),
    ("openai_agents", {"api": "openai_chat"}),
    ("openai_agents", {"api": "openai_chat", "stream": True}),
    ("openclaw", {"api": "openai_chat"}),
    ("opencode", {"api": "openai_chat"}),
    ("opencode", {"api": "openai_responses"}),
    ("opencode", {"api": "anthropic"}),
    ("opencode", {"api": "google"}),
    ("openhands", {"api": "openai_chat"}),
    ("openhands", {"api": "anthropic"}),
    ("pi", {}),
    ("qwen_code", {"api": "openai_chat"}),
    ("qwen_code", {"api": "anthropic"}),
    ("qwen_code", {"api": "google"}),
]


def named(case):
    return "-".join((case[0], *(str(v) if k == "api" else k for k, v in case[1].items())))


@pytest.mark.parametrize(("harness", "settings"), CASES, ids=map(named, CASES))
async def test_it_works_through_the_gateway_and_nothing_is_lost(tmp_path, tried, harness, settings):
    agent = {"settings": settings}
    dialect = settings.get("api", str(open_harness(harness).dialect))
    if (harness, dialect) == ("cline", "google"):
        agent["model_name"] = "gemini-3-bridle"
    turns = TURNS
    if harness == "mini_swe_agent":
        turns = [*TURNS[:-1], {**TURNS[-1], "shell": [MINI_ENDS]}]
    with ExitStack() as cells:
        if harness not in ROWLESS:
            for column in ("plain", "parallel"):
                cells.enter_context(tried(harness, dialect, column))
        result, exchanges = await run(tmp_path, harness, agent=agent, turns=turns)
        did_its_work(result, exchanges)
        assert {str(exchange.dialect) for exchange in exchanges} == {dialect}


async def test_openhands_text_protocol_forks_where_it_completes_what_was_sampled(tmp_path):
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


@pytest.mark.parametrize("git", [False, True])
async def test_aider_writes_files_from_text_and_leaves_the_work_folder_as_it_found_it(
    tmp_path, git, cell
):
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
    )
    did_its_work(result, exchanges, calls=1)
    cell("aider", "openai_chat", "plain")
    cell("aider", "openai_chat", "parallel", "n/a", "It has no tools: it reads files from text.")
