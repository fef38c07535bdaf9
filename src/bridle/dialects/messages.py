"""Internal messages as OpenAI Chat JSON: for exports, and for engines and templates that take it.

One shape for every dialect: text parts of a message are joined, calls of freeform tools are calls
of the function that stands for them, media keep their place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bridle.dialects.media import BLOCK_TYPE
from bridle.dialects.tools import as_function
from bridle.types import JSON, MediaPart, Message, Part, Role, TextPart, ToolSpec


def chat_messages(messages: Sequence[Message]) -> list[JSON]:
    """The messages in OpenAI Chat form, one each, in order."""
    return [_chat_message(message) for message in messages]


def chat_tools(tools: Sequence[ToolSpec]) -> list[JSON]:
    """The tools in OpenAI Chat form; keys without a value are left out."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: ToolSpec) -> JSON:
    function: JSON = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict:
        function["strict"] = True
    return function


def _chat_message(message: Message) -> JSON:
    shown: JSON = {"role": message.role.value, "content": _content(message)}
    if message.role is Role.ASSISTANT:
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.tool_calls:
            shown["content"] = shown["content"] or None
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in map(as_function, message.tool_calls)
            ]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _content(message: Message) -> str | list[JSON]:
    if all(isinstance(part, TextPart) for part in message.content):
        return message.text
    return [chat_part(part) for part in message.content]


def chat_part(part: Part) -> JSON:
    """One part of a message's content in OpenAI Chat form."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    kind = part.media_type.partition("/")[0]
    if part.media_type == BLOCK_TYPE and not part.source.startswith("data:"):
        return _block(part)
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": part.source}}
    if kind == "audio":
        form = part.media_type.partition("/")[2]
        data = part.source.partition(",")[2]
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    return {"type": "file", "file": {"file_data": part.source}}


def _block(part: MediaPart) -> JSON:
    block: JSON = json.loads(part.source)
    return block
