"""The counted prompt is the one that is sampled under, whatever the request holds."""

import base64

import orjson
import pytest
from tests.gateway.house import house
from tests.gateway.test_data import request

from bridle.types import Dialect

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PNG = base64.b64encode(b"\x89PNG not really").decode()
TOLD = "Look at files."


def chat(image=False):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "go"}, *([picture] * image)]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": TOLD, "parameters": SCHEMA},
            }
        ],
        "tool_choice": "required",
    }


def responses(image=False):
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
    return {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "go"}, *([picture] * image)],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        ],
        "tools": [{"type": "function", "name": "look", "description": TOLD, "parameters": SCHEMA}],
        "reasoning": {"effort": "none"},
    }


def messages(image=False):
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    picture = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"path": "."}}
    return {
        "model": "m",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "Be brief."}],
        "thinking": {"type": "enabled", "budget_tokens": 50},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "go"}, *([picture] * image)]},
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"}],
            },
        ],
        "tools": [{"name": "look", "description": TOLD, "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    }


def google(image=False):
    picture = {"inlineData": {"mimeType": "image/png", "data": PNG}}
    answer = {"functionResponse": {"name": "look", "response": {"output": "a.txt"}}}
    declared = {"name": "look", "description": TOLD, "parametersJsonSchema": SCHEMA}
    return {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "go"}, *([picture] * image)]},
            {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
            {"role": "user", "parts": [answer]},
        ],
        "tools": [{"functionDeclarations": [declared]}],
        "generationConfig": {"thinkingConfig": {"thinkingBudget": 0}},
    }


COUNTED = {
    Dialect.OPENAI_RESPONSES: ("/v1/responses", "/v1/responses/input_tokens", responses),
    Dialect.ANTHROPIC: ("/v1/messages", "/v1/messages/count_tokens", messages),
    Dialect.GOOGLE: (
        "/v1beta/models/m:generateContent",
        "/v1beta/models/m:countTokens",
        google,
    ),
}


def number(reply):
    return reply.get("input_tokens", reply.get("totalTokens"))


async def posted(home, caller, path, body):
    status, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
    return status, orjson.loads(raw)


@pytest.mark.parametrize("dialect", list(COUNTED))
async def test_the_token_count_with_tools_and_thinking_equals_the_sampled_prompt_s_length(dialect):
    generate, count, make = COUNTED[dialect]
    async with house({"content": "a"}) as home:
        caller = await home.session()
        _, counted = await posted(home, caller, count, make())
        assert caller.exchanges == []
        status, reply = await posted(home, caller, generate, make())
        assert status == 200, reply
        assert number(counted) == caller.exchanges[0].prompt_length
        bare = {key: value for key, value in make().items() if not key.startswith("tool")}
        _, fewer = await posted(home, caller, count, bare)
        assert number(fewer) < number(counted)


async def test_google_s_count_tokens_accepts_a_whole_generate_content_request():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        path = COUNTED[Dialect.GOOGLE][1]
        inside = {"generateContentRequest": {"model": "models/m", **google()}}
        _, whole = await posted(home, caller, path, inside)
        _, plain = await posted(home, caller, path, google())
        assert whole == plain


@pytest.mark.parametrize(("dialect", "route"), [(d, r) for d in COUNTED for r in (0, 1)])
async def test_an_image_that_the_model_cannot_take_is_refused_by_counting_too(dialect, route):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        path, make = COUNTED[dialect][route], COUNTED[dialect][2]
        status, reply = await posted(home, caller, path, make(image=True))
        assert status == 400
        assert "image" in reply["error"]["message"]
        assert caller.exchanges == []


async def test_chat_usage_reports_the_sampled_prompt_s_length():
    """Chat Completions has no route that counts: its usage does."""
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, reply = await caller.post(chat())
        assert status == 200, reply
        assert reply["usage"]["prompt_tokens"] == caller.exchanges[0].prompt_length
        assert (await caller.post(chat(image=True)))[0] == 400
