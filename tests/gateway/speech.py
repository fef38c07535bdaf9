"""A small harness of any dialect, which mostly goes on as harnesses do and at times does not.

What a dialect needs for that is a `Speech`: how its requests, results and replies look. Of a reply,
whole or streamed, a harness keeps the items that it sends back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from tests.gateway.house import SHELL_TOOL, Caller, user

JSON = dict[str, Any]
SHELL: JSON = SHELL_TOOL["function"]
ERRAND = "cat notes about the second part"
"""What the calls that start a sub-agent tell it."""


@dataclass(frozen=True)
class Speech:
    """The ways of a harness that speaks a dialect."""

    provider: str
    """Its name among a session's base URLs."""
    paths: tuple[str, str]
    """Of whole replies and of streams."""
    field: str
    """The list of items in a request."""
    head: Callable[[str], JSON]
    """The other fields, with this system prompt."""
    limit: tuple[str, ...]
    """Where the head has its output budget."""
    said: Callable[[Any], list[JSON]]
    """The items of a reply, or of the events of one."""
    calls: Callable[[JSON], list[JSON]]
    """The calls of such an item."""
    results: Callable[[list[tuple[JSON, str]]], list[JSON]]
    """The items that answer calls."""
    user: Callable[[str], JSON] = user
    system: Callable[[str], list[JSON]] = lambda _: []
    """The items of a system prompt that is not in the head."""
    parts: str = "content"
    """Where an item has its texts."""
    is_reasoning: Callable[[JSON], bool] = lambda _: False
    """Whether a part, or an item, is reasoning."""


# ---- Chat Completions


def chat_said(reply: Any) -> list[JSON]:
    """The assistant's message."""
    if isinstance(reply, dict):
        message = reply["choices"][0]["message"]
        kept = {name: value for name, value in message.items() if value is not None}
        return [{"content": None, **kept}]
    message = {"role": "assistant", "content": None}
    for one in reply:
        for choice in one["choices"] if one != "[DONE]" else ():
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                message.setdefault("tool_calls", []).append(
                    {name: value for name, value in call.items() if name != "index"}
                )
    return [message]


CHAT = Speech(
    provider="openai",
    paths=("/chat/completions", "/chat/completions"),
    field="messages",
    head=lambda _: {"model": "m", "tools": [SHELL_TOOL]},
    limit=("max_tokens",),
    said=chat_said,
    calls=lambda item: item.get("tool_calls") or [],
    results=lambda given: [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in given
    ],
    system=lambda text: [{"role": "system", "content": text}],
)


# ---- Responses


RESPONSES = Speech(
    provider="openai",
    paths=("/responses", "/responses"),
    field="input",
    head=lambda system: {
        "model": "m",
        "instructions": system,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "strict": False, **SHELL}],
    },
    limit=("max_output_tokens",),
    said=lambda reply: (reply if isinstance(reply, dict) else reply[-1]["response"])["output"],
    calls=lambda item: [item] if item["type"] == "function_call" else [],
    results=lambda given: [
        {"type": "function_call_output", "call_id": call.get("call_id", "none"), "output": text}
        for call, text in given
    ],
    is_reasoning=lambda part: part.get("type") == "reasoning",
)


# ---- Messages


def anthropic_said(reply: Any) -> list[JSON]:
    """The assistant's message."""
    if isinstance(reply, dict):
        return [{"role": "assistant", "content": reply["content"]}]
    blocks: list[JSON] = []
    for event in reply:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            (name,) = delta.keys() - {"type"}
            blocks[-1][name] += delta[name]
    for block in blocks:
        given = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = orjson.loads(given or "{}")
    return [{"role": "assistant", "content": blocks}]


ANTHROPIC = Speech(
    provider="anthropic",
    paths=("/v1/messages", "/v1/messages"),
    field="messages",
    head=lambda system: {
        "model": "m",
        "max_tokens": 4096,
        "system": system,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [
            {
                "name": SHELL["name"],
                "description": SHELL["description"],
                "input_schema": SHELL["parameters"],
            }
        ],
    },
    limit=("max_tokens",),
    said=anthropic_said,
    calls=lambda item: [block for block in item["content"] if block["type"] == "tool_use"],
    results=lambda given: [
        user(
            [
                {"type": "tool_result", "tool_use_id": call["id"], "content": text}
                for call, text in given
            ]
        )
    ],
    is_reasoning=lambda part: part.get("type") == "thinking",
)


# ---- Google


def google_said(reply: Any) -> list[JSON]:
    """The model's content; of a stream all parts, one after the other."""
    several = [reply] if isinstance(reply, dict) else reply
    parts = [part for one in several for part in one["candidates"][0]["content"]["parts"]]
    return [{"role": "model", "parts": parts}]


GOOGLE = Speech(
    provider="google",
    paths=(
        "/v1beta/models/m:generateContent",
        "/v1beta/models/m:streamGenerateContent?alt=sse",
    ),
    field="contents",
    head=lambda system: {
        "systemInstruction": {"parts": [{"text": system}]},
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        "tools": [{"functionDeclarations": [SHELL]}],
    },
    limit=("generationConfig", "maxOutputTokens"),
    said=google_said,
    calls=lambda item: [
        part["functionCall"] for part in item["parts"] if part.get("functionCall") is not None
    ],
    results=lambda given: [
        {
            "role": "user",
            "parts": [
                {
                    "functionResponse": {
                        "id": call["id"],
                        "name": call.get("name", "bash"),
                        "response": {"output": text},
                    }
                }
                for call, text in given
            ],
        }
    ],
    user=lambda text: {"role": "user", "parts": [{"text": text}]},
    parts="parts",
    is_reasoning=lambda part: bool(part.get("thought")),
)

SPEECHES = {"chat": CHAT, "responses": RESPONSES, "anthropic": ANTHROPIC, "google": GOOGLE}


# ---- the harness


def events(body: bytes) -> list[Any]:
    """Data of an event stream, whose lines may end as Google's do."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line[:6] == b"data: "]
    return ["[DONE]" if line == b"[DONE]" else orjson.loads(line) for line in lines]


class Harness:
    """One conversation of a harness, which may do odd things with it."""

    def __init__(
        self, caller: Caller, speech: Speech, system: str, choose: random.Random, *, streams: bool
    ) -> None:
        self.caller = caller
        self.speech = speech
        self.choose = choose
        self.streams = streams
        self.head = speech.head(system)
        self.messages = [*speech.system(system), speech.user("Begin.")]
        self.first = len(self.messages) - 1
        """The place of the first user message."""
        self.whole = [len(self.messages)]
        """Places before which every call is answered."""
        self.answers: list[Any] = []

    async def send(self, messages: list[JSON] | None = None) -> list[JSON] | None:
        """The items of the reply; `None` = it was refused."""
        speech = self.speech
        body = {**self.head, speech.field: messages or self.messages}
        if self.streams and speech.paths[0] == speech.paths[1]:
            body["stream"] = True
        handle = self.caller.handle
        async with self.caller.house.client.post(
            handle.base_urls[speech.provider] + speech.paths[self.streams],
            data=orjson.dumps(body),
            headers=self.caller.headers,
        ) as response:
            raw, headers = await response.read(), dict(response.headers)
        del headers["Date"]
        reply = events(raw) if self.streams and response.status == 200 else orjson.loads(raw)
        self.answers.append((response.status, headers, reply))
        return speech.said(reply) if response.status == 200 else None

    def take(self, items: list[JSON]) -> None:
        """Add a reply, and what the harness says to it."""
        speech, odd = self.speech, self.choose.random()
        calls = [call for item in items for call in speech.calls(item)]
        if odd < 0.15:
            items = self.without_reasoning(items)
        elif odd < 0.25:
            items = [{**item, "annotations": []} for item in items]
        elif odd < 0.3:
            for holder, name in self.texts(items):
                holder[name] = holder[name].strip()
        self.messages += items
        if self.choose.random() < 0.2:
            calls.reverse()
        if calls:
            results = [(call, f"result {self.choose.randrange(1000)}") for call in calls]
            self.messages += speech.results(results)
        if not calls or self.choose.random() < 0.2:
            self.messages.append(speech.user(f"Next {self.choose.randrange(1000)}."))
        self.whole.append(len(self.messages))

    def without_reasoning(self, items: list[JSON]) -> list[JSON]:
        speech, found = self.speech, []
        for item in items:
            item.pop("reasoning_content", None)
            if isinstance(parts := item.get(speech.parts), list):
                item[speech.parts] = [part for part in parts if not speech.is_reasoning(part)]
            if not speech.is_reasoning(item):
                found.append(item)
        return found

    def texts(self, items: Iterable[JSON]) -> Iterator[tuple[JSON, str]]:
        """Yield the places of the visible texts of these items."""
        for item in items:
            parts = item.get(self.speech.parts)
            if isinstance(parts, str):
                yield item, self.speech.parts
            for part in parts if isinstance(parts, list) else ():
                if "text" in part and not self.speech.is_reasoning(part):
                    yield part, "text"

    async def step(self) -> None:
        """Go on as harnesses mostly do, or do something else."""
        odd = ("again", "fork", "rewrite", "edit", "change_head", "delegate", "unknown", "orphan")
        if self.choose.random() < 0.4:
            await getattr(self, self.choose.choice(odd))()
        if (said := await self.send()) is not None:
            self.take(said)

    async def again(self) -> None:
        await self.send()

    async def fork(self) -> None:
        at = self.choose.choice(self.whole)
        await self.send([*self.messages[:at], self.speech.user("Another way.")])

    async def rewrite(self) -> None:
        replies = [one for one in self.messages if one.get("role") in {"assistant", "model"}]
        for holder, name in self.texts(replies[-1:]):
            holder[name] += "."

    async def edit(self) -> None:
        self.messages[self.first] = self.speech.user(f"Begin, {self.choose.randrange(100)}.")

    async def change_head(self) -> None:
        *outer, name = self.speech.limit
        fields = self.head[outer[0]] if outer else self.head
        fields[name] = self.choose.randrange(1100, 1400)

    async def delegate(self) -> None:
        """Have a sub-agent do what a call of ours tells it."""
        sub = Harness(
            self.caller, self.speech, "You are a sub-agent.", self.choose, streams=self.streams
        )
        sub.messages[sub.first] = self.speech.user(ERRAND)
        for _ in range(self.choose.randrange(1, 4)):
            if (said := await sub.send()) is not None:
                sub.take(said)
        self.answers += sub.answers

    async def unknown(self) -> None:
        self.messages[-1] = {**self.messages[-1], "mood": "good"}

    async def orphan(self) -> None:
        lost = self.speech.results([({"id": "call_x"}, "lost")])
        await self.send([*self.messages, *lost])
