"""Stored replies, by their id: continued, read, listed, deleted."""

import asyncio
from io import BytesIO
from typing import Any

import openai
import orjson
import pytest
from tests.gateway.gated import Gated
from tests.gateway.house import house, scripted
from tests.gateway.test_data import request
from tests.gateway.test_relay import late
from tests.gateway.test_restore import again, on_disk
from tests.gateway.test_sdk import client_of

from bridle.dialects.base import StoredReply
from bridle.errors import EngineError
from bridle.gateway.responses import NEWEST, Shelf

TOOL = {
    "type": "function",
    "name": "bash",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
TURNS = (
    {"reasoning": "hm", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
    {"content": "one file"},
    {"content": "done"},
)


async def respond(caller, **body):
    """Status and JSON of a `POST /responses`."""
    path = f"/s/{caller.session_id}/v1/responses"
    sent = {"model": "m", **body}
    status, _, raw = await request(caller.house, "POST", path, key=caller.handle.key, body=sent)
    return status, orjson.loads(raw)


async def asked(caller, path, method="GET"):
    """Status and JSON of a request about a kept reply."""
    whole = f"/s/{caller.session_id}/v1/responses/{path}"
    status, _, raw = await request(caller.house, method, whole, key=caller.handle.key)
    return status, orjson.loads(raw)


async def three_turns(caller):
    """A tool run that goes on by ids only."""
    _, first = await respond(caller, input="list", tools=[TOOL])
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    _, second = await respond(
        caller, input=[result], tools=[TOOL], previous_response_id=first["id"]
    )
    status, third = await respond(
        caller, input="thanks", tools=[TOOL], previous_response_id=second["id"]
    )
    assert status == 200, third
    return first, second, third


async def test_turns_chained_by_previous_response_id_extend_the_sampled_tokens():
    async with house(*TURNS) as home:
        caller = await home.session()
        replies = await three_turns(caller)
        assert replies[2]["output"][0]["content"][0]["text"].strip() == "done"
        assert replies[1]["previous_response_id"] == replies[0]["id"]
        one, two, three = caller.exchanges
        assert (two.parent_id, three.parent_id) == (one.exchange_id, two.exchange_id)
        assert two.request.kept_spans == 1, "the history is not stored again"
        assert b'"previous_response_id"' in two.request.head


async def test_a_previous_response_id_still_works_after_a_gateway_restart(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, *TURNS) as home:
        caller = await home.session("one")
        _, first = await respond(caller, input="list", tools=[TOOL])
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    async with on_disk(path, *TURNS) as home:
        caller = again(home, caller)
        assert await asked(caller, first["id"]) == (200, first)
        status, second = await respond(
            caller, input=[result], tools=[TOOL], previous_response_id=first["id"]
        )
        assert status == 200, second
        assert caller.exchanges[1].parent_id == caller.exchanges[0].exchange_id


async def test_a_response_that_broke_off_is_a_404_before_and_after_a_gateway_restart(tmp_path):
    path = tmp_path / "c.sqlite"
    engine = Gated({"content": "some words"}, error=EngineError("no", status=500))
    engine.sign.set()
    async with on_disk(path, engine=engine, stream="live") as home:
        caller = await home.session("one")
        async with client_of(caller) as client:
            stream = await client.responses.create(model="m", input="go", stream=True)
            seen = [event async for event in stream]
        assert seen[-1].type == "response.failed"
        broken = seen[-1].response.id
        assert (await asked(caller, broken))[0] == 404
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        assert (await asked(caller, broken))[0] == 404
        status, _ = await respond(caller, input="on", previous_response_id=broken)
        assert (status, len(caller.exchanges)) == (404, 1)


async def test_a_branch_from_an_old_reply_extends_that_reply():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, first = await respond(caller, input="go")
        last = first
        for step in range(NEWEST + 1):
            _, last = await respond(caller, input=f"on {step}", previous_response_id=last["id"])
        _, branch = await respond(caller, input="another way", previous_response_id=first["id"])
        assert branch["status"] == "completed"
        assert caller.exchanges[-1].parent_id == caller.exchanges[0].exchange_id
        assert caller.exchanges[-1].continues == caller.exchanges[0].exchange_id


async def test_another_session_s_reply_is_not_found():
    async with house({"content": "a"}) as home:
        one, other = await home.session("one"), await home.session("other")
        _, first = await respond(one, input="go")
        status, shown = await respond(other, input="on", previous_response_id=first["id"])
        assert status == 404
        assert shown["error"]["param"] == "previous_response_id"
        for path, method in (
            (first["id"], "GET"),
            (first["id"], "DELETE"),
            (f"{first['id']}/input_items", "GET"),
            (f"{first['id']}/cancel", "POST"),
        ):
            status, shown = await asked(other, path, method)
            assert (status, shown["error"]["code"]) == (404, "not_found")
        assert (await asked(one, first["id"]))[0] == 200
        assert other.exchanges == []


async def test_a_response_with_store_false_is_a_404_and_still_captured():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, first = await respond(caller, input="go", store=False)
        assert (await asked(caller, first["id"]))[0] == 404
        assert (await respond(caller, input="on", previous_response_id=first["id"]))[0] == 404
        assert len(caller.exchanges) == 1, "capture keeps it all the same"


async def test_a_deleted_reply_stays_deleted_and_captured(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one")
        _, first = await respond(caller, input="go")
        shown = {"id": first["id"], "object": "response", "deleted": True}
        assert await asked(caller, first["id"], "DELETE") == (200, shown)
        assert (await asked(caller, first["id"], "DELETE"))[0] == 404
        assert caller.facts.delivered == 1
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        assert (await asked(caller, first["id"]))[0] == 404
        assert caller.delivery(0) == "delivered"


async def test_the_items_of_a_request_are_listed_in_pages():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, first = await respond(caller, input="go")
        _, second = await respond(caller, input="on", previous_response_id=first["id"])
        _, listed = await asked(caller, f"{second['id']}/input_items?order=asc")
        texts = [item["content"][0]["text"].strip() for item in listed["data"]]
        assert (texts, listed["has_more"]) == (["go", "a", "on"], False)
        _, page = await asked(caller, f"{second['id']}/input_items?limit=1")
        assert (page["data"], page["has_more"]) == (listed["data"][2:], True)
        after = f"{second['id']}/input_items?limit=2&after={page['last_id']}"
        _, rest = await asked(caller, after)
        assert rest["data"] == listed["data"][1::-1]
        status, shown = await asked(caller, f"{second['id']}/input_items?limit=x")
        assert (status, shown["error"]["param"]) == (400, "limit")


async def test_kept_replies_that_their_clients_do_not_read_are_part_of_the_session_s_share():
    """The share is four times the largest body; each of these answers is larger than a socket."""
    engine = scripted({"content": "ok"}, context_length=4_000_000)
    async with asyncio.timeout(120), house(engine=engine, max_body_bytes=8 << 20) as home:
        caller = await home.session()
        body = orjson.dumps({"model": "m", "input": "hello world " * 600_000})
        url = f"{home.gateway.url}/v1/responses"
        async with home.client.post(url, data=BytesIO(body), headers=caller.headers) as response:
            path = f"/v1/responses/{(await response.json())['id']}/input_items"
        host, _, port = home.gateway.url.removeprefix("http://").partition(":")
        stuck = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(4)]
        key = f"Authorization: Bearer {caller.handle.key}"
        for writer in stuck:
            transport: Any = writer.transport
            transport.pause_reading()
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key}\r\n\r\n".encode())
        in_hand = home.known(caller.session_id).in_hand
        await caller.until(lambda: in_hand.requests == 4)
        again = path.removeprefix("/v1/responses/")
        status, error = await asked(caller, again)
        assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")
        for writer in stuck:
            writer.transport.abort()
        await caller.until(lambda: in_hand.requests == 0)
        assert in_hand.size == 0
        assert (await asked(caller, again))[0] == 200


async def test_cancelling_or_streaming_a_stored_response_is_a_400_with_the_reason():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, first = await respond(caller, input="go")
        status, shown = await asked(caller, f"{first['id']}/cancel", "POST")
        assert (status, "synchronous" in shown["error"]["message"]) == (400, True)
        status, shown = await asked(caller, f"{first['id']}?stream=true")
        assert (status, shown["error"]["param"]) == (400, "stream")


async def test_input_token_counts_include_the_history_of_previous_response_id():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, first = await respond(caller, input="go")
        body = {"model": "m", "input": "on", "previous_response_id": first["id"]}
        path = "/v1/responses/input_tokens"
        _, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
        await respond(caller, **body)
        assert orjson.loads(raw)["input_tokens"] == caller.exchanges[1].prompt_length


async def test_a_request_after_a_compaction_has_no_message_that_the_summary_replaced():
    async with house({"content": "all of it"}) as home:
        caller = await home.session()
        _, first = await respond(caller, input="go")
        trigger = [{"type": "compaction_trigger"}]
        _, second = await respond(caller, input=trigger, previous_response_id=first["id"])
        assert [item["type"] for item in second["output"]] == ["compaction"]
        _, third = await respond(caller, input="on", previous_response_id=second["id"])
        _, listed = await asked(caller, f"{third['id']}/input_items?order=asc")
        assert [item["type"] for item in listed["data"]] == ["compaction", "message"]
        assert caller.exchanges[1].kind == "compaction"


async def test_the_openai_sdk_retrieves_lists_compacts_and_deletes_stored_responses():
    engine = scripted({"reasoning": "hm", "content": "the answer"})
    async with house(engine=engine) as home:
        caller = await home.session()
        url, key = caller.handle.base_urls["openai"], caller.handle.key
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            first = await client.responses.create(model="m", input="go")
            second = await client.responses.create(
                model="m", input="on", previous_response_id=first.id
            )
            assert (await client.responses.retrieve(second.id)).to_dict() == second.to_dict()
            items = [item async for item in client.responses.input_items.list(second.id, limit=1)]
            assert [item.type for item in items] == ["message", "message", "reasoning", "message"]
            compacted = await client.responses.compact(model="m", previous_response_id=second.id)
            assert compacted.object == "response.compaction"
            assert [item.type for item in compacted.output] == ["compaction"]
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await client.responses.cancel(second.id)


async def test_items_of_kept_replies_may_come_back_as_references():
    async with house(*TURNS) as home:
        caller = await home.session()
        _, first = await respond(caller, input="list", tools=[TOOL])
        [call] = [item for item in first["output"] if item["type"] == "function_call"]
        items = [
            {"role": "user", "content": "list"},
            *({"type": "item_reference", "id": item["id"]} for item in first["output"]),
            {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"},
        ]
        status, second = await respond(caller, input=items, tools=[TOOL])
        assert status == 200, second
        one, two = caller.exchanges
        assert two.parent_id == one.exchange_id
        for unknown in ("msg_1", f"msg_{'0' * 24}000", 5):
            reference = {"type": "item_reference", "id": unknown}
            status, shown = await respond(caller, input=[reference])
            assert status in (400, 404), shown


async def test_a_reply_asked_for_again_after_a_restart_keeps_its_id(tmp_path):
    path = tmp_path / "c.sqlite"
    body = {"model": "m", "input": "go"}
    engine = late()
    async with on_disk(path, engine=engine) as home:
        caller = await home.session("one")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(respond(caller, **body))
            await engine.waits.wait()
            asking.cancel()
        await caller.unclaimed()
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
        kept = orjson.loads(caller.exchanges[0].reply)
    async with on_disk(path, {"content": "b"}) as home:
        caller = again(home, caller)
        client = openai.AsyncOpenAI(
            base_url=f"{home.gateway.url}/s/one/v1", api_key=caller.handle.key, max_retries=0
        )
        async with client, client.responses.stream(model="m", input="go") as stream:
            final = await stream.get_final_response()
        assert (final.id, final.output_text.strip()) == (kept["id"], "a")
        assert len(caller.exchanges) == 1


KEPT = StoredReply((b"1",), b"2", b"{}")


def test_the_shelf_keeps_only_the_newest_responses_in_memory():
    shelf = Shelf()
    for number in range(NEWEST + 2):
        shelf.keep(f"resp_{number}", f"e{number}", KEPT)
    assert shelf.exchange_of("resp_0") == "e0"
    assert shelf.at_hand("resp_0") is shelf.at_hand("resp_1") is None
    assert shelf.at_hand("resp_2") is KEPT
    shelf.forget("resp_2")
    assert (shelf.exchange_of("resp_2"), shelf.at_hand("resp_2")) == (None, None)
