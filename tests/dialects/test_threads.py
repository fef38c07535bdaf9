"""Anthropic's message threads: conversations that the gateway holds between requests."""

from typing import Any

import anthropic
import orjson
import pytest
from anthropic import beta_async_tool
from tests.gateway.house import house
from tests.gateway.test_data import request
from tests.gateway.test_restore import on_disk

TURNS = (
    {"reasoning": "hm", "tool_calls": [{"name": "look", "arguments": {"path": "a"}}]},
    {
        "content": "Both of them.",
        "tool_calls": [
            {"name": "look", "arguments": {"path": "b"}},
            {"name": "look", "arguments": {"path": "c"}},
        ],
    },
    {"content": "The end."},
)
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@beta_async_tool
async def look(path: str) -> str:
    """Look at a file.

    Args:
        path: Which one.
    """
    return f"what is in {path}"


def client_of(caller) -> Any:
    return anthropic.AsyncAnthropic(
        base_url=caller.handle.base_urls["anthropic"], api_key=caller.handle.key, max_retries=0
    )


def is_one_path(caller, turns):
    """Each exchange extends the one before by its exact ids."""
    exchanges = caller.exchanges
    assert len(exchanges) == turns
    assert [one.parent_id for one in exchanges[1:]] == [one.exchange_id for one in exchanges[:-1]]


async def send(caller, **body):
    """Status and JSON of a `POST /v1/messages`."""
    path = f"/s/{caller.session_id}/v1/messages"
    sent = {"model": "m", "max_tokens": 500, **body}
    status, _, raw = await request(caller.house, "POST", path, key=caller.handle.key, body=sent)
    return status, orjson.loads(raw)


async def begin(caller):
    """A thread's first reply, which calls a tool; and the message with that call's result."""
    asked = [{"role": "user", "content": "compare"}]
    status, first = await send(
        caller, system="Be brief.", tools=[TOOL], messages=asked, thread={"type": "create"}
    )
    assert status == 200, first
    call = next(block for block in first["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "what is in a"}
    return first, {"role": "user", "content": [result]}


def continues(reply_id):
    return {"type": "continue", "previous_message_id": reply_id}


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_sdk_s_tool_runner_samples_every_turn_under_its_whole_history(streamed):
    async with house(*TURNS) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=500, system="Be brief.", tools=[look],
                messages=[{"role": "user", "content": "compare"}], stream=streamed,
            )  # fmt: skip
            last = await runner.until_done()
        assert last.content[0].text.strip() == "The end."
        is_one_path(caller, 3)
        assert b'"continue"' in caller.exchanges[2].request.head
        assert b"Be brief." in caller.exchanges[2].request.head
        assert caller.exchanges[2].request.tools == caller.exchanges[0].request.tools
        assert caller.exchanges[2].request.kept_spans == 3, "the history is not stored again"


async def test_a_thread_can_be_continued_after_a_gateway_restart(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, *TURNS) as home:
        caller = await home.session("one")
        first, result = await begin(caller)
    async with on_disk(path, *TURNS) as home:
        caller.house = home
        status, outcome = await send(caller, messages=[result], thread=continues(first["id"]))
        assert status == 200, outcome
        is_one_path(caller, 2)


async def test_the_anthropic_sdk_sends_its_whole_history_again_if_the_message_thread_is_unknown():
    async with house(*TURNS) as home:
        one, other = await home.session("one"), await home.session("other")
        async with client_of(one) as client, client_of(other) as elsewhere:
            thread = client.beta.messages.thread(model="m", max_tokens=500, tools=[TOOL])
            first = await thread.send({"role": "user", "content": "compare"})
            thread._client = elsewhere
            call = next(block for block in first.content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "x"}
            await thread.send({"role": "user", "content": [result]})
        [replayed] = other.exchanges
        assert len(replayed.request.spans) == 3
        assert b'"create"' in replayed.request.head


async def test_continuing_a_thread_from_an_unknown_message_is_a_404_thread_not_found():
    async with house(*TURNS) as home:
        caller = await home.session()
        messages = [{"role": "user", "content": "on"}]
        status, result = await send(caller, messages=messages, thread=continues("msg_none"))
        assert status == 404
        assert result["error"]["type"] == "not_found_error"
        assert result["error"]["details"] == {"error_code": "thread_not_found"}
        assert "msg_none" in result["error"]["message"]
        assert caller.exchanges == []


async def test_a_reply_that_began_no_thread_cannot_be_continued():
    async with house(*TURNS) as home:
        caller = await home.session()
        messages = [{"role": "user", "content": "go"}]
        _, first = await send(caller, messages=messages)
        status, result = await send(caller, messages=messages, thread=continues(first["id"]))
        assert (status, result["error"]["details"]["error_code"]) == (404, "thread_not_found")


@pytest.mark.parametrize("field", ["system", "tools"])
async def test_thread_refuses_repeated_system_and_tools(field):
    async with house(*TURNS) as home:
        caller = await home.session()
        first, result = await begin(caller)
        again = {"system": "Be long.", "tools": [TOOL]}[field]
        thread = continues(first["id"])
        status, outcome = await send(caller, messages=[result], thread=thread, **{field: again})
        assert (status, outcome["error"]["type"]) == (400, "invalid_request_error")
        assert field in outcome["error"]["message"]


@pytest.mark.parametrize("thread", [{"type": "resume"}, {"type": "continue"}, {}, 5])
async def test_a_thread_of_no_known_form_is_refused(thread):
    async with house(*TURNS) as home:
        caller = await home.session()
        status, result = await send(
            caller, messages=[{"role": "user", "content": "go"}], thread=thread
        )
        assert (status, result["error"]["type"]) == (400, "invalid_request_error")
        assert "thread" in result["error"]["message"]


async def test_a_thread_may_be_continued_twice_from_one_reply():
    async with house(*TURNS) as home:
        caller = await home.session()
        first, result = await begin(caller)
        other = {"role": "user", "content": [{**result["content"][0], "content": "something else"}]}
        for message in (result, other):
            status, outcome = await send(caller, messages=[message], thread=continues(first["id"]))
            assert status == 200, outcome
        root, *branches = caller.exchanges
        assert [branch.parent_id for branch in branches] == [root.exchange_id] * 2
