"""Internal messages as chat templates take them: OpenAI Chat shape, every text escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from bridle.dialects.media import block_name, shown_block
from bridle.errors import RenderError
from bridle.types import JSON, MediaPart, Message, Part, Role, TextPart, ToolCall, ToolSpec

Escape: TypeAlias = Callable[[str], str]


def chat_messages(
    messages: Sequence[Message],
    escape: Escape,
    *,
    objects: bool = False,
    media: Callable[[MediaPart], JSON] | None = None,
) -> list[JSON]:
    """Return the messages for a template. `RenderError` names a part that is not text.

    `media` gives the form of such parts, for engines that take them; an answer never holds any.
    Arguments that are no JSON object stay the text that they are; with `objects`, for templates
    that take nothing else, they become the one argument of an object. Assistant messages that are
    one turn in pieces (some dialects give reasoning, text and calls as items) become one message,
    in their order.
    """
    chat: list[JSON] = []
    for index, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            text = escape(_text_of(index, message))
            turn = _assistant(message, text, escape, objects=objects)
            if chat and chat[-1]["role"] == "assistant" and _continues(chat[-1], turn):
                _merge(chat[-1], turn)
            else:
                chat.append(turn)
            continue
        content: str | list[JSON]
        if media is None:
            content = escape(_text_of(index, message))
        else:
            content = _content(index, message, escape, media)
        if message.role is Role.TOOL:
            chat.append(_result(message, content, escape))
        else:
            chat += ({"role": str(message.role), "content": content},)
    return chat


def server_messages(
    messages: Sequence[Message],
    *,
    escape: Escape = str,
    media: Callable[[MediaPart], JSON] | None = None,
) -> list[JSON]:
    """Return the messages as servers of OpenAI's chat take them: as for a template, arguments as
    text.
    """
    chat = chat_messages(messages, escape, media=media)
    for call in (call for turn in chat for call in turn.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return chat


def _content(
    index: int,
    message: Message,
    escape: Escape,
    media: Callable[[MediaPart], JSON],
) -> str | list[JSON]:
    """Return the text of a message; with media, its parts in their order."""
    if not any(isinstance(part, MediaPart) for part in message.content):
        return escape(_text_of(index, message))
    shown: list[JSON] = []
    for part in message.content:
        text = part.text if isinstance(part, TextPart) else shown_block(part)
        if text is not None:
            shown.append({"type": "text", "text": escape(text)})
        elif isinstance(part, MediaPart):
            shown.append(media(part))
    return shown


def chat_tools(tools: Iterable[ToolSpec], escape: Escape | None = None) -> list[JSON] | None:
    """Return the tools for a template; `None` if there are none.

    Without `escape`, for parsing only.
    """
    listed = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]
    if not listed:
        return None
    return listed if escape is None else [_escaped(tool, escape) for tool in listed]


def _text_of(index: int, message: Message) -> str:
    texts: list[str] = []
    if not message.content[1:] and message.content and type(message.content[0]) is TextPart:
        return message.content[0].text
    for position, part in enumerate(message.content):
        text = part.text if isinstance(part, TextPart) else shown_block(part)
        if text is None:
            raise RenderError(
                f"{message.role.value} message {index} holds {_named(part)} "
                f"(part {position}); prompts of this tokenizer are text only"
            )
        texts.append(text)
    return "".join(texts)


def _named(part: Part) -> str:
    name = block_name(part)
    if name is not None:
        return f"a file of the provider's in a block of type {name!r}"
    return part.media_type if isinstance(part, MediaPart) else "text"


def _assistant(message: Message, text: str, escape: Escape, *, objects: bool) -> JSON:
    turn: JSON = {"role": "assistant", "content": text}
    if message.reasoning:
        turn["reasoning_content"] = escape(message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, escape, objects=objects) for call in message.tool_calls]
    return turn


def _call(call: ToolCall, escape: Escape, *, objects: bool) -> JSON:
    arguments = _arguments(call, escape)
    if objects and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    function = {"name": escape(call.name), "arguments": arguments}
    return {"type": "function", "id": escape(call.id or ""), "function": function}


def _arguments(call: ToolCall, escape: Escape) -> JSON | str:
    """Return an object where the text is one (as serving engines do), else the text itself."""
    if call.custom:  # the model was shown a function with the one argument `input`
        return {"input": escape(call.arguments)}
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return escape(call.arguments)
    if value is None:
        return {}
    return _escaped(value, escape) if isinstance(value, dict) else escape(call.arguments)


def _result(message: Message, content: str | list[JSON], escape: Escape) -> JSON:
    result: JSON = {"role": "tool", "content": content}
    if message.tool_call_id is not None:
        result["tool_call_id"] = escape(message.tool_call_id)
    if message.name is not None:
        result["name"] = escape(message.name)
    return result


def _continues(turn: JSON, piece: JSON) -> bool:
    """Return whether a piece continues a turn: reasoning comes first, then text, then calls."""
    if "tool_calls" in turn:
        return set(piece) == {"role", "content", "tool_calls"} and not piece["content"]
    return not turn["content"] or not (piece["content"] or "reasoning_content" in piece)


def _merge(turn: JSON, piece: JSON) -> None:
    turn["content"] += piece["content"]
    if "reasoning_content" in piece:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + piece["reasoning_content"]
    if "tool_calls" in piece:
        turn["tool_calls"] = turn.get("tool_calls", []) + piece["tool_calls"]


def _escaped(value: Any, escape: Escape) -> Any:  # noqa: ANN401 - any JSON value
    """Return the same JSON value with every string in it escaped, keys too."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): _escaped(item, escape) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item, escape) for item in value]
    return value
