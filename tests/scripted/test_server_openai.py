"""The oracle of the chat and completion routes: OpenAI's own client reads what the script says."""

import json
from typing import Any

import openai
import pytest
from tests.scripted.api import BASH, USER

from bridle.testing import scripted_engine

TURN = {"reasoning": "hm\nhm", "content": "Fine.\n\nReally.",
        "tool_calls": [{"name": "bash", "arguments": {"command": "echo \N{PARTY POPPER}"}},
                       {"name": "bash", "arguments": {}}]}  # fmt: skip
SCRIPTS: dict[str, dict[str, Any]] = {
    "content": {"content": "Hello, world."},
    "reasoning": {"reasoning": "hm", "content": "Hello."},
    "calls": TURN,
    "a bare call": {"tool_calls": TURN["tool_calls"][:1]},
    "a shell call": {"shell": ["ls -l"]},
    "cut by length": {"content": "Hel", "finish": "length"},
    "malformed": {"raw": '<tool_call>\n{"name": "bash", "arg'},
}


def expected_of(turn):
    calls = [(c["name"], c["arguments"]) for c in turn.get("tool_calls", ())]
    calls += [("bash", {"command": command}) for command in turn.get("shell", ())]
    reason = "length" if turn.get("finish") == "length" else "tool_calls" if calls else "stop"
    return turn.get("reasoning"), turn.get("content") or turn.get("raw") or "", calls, reason


@pytest.fixture
def sdk():
    """OpenAI's client for an `Api`."""

    def make(one, **options):
        return openai.AsyncOpenAI(
            base_url=one.url + "/v1", api_key="none", max_retries=0, **options
        )

    return make


@pytest.mark.parametrize("turn", SCRIPTS.values(), ids=SCRIPTS)
async def test_openai_s_client_reads_the_scripted_reply(api, sdk, turn):
    async with sdk(await api(scripted_engine([turn]))) as client:
        reply = await client.chat.completions.create(model="m", messages=USER, tools=[BASH])
    choice = reply.choices[0]
    called = [
        (c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()
    ]
    reasoning, content, calls, reason = expected_of(turn)
    assert choice.message.reasoning == reasoning
    assert (choice.message.content or "") == content
    assert called == calls
    assert choice.finish_reason == reason
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert len({call.id for call in choice.message.tool_calls or ()}) == len(calls)


@pytest.mark.parametrize("turn", SCRIPTS.values(), ids=SCRIPTS)
async def test_openai_s_client_streams_the_scripted_reply(api, sdk, turn):
    async with (
        sdk(await api(scripted_engine([turn]))) as client,
        client.chat.completions.stream(
            model="m", messages=USER, tools=[BASH], stream_options={"include_usage": True}
        ) as stream,
    ):
        deltas = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion() if turn.get("finish") != "length" else None
    reasoning, content, calls, reason = expected_of(turn)
    choices = [chunk.choices[0] for chunk in deltas if chunk.choices]
    said = "".join(c.delta.content or "" for c in choices)
    thought = "".join(getattr(c.delta, "reasoning", None) or "" for c in choices)
    assert (thought, said) == (reasoning or "", content)
    assert choices[-1].finish_reason == reason
    assert deltas[-1].usage.completion_tokens > 0
    if final is not None:
        made = [(c.function.name, json.loads(c.function.arguments))
                for c in final.choices[0].message.tool_calls or ()]  # fmt: skip
        assert made == calls


async def test_openai_s_client_raises_the_server_s_errors(api, sdk):
    one = await api(scripted_engine([{"fault": 429}]))
    async with sdk(one) as client:
        with pytest.raises(openai.RateLimitError, match="scripted fault"):
            await client.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 131072"):
            await client.chat.completions.create(model="m", messages=USER, max_tokens=140_000)
        assert [model.id async for model in client.models.list()] == ["scripted"]
