"""Tools that a provider defines and the client runs, as loops of the official SDKs."""

import asyncio
import subprocess
from typing import Any

import anthropic
import openai
from anthropic.tools import BetaLocalFilesystemMemoryTool
from anthropic.tools.browser import (
    BetaAbstractBrowserToolset20260801,
    BetaBrowserNavigateResult,
    BetaBrowserState,
)
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


async def test_a_run_with_anthropic_s_bash_and_editor_tools_is_one_agent_conversation(tmp_path):
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


class Browser(BetaAbstractBrowserToolset20260801):
    """A browser of one page."""

    def navigate(self, context, asked):
        return BetaBrowserNavigateResult(url=asked.url, status=200, title="Home")

    def find(self, context, asked):
        return f"[ref_7] {asked.query}"

    def _browser_state(self, context):
        tab: Any = {"tab_id": "t1", "active": True, "title": "Home", "url": "https://a.example/"}
        return BetaBrowserState(tabs=[tab])


def browse(action, **arguments):
    return {"name": "browser", "arguments": {"action": action, **arguments}}


async def test_anthropic_s_browser_toolset_runs_in_the_sdk_s_tool_runner():
    turns = (
        {"tool_calls": [browse("navigate", url="https://a.example/")]},
        {"content": "Look.", "tool_calls": [browse("find", query="search"), browse("fly")]},
        {"content": "ref_7"},
    )
    async with house(*turns) as home:
        caller = await home.session()
        with anthropic.Anthropic(
            base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key
        ) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=500, tools=[Browser()], messages=[user("find the search")]
            )
            said: Any = await asyncio.to_thread(list, runner)
        assert [block.type for reply in said for block in reply.content].count("tool_use") == 3
        assert said[0].content[0].toolset_name == "browser"
        assert said[2].content[0].text == "ref_7"
        one, two, three = caller.exchanges
        assert (two.parent_id, three.parent_id) == (one.exchange_id, two.exchange_id)
        assert {exchange.kind for exchange in caller.exchanges} == {"agent"}
        path = f"/sessions/{caller.session_id}/trajectory"
        stats = (await home.control("GET", path))[1]["metadata"]["stats"]
        assert (stats["turns_verbatim"], stats["turns_shown"], stats["unknown"]) == (3, 3, {})


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


async def test_a_computer_use_call_is_sent_as_a_computer_call_item():
    click = {"type": "click", "x": 3, "y": 4, "button": "left"}
    async with house({"tool_calls": [{"name": "computer", "arguments": click}]}) as home:
        caller = await home.session()
        url = caller.handle.base_urls["openai"]
        async with openai.AsyncOpenAI(base_url=url, api_key=caller.handle.key) as client:
            size: Any = {"display_width": 800, "display_height": 600, "environment": "linux"}
            older: Any = {"type": "computer_use_preview", **size}
            newer: Any = {"type": "computer"}
            said: list[Any] = [
                (await client.responses.create(model="m", input="go", tools=[tool])).output[0]
                for tool in (older, newer)
            ]
            async with client.responses.stream(model="m", input="on", tools=[newer]) as stream:
                said.append((await stream.get_final_response()).output[0])
        assert [item.type for item in said] == ["computer_call"] * 3
        assert said[0].action.x == said[1].actions[0].x == said[2].actions[0].x == 3
