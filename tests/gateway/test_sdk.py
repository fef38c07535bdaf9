"""The official SDKs over loopback: what they read is what was scripted and captured."""

import asyncio
from typing import Any

import openai
import pytest
from tests.gateway.house import SHELL_TOOL, house, scripted, user
from tests.gateway.test_relay import late
from tests.gateway.test_restore import on_disk

from bridle.types import DeliveryState

CALLS = {
    "reasoning": "two files",
    "content": "I look.",
    "tool_calls": [
        {"name": "bash", "arguments": {"command": "cat a"}},
        {"name": "bash", "arguments": {"command": "cat b"}},
    ],
}


def client_of(caller, **options) -> Any:
    return openai.AsyncOpenAI(
        base_url=caller.handle.base_urls["openai"], api_key=caller.handle.key, **options
    )


def said(message):
    """A message of the SDK as a request takes it."""
    return message.model_dump(exclude_none=True)


async def test_a_tool_run_with_the_openai_sdk_is_one_trace(tmp_path):
    async with on_disk(tmp_path / "c.sqlite", CALLS, {"content": "done"}) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            messages = [user("compare")]
            first = await client.chat.completions.create(
                model="m", messages=messages, tools=[SHELL_TOOL]
            )
            message = first.choices[0].message
            commands = [call.function.arguments for call in message.tool_calls]
            assert commands == ['{"command": "cat a"}', '{"command": "cat b"}']
            assert first.choices[0].finish_reason == "tool_calls"
            messages.append(said(message))
            # Parallel results come back in order of completion.
            for call in reversed(message.tool_calls):
                text = call.function.arguments
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            second = await client.chat.completions.create(
                model="m", messages=messages, tools=[SHELL_TOOL]
            )
            assert second.choices[0].message.content == "done"
            assert second.usage.prompt_tokens == caller.exchanges[1].prompt_length
        _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        stats = trajectory["metadata"]["stats"]
        assert (len(trajectory["traces"]), stats["merge_ratio"]) == (1, 1.0)
        assert stats["tokens_captured"] == stats["tokens_trained"] > 0


async def test_the_openai_sdk_streams_text_parallel_calls_and_usage():
    async with house(CALLS) as home:
        caller = await home.session()
        async with (
            client_of(caller) as client,
            client.chat.completions.stream(
                model="m",
                messages=[user("compare")],
                tools=[SHELL_TOOL],
                stream_options={"include_usage": True},
            ) as stream,
        ):
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content.strip() == "I look."
        assert [call.function.name for call in message.tool_calls] == ["bash", "bash"]
        assert final.usage.completion_tokens == len(caller.exchanges[0].output_ids)
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_a_streamed_chat_completion_has_the_logprobs_that_were_asked_for():
    async with house({"content": "two words"}) as home:
        caller = await home.session()
        asked: Any = {"model": "m", "messages": [user("go")], "logprobs": True}
        async with client_of(caller) as client:
            whole = await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(**asked) as stream:
                final = await stream.get_final_completion()
        sampled = final.choices[0].logprobs.content
        assert [one.logprob for one in sampled] == caller.exchanges[1].logprobs.tolist()
        assert whole.choices[0].logprobs.content == sampled


async def test_retries_of_the_openai_sdk_after_503s_are_new_calls_and_one_sample():
    turn = {"content": "ok", "fault": 503, "fault_times": 6}  # three for each try of the SDK
    async with house(turn) as home:
        caller = await home.session()
        async with client_of(caller, max_retries=2) as client:
            reply = await client.chat.completions.create(model="m", messages=[user("go")])
        assert reply.choices[0].message.content == "ok"
        assert (caller.facts.calls, caller.facts.turns, caller.facts.failed_last) == (3, 1, False)
        assert caller.exchanges[0].extra["retry_count"] == 2


async def test_a_timed_out_try_of_the_openai_sdk_is_joined_by_its_retry():
    engine = late()
    async with house(engine=engine) as home:
        caller = await home.session()
        async with (
            client_of(caller, max_retries=2, timeout=5) as client,
            asyncio.TaskGroup() as group,
        ):
            asking = group.create_task(
                client.chat.completions.create(model="m", messages=[user("go")])
            )
            await engine.waits.wait()
            await caller.unclaimed()
            engine.sign.set()
        assert asking.result().choices[0].message.content == "a"
        assert caller.facts.calls == 2
        assert len(caller.exchanges) == 1
        assert caller.delivery(0) is DeliveryState.DELIVERED


@pytest.mark.parametrize(
    ("key", "error"), [("bk-wrong", openai.AuthenticationError), (None, openai.BadRequestError)]
)
async def test_errors_are_the_openai_sdk_s_own(key, error):
    async with house(engine=scripted({"content": "a"}, context_length=100)) as home:
        caller = await home.session()
        async with client_of(caller, max_retries=0) as client:
            client.api_key = key or caller.handle.key
            with pytest.raises(error) as raised:
                await client.chat.completions.create(
                    model="m", messages=[user("word " * 100)], extra_headers={}
                )
        if key is None:
            assert raised.value.code == "context_length_exceeded"
