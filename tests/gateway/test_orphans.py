"""Tool results whose call the request does not show: refused in each provider's shape."""

from typing import Any

import orjson
import pytest
from tests.gateway.house import SHELL_TOOL, house, tool_result, user
from tests.gateway.test_data import request
from tests.gateway.test_restore import again, on_disk

from bridle.config import SamplingPolicy

CALL = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
TOOLS = [SHELL_TOOL]
SERVE = SamplingPolicy(orphans="serve")
TYPES = (
    "function_call_output",
    "custom_tool_call_output",
    "computer_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "tool_search_output",
)
ORPHANS: dict[str, Any] = {
    "/v1/chat/completions": [
        {"messages": [user("go"), {"role": "tool", "tool_call_id": "lost", "content": "r"}]},
        {"messages": [user("go"), {"role": "function", "name": "lost", "content": "r"}]},
    ],
    "/v1/messages": [
        {
            "max_tokens": 100,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "lost", "content": "r"}],
                },
            ],
        }
    ],
    "/v1/responses": [
        *(
            {"input": [user("go"), {"type": kind, "call_id": "lost", "output": "r", "tools": []}]}
            for kind in TYPES
        ),
        {"input": [user("go"), {"type": "local_shell_call_output", "id": "lost", "output": "r"}]},
    ],
    "/v1beta/models/m:generateContent": [
        {"contents": [{"parts": [{"functionResponse": {"name": "lost", "response": {}}}]}]}
    ],
}
BODIES = [(path, body) for path, bodies in ORPHANS.items() for body in bodies]


async def send(caller, path, body):
    """Status and JSON of a request."""
    whole = {"model": "m", **body} if "models" not in path else body
    path = f"/s/{caller.session_id}{path}"
    status, _, raw = await request(caller.house, "POST", path, key=caller.handle.key, body=whole)
    return status, orjson.loads(raw)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_tool_result_without_a_call_is_a_400_and_the_session_stays_usable(path, body):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, answer = await send(caller, path, body)
        assert status == 400
        assert "lost" in answer["error"]["message"]
        assert 'sampling.orphans = "serve"' in answer["error"]["message"]
        assert caller.exchanges == []
        assert (await caller.ask([user("go")]))["content"].strip() == "a"


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_tool_result_without_a_call_is_served_and_counted_if_the_policy_allows(path, body):
    async with house({"content": "a"}) as home:
        caller = await home.session(sampling=SERVE)
        status, answer = await send(caller, path, body)
        assert status == 200, answer
        [exchange] = caller.exchanges
        assert exchange.extra["orphans"] == 1


async def test_a_call_without_a_result_is_served_and_counted_once(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, CALL, {"content": "a"}, {"content": "b"}, {"content": "c"}) as home:
        caller = await home.session("one")
        messages = [user("list")]
        messages.append(await caller.ask(messages, tools=TOOLS))
        messages.append(user("never mind"))
        messages.append(await caller.ask(messages, tools=TOOLS))
        messages.append(user("on"))
        await caller.ask(messages, tools=TOOLS)
    async with on_disk(path, {"content": "b"}, {"content": "c"}) as home:
        caller = again(home, caller)
        await caller.ask(
            [*messages, {"role": "assistant", "content": "b"}, user("more")], tools=TOOLS
        )
        assert [e.extra.get("unpaired", 0) for e in caller.exchanges] == [0, 1, 0, 0]


async def test_a_result_may_come_late_and_out_of_order():
    async with house(CALL, {"content": "a"}, {"content": "b"}) as home:
        caller = await home.session()
        messages = [user("list")]
        messages.append(await caller.ask(messages, tools=TOOLS))
        [call] = messages[-1]["tool_calls"]
        messages += [user("wait"), await caller.ask([*messages, user("wait")], tools=TOOLS)]
        await caller.ask([*messages, tool_result(call, "a.txt")], tools=TOOLS)
        assert [e.extra.get("unpaired", 0) for e in caller.exchanges] == [0, 1, 0]
