"""Replies of one token show which parsers a vLLM has."""

import json

import pytest

from bridle.engines.http import EngineClient
from bridle.engines.vllm import find_parsers

CHAT = "v1/chat/completions"
LACKING = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
REFUSED = (400, {"error": {"message": LACKING, "code": 400}})


def said(**message):
    return {"choices": [{"index": 0, "message": {"role": "assistant", **message}}]}


def without_tools(reply):
    """Answers calls that show no tool."""
    return lambda body: REFUSED if "tools" in json.loads(body) else reply


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (said(content="Hm"), "reasoning not seen, tools yes"),
        (said(reasoning="Hm", content=None), "reasoning seen, tools yes"),
        (without_tools(said(content="Hm")), "reasoning not seen, tools no"),
        (without_tools(said(reasoning="Hm")), "reasoning seen, tools no"),
        (without_tools(500), "unknown: a chat call of one token fails"),
        (500, "unknown: a chat call of one token fails"),
        (b"{broken", "unknown: a chat call of one token fails"),
        ({"choices": []}, "reasoning not seen, tools yes"),
    ],
)
async def test_the_server_s_reasoning_and_tool_parsers_are_detected_by_one_token_calls(
    stub, reply, found
):
    server = await stub(**{CHAT: reply})
    client = EngineClient(server.url, api_key=None, timeout_s=30.0)
    finding = await find_parsers(client, "stub")
    await client.aclose()
    assert (finding.what, finding.found, finding.ok) == ("parsers", found, True)
    assert {body["max_tokens"] for body in server.bodies} == {1}
