"""The truth that the official SDKs are held against: an engine's script, and what must be read.

An oracle asks a real gateway by a provider's own SDK and notes facts of each reply: `id`, `text`,
`reasoning`, `calls` (name, arguments), `finish`, `prompt` and `output` (tokens).
"""

import json
from typing import Any

import orjson
from tests.gateway.house import scripted

HELLO: dict[str, Any] = {"reasoning": "A greeting.", "content": "Hello there."}
CALLS: dict[str, Any] = {
    "reasoning": "Two files.",
    "content": "I look.",
    "tool_calls": [
        {"name": "bash", "arguments": {"command": "cat a"}},
        {"name": "bash", "arguments": {"command": "cat b"}},
    ],
}
DONE: dict[str, Any] = {"content": "They differ."}
CUT: dict[str, Any] = {"content": "It goes on", "finish": "length"}
SHAPED: dict[str, Any] = {"content": '{"key": "a", "n": 1}'}
AGAIN: dict[str, Any] = {"content": "ok", "fault": 503, "fault_times": 3}

SCRIPT = [
    {"when": {"last_contains": "hello"}, "turns": [HELLO]},
    {"when": {"user_contains": "compare"}, "turns": [CALLS, DONE]},
    {"when": {"last_contains": "cut"}, "turns": [CUT]},
    {"when": {"last_contains": "json"}, "turns": [SHAPED]},
    {"when": {"last_contains": "again"}, "turns": [AGAIN]},
    {"when": {"last_contains": "limit"}, "turns": [{"fault": 429}]},
    {"when": {"last_contains": "broken"}, "turns": [{"fault": 404}]},
    {"when": {"last_contains": "busy"}, "turns": [{"fault": 503}]},
]

FINISH = {
    "chat": ("stop", "tool_calls", "length"),
    "responses": ("completed", "completed", "max_output_tokens"),
    "anthropic": ("end_turn", "tool_use", "max_tokens"),
    "google": ("STOP", "STOP", "MAX_TOKENS"),
}
"""How each API says: ended, with calls, cut by the output budget."""

IMAGE_REFUSED = "user message 0 holds image/png (part 1)"
"""What a model without eyes says of a text and an image: both were read, in their places."""


def engine() -> Any:
    """The scripted engine, with room for 4000 tokens."""
    return scripted(conversations=SCRIPT, context_length=4000)


def by_id(exchanges: Any) -> dict[str, Any]:
    """Exchanges by the id that their reply has in its dialect."""
    return {reply_id(exchange.reply): exchange for exchange in exchanges}


def reply_id(reply: bytes) -> str:
    whole = orjson.loads(reply)
    return str(whole.get("id") or whole["responseId"])


def check(facts: Any, turn: dict[str, Any], api: str, exchanges: dict[str, Any]) -> Any:
    """Return what an SDK read of one reply is `turn`, and its numbers are the capture's."""
    ended, with_calls, cut = FINISH[api]
    calls = [(c["name"], c["arguments"]) for c in turn.get("tool_calls", ())]
    read = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in facts["calls"]]
    assert (facts["text"], read) == (turn["content"], calls)
    assert facts["reasoning"] == turn.get("reasoning")
    finish = cut if turn.get("finish") == "length" else with_calls if calls else ended
    assert facts["finish"] == finish
    exchange = exchanges[facts["id"]]
    assert (facts["prompt"], facts["output"]) == (exchange.prompt_length, len(exchange.output_ids))
    return exchange


def check_run(first: Any, second: Any, api: str, exchanges: dict[str, Any]) -> None:
    """Parallel calls and their results are one conversation, under the ids that were sampled."""
    asked = check(first, CALLS, api, exchanges)
    ended = check(second, DONE, api, exchanges)
    assert (ended.parent_id, ended.root_reason) == (asked.exchange_id, None)
    assert ended.kept == asked.prompt_length + len(asked.output_ids)
