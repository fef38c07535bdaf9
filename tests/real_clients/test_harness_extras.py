"""MCP servers and skills of a task reach the unmodified programs in the form that each takes.

The sessions run beforehand, some at a time; each test judges one.
"""

import asyncio
import contextlib
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.real_clients.real import at_once, chosen, run

from bridle.prompting.renderer import load_renderer

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]

SERVER = Path(__file__).with_name("mcp_server.py")
SKILL = """---
name: tidy-up
description: How to put the quartzbarn files in order.
---
Remove what is not needed.
"""

PREFIXES = {
    "claude_agent_sdk": "mcp__{}__",
    "claude_code": "mcp__{}__",
    "cline": "{}__",
    "codex": "mcp__{}__",
    "copilot": "{}-",
    "gemini_cli": "mcp_{}_",
    "google_adk": "{}_",
    "hermes": "mcp__{}__",
    "openai_agents": "mcp_{}__",
    "openclaw": "{}__",
    "opencode": "{}_",
    "openhands": "{}_",
    "pi": "mcp__{}__",
    "qwen_code": "mcp__{}__",
}
"""What each program puts before the name of a server's tool."""


@contextlib.asynccontextmanager
async def http_server(folder):
    """An MCP server over HTTP; yields its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), str(folder / "stamps.txt"), str(folder / "port")
    )
    try:
        while not (folder / "port").exists() or not (folder / "port").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}/mcp"
    finally:
        process.kill()
        await process.wait()


async def stamped(harness, folder):
    """Return a session that called a tool of each server, and the servers' requests."""
    folder.mkdir()
    stdio = {
        "name": "near",
        "command": sys.executable,
        "args": [str(SERVER), str(folder / "stamps.txt")],
    }
    near, far = (PREFIXES[harness].format(name) + "stamp" for name in ("near", "far"))
    turns = [
        {"tool_calls": [{"name": near, "arguments": {"text": "by stdio"}}]},
        {"tool_calls": [{"name": far, "arguments": {"text": "by http"}}]},
        {"content": "Both are stamped."},
    ]
    async with http_server(folder) as url:
        remote = {"name": "far", "transport": "streamable-http", "url": url}
        result, exchanges = await run(
            folder,
            harness,
            agent={"mcp_servers": [stdio, remote]},
            runtime={"kwargs": {"doors": [urlsplit(url).port]}},
            turns=turns,
            check="true",
        )
    return result, exchanges, (folder / "stamps.txt").read_text()


async def skilled(harness, folder):
    """Return what a session said that was given a skill."""
    (folder / "skills/tidy-up").mkdir(parents=True)
    (folder / "skills/tidy-up/SKILL.md").write_text(SKILL)
    return await run(
        folder,
        harness,
        agent={"skills_path": "skills"},
        turns=[{"content": "I see it."}],
        check="true",
    )


@pytest.fixture(scope="module")
def sessions(request, tmp_path_factory):
    """Return which kind of session, and harness -> its outcome; some run at a time."""
    folder = tmp_path_factory.mktemp("extras")
    works = {
        (work, harness): partial(work, harness, folder / f"{work.__name__}-{harness}")
        for work, name in ((stamped, "caller"), (skilled, "reader"))
        for harness in sorted(chosen(request, name))
    }
    return asyncio.run(at_once(works))


@pytest.mark.parametrize("caller", sorted(PREFIXES))
def test_harnesses_call_tools_of_mcp_servers_over_stdio_and_http(sessions, caller):
    result, exchanges, stamps = sessions[stamped, caller].result()
    assert (result.status, result.error) == ("COMPLETED", None)
    assert stamps.split("\n")[:2] == ["by stdio", "by http"]
    assert len(exchanges) == 3
    assert result.trajectory.metadata["stats"]["merge_ratio"] == 1.0


@pytest.mark.parametrize("reader", sorted(PREFIXES.keys() - {"openai_agents"}))
def test_a_task_s_skills_are_in_the_prompt_of_each_harness(sessions, reader):
    result, exchanges = sessions[skilled, reader].result()
    assert (result.status, result.error) == ("COMPLETED", None)
    # Cline tells only their names.
    outcome = "tidy-up" if reader == "cline" else "quartzbarn"
    assert outcome in load_renderer("builtin").decode(exchanges[0].suffix_ids)
