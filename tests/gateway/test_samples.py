"""Parallel samples of one question through the official SDKs: each call has a sample of its own."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import anthropic
import openai
import pytest
from tests.gateway.gated import Gated
from tests.gateway.house import House, house, user

from bridle.config import Limits
from bridle.errors import EngineError
from bridle.gateway.weights import SetPolicy
from bridle.types import DeliveryState

ANSWER = {"content": "a"}


async def ask_openai(handle, **more: Any) -> str:
    """The id of the reply that OpenAI's SDK gets, its own retries included."""
    client: Any = openai.AsyncOpenAI(
        api_key=handle.key, base_url=handle.base_urls["openai"], max_retries=4
    )
    async with client:
        done = await client.chat.completions.create(model="m", messages=[user("go")], **more)
        return done.id


async def ask_responses(handle, **more: Any) -> str:
    """The same on Responses."""
    client: Any = openai.AsyncOpenAI(
        api_key=handle.key, base_url=handle.base_urls["openai"], max_retries=4
    )
    async with client:
        return (await client.responses.create(model="m", input="go", **more)).id


async def ask_anthropic(handle, **more: Any) -> str:
    """The id of the reply that Anthropic's SDK gets."""
    client: Any = anthropic.AsyncAnthropic(
        api_key=handle.key, base_url=handle.base_urls["anthropic"], max_retries=4
    )
    more.setdefault("max_tokens", 50)
    async with client:
        done = await client.messages.create(model="m", messages=[user("go")], **more)
        return done.id


SDKS = pytest.mark.parametrize(
    "ask", [ask_openai, ask_responses, ask_anthropic], ids=["chat", "responses", "anthropic"]
)


def assert_own_samples(home: House, caller, replies: list[str]) -> None:
    """Every reply is another exchange's, all of them delivered, and nothing else was sampled."""
    assert len(set(replies)) == len(replies) == len(caller.exchanges)
    deliveries = home.store.deliveries(caller.session_id).values()
    assert [one.state for one in deliveries] == [DeliveryState.DELIVERED] * len(replies)
    assert [one.joined_by for one in deliveries] == [()] * len(replies)


@SDKS
async def test_parallel_calls_around_a_pause_are_samples_of_their_own(ask):
    async with house(ANSWER) as home:
        caller = await home.session()
        await home.gateway.set_policy(SetPolicy(paused=True))
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(caller.handle)) for _ in range(4)]
            await caller.until(lambda: caller.facts.calls == 4)
            await home.gateway.set_policy(SetPolicy(paused=False))
        assert_own_samples(home, caller, [one.result() for one in asking])


@SDKS
async def test_parallel_calls_over_the_limit_in_flight_are_samples_of_their_own(ask):
    engine = Gated(ANSWER, gate=0)
    async with house(engine=engine) as home:
        caller = await home.session(limits=Limits(max_calls_in_flight=3))
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(caller.handle)) for _ in range(6)]
            await caller.until(lambda: caller.facts.calls >= 6)
            # A refused call must come again while those before it still wait.
            await caller.until(lambda: caller.facts.calls >= 9)
            engine.sign.set()
        assert_own_samples(home, caller, [one.result() for one in asking])


class FailsOnce(Gated):
    """Its first call fails with status 500 at the sign, before any token."""

    async def generate(self, request):
        if self.asked == 0:
            self.asked += 1
            await self.sign.wait()
            raise EngineError("it fell over", status=500)
        async for chunk in super().generate(request):
            yield chunk


@SDKS
async def test_a_retry_after_a_failure_of_the_engine_is_a_new_sample(ask):
    async with AsyncExitStack() as stack:
        engine = FailsOnce(ANSWER, gate=0)
        home = await stack.enter_async_context(house(engine=engine))
        caller = await home.session()
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(caller.handle)) for _ in range(3)]
            await caller.until(lambda: engine.asked == 3)
            engine.sign.set()
        assert_own_samples(home, caller, [one.result() for one in asking])


@SDKS
async def test_replies_resampled_after_delivery_train_and_are_marked_as_rejected(ask):
    async with house(ANSWER) as home:
        caller = await home.session()
        replies = [await ask(caller.handle) for _ in range(4)]
        assert_own_samples(home, caller, replies)
        _, built = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
    stats = built["metadata"]["stats"]
    assert stats["tokens_trained"] == stats["tokens_captured"] > 0
    assert stats["rejected"]["exchanges"] == 3
    assert [trace["metadata"].get("rejected") for trace in built["traces"]] == [True] * 3 + [None]


async def test_the_same_messages_with_another_schema_do_not_reject_the_first_reply():
    """A router asks for a decision first, then for the answer, on one history."""
    async with house(ANSWER) as home:
        caller = await home.session()
        schema = {"type": "object", "properties": {"next": {"type": "string"}}}
        named = {"name": "route", "schema": schema}
        await ask_openai(
            caller.handle, response_format={"type": "json_schema", "json_schema": named}
        )
        await ask_openai(caller.handle)
        _, built = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
    assert built["metadata"]["stats"]["rejected"] == {"exchanges": 0, "tokens": 0}


BREAKS = "a\u2028b\u2029c\u0085d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user("go")]}),
        ("/v1/responses", {"input": "go"}),
        ("/v1/messages", {"messages": [user("go")], "max_tokens": 99}),
        (
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            {"contents": [{"parts": [{"text": "go"}]}]},
        ),
    ],
    ids=["chat", "responses", "anthropic", "google"],
)
async def test_a_stream_can_be_split_into_lines_at_every_break_of_unicode(path, body):
    async with house({"content": BREAKS}) as home:
        caller = await home.session()
        body |= {"stream": True, "model": "m"} if "alt=sse" not in path else {}
        url = home.gateway.url + path
        async with home.client.post(url, json=body, headers=caller.headers) as answer:
            assert answer.status == 200
            text = (await answer.read()).decode()
    assert "\\u2028" in text
    assert text.splitlines() == text.replace("\r\n", "\n").removesuffix("\n").split("\n")
