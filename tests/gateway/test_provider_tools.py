"""Tools that a provider defines and the client runs, as loops of the official SDKs."""

import asyncio
import subprocess
from typing import Any

import anthropic
from anthropic.tools import BetaLocalFilesystemMemoryTool
from tests.gateway.house import house, user

EDITOR = "str_replace_based_edit_tool"
TOOLS: Any = [
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": EDITOR},
]
WORK = (
    {
        "content": "I write it.",
        "tool_calls": [
            {
                "name": EDITOR,
                "arguments": {"command": "create", "path": "a.txt", "file_text": "one\n"},
            }
        ],
    },
    {"tool_calls": [{"name": "bash", "arguments": {"command": "cat a.txt"}}]},
    {"content": "It says one."},
)


def anthropic_of(caller) -> Any:
    return anthropic.AsyncAnthropic(
        base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key, max_retries=0
    )


def run(folder, block):
    """Return what a quickstart does with a call: run the command, or write the file."""
    if block.name == "bash":
        done = subprocess.run(
            ["bash", "-c", block.input["command"]],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout
    (folder / block.input["path"]).write_text(block.input["file_text"])
    return "written"


async def test_bash_and_the_editor_of_anthropic_are_one_agent_s_conversation(tmp_path):
    async with house(*WORK) as home:
        caller = await home.session()
        messages: list[Any] = [user("write one")]
        async with anthropic_of(caller) as client:
            while True:
                reply = await client.messages.create(
                    model="m", max_tokens=500, tools=TOOLS, messages=messages
                )
                messages.append({"role": "assistant", "content": reply.content})
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": c.id, "content": run(tmp_path, c)}
                    for c in calls
                ]
                messages.append({"role": "user", "content": results})
        assert messages[-2]["content"][0]["content"] == "one\n"
        one, two, three = caller.exchanges
        assert (two.parent_id, three.parent_id) == (one.exchange_id, two.exchange_id)
        assert {exchange.kind for exchange in caller.exchanges} == {"agent"}


async def test_anthropic_s_memory_tool_runs_in_the_sdk_s_own_loop(tmp_path):
    note = {"command": "create", "path": "/memories/a.txt", "file_text": "coffee"}
    turns = ({"tool_calls": [{"name": "memory", "arguments": note}]}, {"content": "kept"})
    async with house(*turns) as home:
        caller = await home.session()
        memory = BetaLocalFilesystemMemoryTool(base_path=str(tmp_path))
        with anthropic.Anthropic(
            base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key
        ) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=500, tools=[memory], messages=[user("remember")]
            )
            last: Any = await asyncio.to_thread(runner.until_done)
        assert last.content[0].text.strip() == "kept"
        assert [path.read_text() for path in tmp_path.rglob("a.txt")] == ["coffee"]
        assert caller.exchanges[1].parent_id == caller.exchanges[0].exchange_id


async def test_a_tool_that_only_the_provider_runs_is_removed_and_named_and_the_call_trains():
    async with house({"content": "a"}) as home:
        caller = await home.session(metadata={"harness": "claude_code"})
        search: Any = {"type": "web_search_20250305", "name": "web_search"}
        async with anthropic_of(caller) as client:
            await client.messages.create(
                model="m", max_tokens=50, tools=[search], messages=[user("find the answer")]
            )
        (exchange,) = caller.exchanges
        assert exchange.extra["removed"] == {"server_tools": ["web_search_20250305"]}
        assert (exchange.kind, "kind_rule" in exchange.extra) == ("agent", False)
        _, shown = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        stats = shown["metadata"]["stats"]
        assert stats["unenforced"] == {"tool: web_search_20250305": 1}
        assert stats["tokens_trained"] == stats["tokens_captured"] > 0
