"""Legacy completions: sampled under their own prompt, captured like any other call."""

import openai
import orjson
import pytest
from tests.gateway.house import house, renderer, user
from tests.gateway.test_data import request
from tests.gateway.test_restore import again, on_disk

PLAIN = {"raw": " there was\n\na gateway.<|im_end|>"}


def client_of(caller) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=caller.handle.base_urls["openai"], api_key=caller.handle.key, max_retries=0
    )


async def test_the_openai_sdk_reads_a_completion_of_a_text():
    async with house(PLAIN) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            done = await client.completions.create(
                model="m", prompt="Once upon a time", max_tokens=50, logprobs=1
            )
        [choice] = done.choices
        assert (choice.text, choice.finish_reason) == (" there was\n\na gateway.", "stop")
        [exchange] = caller.exchanges
        assert renderer().decode(exchange.suffix_ids) == "Once upon a time"
        assert (exchange.root_reason, exchange.parent_id) == ("completion", None)
        assert done.usage is not None
        assert done.usage.prompt_tokens == exchange.prompt_length
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(exchange.logprobs.tolist())
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens).startswith(choice.text)


async def test_the_openai_sdk_streams_a_completion_of_ids():
    async with house(PLAIN) as home:
        caller = await home.session()
        ids = renderer().text_ids("<|im_start|>user\nhi", control=True).tolist()
        async with client_of(caller) as client:
            stream = await client.completions.create(
                model="m",
                prompt=ids,
                max_tokens=50,
                stream=True,
                stream_options={"include_usage": True},
            )
            pieces = [piece async for piece in stream]
        text = "".join(choice.text for piece in pieces for choice in piece.choices)
        assert text == " there was\n\na gateway."
        assert caller.exchanges[0].suffix_ids.tolist() == ids
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == len(caller.exchanges[0].output_ids)


async def test_its_budget_is_that_of_the_api():
    async with house({"raw": "word " * 100}) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            done = await client.completions.create(model="m", prompt="go")
        assert done.choices[0].finish_reason == "length"
        assert len(caller.exchanges[0].output_ids) == 16


async def test_a_completion_is_no_repeat_of_a_chat_that_says_the_same():
    async with house({"raw": "a<|im_end|>"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        async with client_of(caller) as client:
            await client.completions.create(model="m", prompt="go")
        assert [caller.delivery(0), caller.delivery(1)] == ["delivered", "delivered"]
        assert caller.exchanges[1].continues is None
        _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        stats = trajectory["metadata"]["stats"]
        assert (stats["roots"], stats["tokens_excluded"]) == (2, {})


async def test_a_completion_is_brought_back_with_its_session(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, PLAIN) as home:
        caller = await home.session("one")
        async with client_of(caller) as client:
            await client.completions.create(model="m", prompt="go")
    async with on_disk(path, PLAIN) as home:
        caller = again(home, caller)
        await caller.ask([user("on")])
        session = home.gateway._registry.get("one")
        assert session is not None
        assert len(session.calls) == 2


async def test_ids_beyond_the_vocabulary_are_the_client_s_error():
    async with house(PLAIN) as home:
        caller = await home.session()
        body = {"model": "m", "prompt": [5, renderer().vocab_size]}
        path = "/v1/completions"
        status, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
        assert (status, orjson.loads(raw)["error"]["param"]) == (400, "prompt[1]")


async def test_logprobs_of_a_chat_are_those_that_were_sampled():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            done = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], logprobs=True
            )
        told = done.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [token.logprob for token in told.content] == pytest.approx(
            caller.exchanges[0].logprobs.tolist()
        )
