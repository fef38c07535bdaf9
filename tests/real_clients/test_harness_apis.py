"""Every packaged program, unmodified, in every wire format that it speaks: three calls, no fork."""

import pytest
from tests.real_clients.real import did_its_work, run

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
    ("qwen_code", {"api": "openai_chat"}),
    ("qwen_code", {"api": "anthropic"}),
    ("qwen_code", {"api": "google"}),
]


def named(case):
    return "-".join((case[0], *(str(v) if k == "api" else k for k, v in case[1].items())))


@pytest.mark.parametrize(("harness", "settings"), CASES, ids=map(named, CASES))
async def test_it_works_through_the_gateway_and_nothing_is_lost(tmp_path, harness, settings):
    agent = {"settings": settings}
    if (harness, settings.get("api")) == ("cline", "google"):
        agent["model_name"] = "gemini-3-bridle"
    result, exchanges = await run(tmp_path, harness, agent=agent)
    did_its_work(result, exchanges)
    if "api" in settings:
        assert {str(exchange.dialect) for exchange in exchanges} == {settings["api"]}


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
    tmp_path, git
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
