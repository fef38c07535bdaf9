"""Prompts that are not messages alone: an answer that the client has begun."""

from types import SimpleNamespace
from typing import Any

import anthropic
import orjson
import pytest
from tests.dialects.exchange import parse
from tests.gateway.house import house, renderer, scripted, user
from tests.gateway.test_data import request

from bridle.errors import RequestError
from bridle.gateway.prompts import Prompts
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.types import Dialect, FinishReason, Reply


async def said(caller, messages, **fields):
    """Status and JSON of a Messages request."""
    body = {"model": "m", "max_tokens": 1000, "messages": messages, **fields}
    path = f"/s/{caller.session_id}/v1/messages"
    status, _, raw = await request(caller.house, "POST", path, key=caller.handle.key, body=body)
    return status, orjson.loads(raw)


def begun(text):
    return {"role": "assistant", "content": text}


async def test_a_reply_continues_a_prefilled_answer_and_records_the_prefill():
    async with house({"raw": " is 4.<|im_end|>"}) as home:
        caller = await home.session()
        status, reply = await said(caller, [user("2+2?"), begun("The answer")])
        assert (status, reply["content"]) == (200, [{"type": "text", "text": " is 4."}])
        [exchange] = caller.exchanges
        prompt = renderer().decode(exchange.suffix_ids)
        assert prompt.endswith("<|im_start|>assistant\nThe answer")
        assert exchange.extra["prefill"] == "The answer"


async def test_a_prefilled_answer_extends_the_tokens_of_earlier_turns():
    async with house({"content": "hi"}, {"raw": "ee<|im_end|>"}) as home:
        caller = await home.session()
        _, first = await said(caller, [user("go")])
        turn = {"role": "assistant", "content": first["content"]}
        await said(caller, [user("go"), turn, user("on"), begun("thr")])
        one, two = caller.exchanges
        assert two.parent_id == one.exchange_id
        assert renderer().decode(two.suffix_ids).endswith("assistant\nthr")


async def test_a_turn_sent_back_as_prefill_plus_reply_extends_the_sampled_tokens():
    async with house({"raw": " is 4.<|im_end|>"}, {"content": "5"}) as home:
        caller = await home.session()
        await said(caller, [user("2+2?"), begun("The answer")])
        await said(caller, [user("2+2?"), begun("The answer is 4."), user("2+3?")])
        one, two = caller.exchanges
        assert (two.parent_id, two.root_reason) == (one.exchange_id, None)
        assert two.kept == one.prompt_length + len(one.output_ids)
        assert "The answer" not in renderer().decode(two.suffix_ids)


async def test_a_prefilled_answer_that_was_cut_continues_from_all_of_its_text():
    async with house({"raw": " ha", "finish": "length"}) as home:
        caller = await home.session()
        for text in ("Ha", "Ha ha"):
            await said(caller, [user("laugh"), begun(text)])
        await said(caller, [user("laugh"), begun("Ha ha ha"), user("more")])
        one, two, three = caller.exchanges
        assert (two.parent_id, len(two.suffix_ids)) == (one.exchange_id, 0)
        assert three.parent_id == two.exchange_id


async def test_a_reply_that_was_cut_by_its_length_continues_from_its_sampled_ids():
    turns = ({"raw": "<think>\n\n</think>\n\none two", "finish": "length"}, {"raw": " three"})
    async with house(*turns) as home:
        caller = await home.session()
        _, first = await said(caller, [user("count")])
        assert first["stop_reason"] == "max_tokens"
        turn = {"role": "assistant", "content": first["content"]}
        status, second = await said(caller, [user("count"), turn])
        assert status == 200, second
        one, two = caller.exchanges
        assert (two.parent_id, len(two.suffix_ids)) == (one.exchange_id, 0)


async def test_a_complete_reply_sent_back_as_a_prefill_starts_a_root():
    async with house({"content": "one"}, {"raw": " two"}) as home:
        caller = await home.session()
        _, first = await said(caller, [user("count")])
        turn = {"role": "assistant", "content": first["content"][0]["text"].strip()}
        await said(caller, [user("count"), turn])
        two = caller.exchanges[1]
        assert (two.parent_id, two.root_reason) == (None, "prefill")


async def test_token_counting_includes_a_prefilled_answer():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        messages = [user("2+2?"), begun("The answer")]
        body = {"model": "m", "messages": messages}
        path = "/v1/messages/count_tokens"
        _, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
        await said(caller, messages)
        assert orjson.loads(raw)["input_tokens"] == caller.exchanges[0].prompt_length


@pytest.mark.parametrize("text", ["<think>so", "<tool_call>{"])
async def test_a_prefill_of_markup_is_served_or_a_400(text):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, reply = await said(caller, [user("go"), begun(text)])
        assert (status == 200) == bool(caller.exchanges), reply
        assert status in (200, 400)


async def test_the_anthropic_sdk_streams_what_follows_a_prefill():
    async with house(engine=scripted({"raw": " is 4.<|im_end|>"})) as home:
        caller = await home.session()
        async with (
            anthropic.AsyncAnthropic(
                base_url=caller.handle.base_urls["anthropic"],
                api_key=caller.handle.key,
                max_retries=0,
            ) as client,
            client.messages.stream(
                model="m", max_tokens=100, messages=[user("2+2?"), begun("The answer")]
            ) as stream,
        ):
            final = await stream.get_final_message()
        assert [block.to_dict()["text"] for block in final.content] == [" is 4."]


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
BASH: Any = {
    "name": "bash",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def called(blocks):
    """The blocks, without the ids of calls."""
    return [{name: value for name, value in one.items() if name != "id"} for one in blocks]


@pytest.mark.parametrize(("between", "text"), [(" look.\n", [" look."]), ("\n", [])])
async def test_a_tool_call_after_a_prefill_is_parsed_and_the_next_turn_extends_it(between, text):
    async with house({"raw": between + CALL}, {"content": "a.txt"}) as home:
        caller = await home.session()
        asked = [user("list it"), begun("Let me")]
        status, reply = await said(caller, asked, tools=[BASH])
        assert (status, reply["stop_reason"]) == (200, "tool_use")
        call = {"type": "tool_use", "name": "bash", "input": {"command": "ls"}}
        assert called(reply["content"]) == [*({"type": "text", "text": t} for t in text), call]
        made = reply["content"][-1]
        whole = {"type": "text", "text": "".join(["Let me", *text])}
        turn = {"role": "assistant", "content": [whole, made]}
        result = {"type": "tool_result", "tool_use_id": made["id"], "content": "a.txt"}
        history = [asked[0], turn, {"role": "user", "content": [result]}]
        status, _ = await said(caller, history, tools=[BASH])
        one, two = caller.exchanges
        assert (status, two.parent_id) == (200, one.exchange_id)


async def test_a_tool_call_after_a_prefill_stays_text_without_tools_or_with_tool_choice_none():
    async with house({"raw": " look.\n" + CALL}) as home:
        caller = await home.session()
        asked = [user("list it"), begun("Let me")]
        none = {"tools": [BASH], "tool_choice": {"type": "none"}}
        for fields in ({}, none):
            _, reply = await said(caller, asked, **fields)
            [block] = reply["content"]
            assert block["text"] == " look.\n" + CALL.removesuffix("<|im_end|>")
            assert reply["stop_reason"] == "end_turn"


async def test_a_tool_call_after_a_prefill_is_streamed_as_a_tool_use_block():
    async with house({"raw": " look.\n" + CALL}) as home:
        caller = await home.session()
        async with (
            anthropic.AsyncAnthropic(
                base_url=caller.handle.base_urls["anthropic"],
                api_key=caller.handle.key,
                max_retries=0,
            ) as client,
            client.messages.stream(
                model="m",
                max_tokens=100,
                messages=[user("list it"), begun("Let me")],
                tools=[BASH],
            ) as stream,
        ):
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.stop_reason == "tool_use"


class Thinking:
    """A renderer whose turns begin inside a thought."""

    def __getattr__(self, name: str) -> Any:
        return getattr(renderer(), name)

    def parse(self, ids, **_):
        return Reply("", renderer().decode(ids), (), FinishReason.LENGTH)


async def test_a_prefill_is_a_400_if_the_template_opens_a_turn_with_reasoning():
    turns = [user("2+2?"), begun("It is")]
    request_ = parse(Dialect.ANTHROPIC, {"model": "m", "max_tokens": 9, "messages": turns})
    question: Any = SimpleNamespace(request=request_, placement=Placement(PlacementKind.ROOT))
    fake: Any = Thinking()
    with pytest.raises(RequestError, match="beginning of an answer") as raised:
        await Prompts(fake, context_length=1000).prompted(question, None)
    assert raised.value.status == 400
