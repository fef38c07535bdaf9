"""Chat Completions as the official SDK asks for them, and the older completions route."""

import openai
import pytest
from tests.gateway.house import house


def client_of(caller) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=caller.handle.base_urls["openai"], api_key=caller.handle.key, max_retries=0
    )


async def test_legacy_completions_are_refused_with_the_routes_that_are_served():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            with pytest.raises(openai.NotFoundError, match="/v1/chat/completions") as refused:
                await client.completions.create(model="m", prompt="go")
        assert refused.value.code == "not_found"
        assert caller.exchanges == []


async def test_logprobs_of_a_chat_are_those_that_were_sampled():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        async with client_of(caller) as client:
            done = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], logprobs=True
            )
        answer = done.choices[0].logprobs
        assert answer is not None
        assert answer.content is not None
        assert [token.logprob for token in answer.content] == pytest.approx(
            caller.exchanges[0].logprobs.tolist()
        )
