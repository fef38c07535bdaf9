"""Detection of the parsers that a vLLM was started with, by sampling one token.

A call that shows a tool is refused by a server without `--tool-call-parser`; a `--reasoning-parser`
shows where the first word of a reply is told as reasoning.
Bridle parses the sampled ids itself, so nothing hangs on either unless the server's text is wanted.
Seen on vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Final
from uuid import uuid4

import msgspec

from bridle.engines import wire
from bridle.engines.http import Call, EngineClient
from bridle.engines.probe import Finding
from bridle.errors import EngineError
from bridle.types import JSON

WHAT: Final = "parsers"

_TOOL: JSON = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
_REFUSAL = "--tool-call-parser"
"""What the refusal advises."""


async def find_parsers(client: EngineClient, model: str) -> Finding:
    """A finding that names both parsers; never a fault, and never raises."""
    tools = True
    try:
        answer = await _asked(client, model, {"tools": [_TOOL], "tool_choice": "auto"})
    except EngineError as error:
        tools = _REFUSAL not in str(error)
        answer = None
    if answer is None and not tools:
        answer = await _plain(client, model)
    if answer is None:
        return Finding.note(WHAT, "unknown: a chat call of one token fails")
    reasoning = _first_is_reasoning(answer)
    seen = "reasoning seen" if reasoning else "reasoning not seen"
    return Finding.note(WHAT, f"{seen}, tools {'yes' if tools else 'no'}")


async def _plain(client: EngineClient, model: str) -> wire.Answer | None:
    try:
        return await _asked(client, model, {})
    except EngineError:
        return None


async def _asked(client: EngineClient, model: str, fields: JSON) -> wire.Answer:
    body: JSON = {
        "model": model,
        "request_id": f"probe-{uuid4().hex}",
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
        "temperature": 0.0,
        **fields,
    }
    text = await client.post(wire.CHAT, msgspec.json.encode(body), Call(), prompt_tokens=1)
    try:
        return msgspec.json.decode(text, type=wire.Answer)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine's reply cannot be read: {error}") from None


def _first_is_reasoning(answer: wire.Answer) -> bool:
    """Return whether the server reported a reply's first token as reasoning."""
    message = answer.choices[0].message if answer.choices else None
    return message is not None and bool(message.reasoning)
