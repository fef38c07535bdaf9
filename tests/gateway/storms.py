"""Many equal calls at once through the official SDKs, with clients that give up and come again.

All calls of a dialect ask one question. A client is patient, hasty (it gives up a try early and
its SDK tries again) or leaves for good. Every reply that a client got must be an exchange of its
own, delivered; nothing else may be delivered but what a client that left could have had.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from google import genai
from google.genai import errors as google_errors
from google.genai import types as google
from tests.gateway.house import scripted

from bridle.engines.base import Engine
from bridle.errors import EngineError
from bridle.scripted.engine import PROBE_PREFIX

TRIES = 60
"""More retries than a storm lasts."""
HASTY_S = 0.6
SLOW_S = 1.5
"""Longer than a hasty client waits, shorter than a lost call is kept."""


class Stormy:
    """An engine that is slow at times and fails at times, before its first token."""

    def __init__(self, seed: int, engine: Engine | None = None) -> None:
        """`engine` is a scripted one by default."""
        self._inner = engine or scripted({"reasoning": "hm", "content": "a"})
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request):
        fate = 0.5 if PROBE_PREFIX in request.request_id else self._random.random()
        await asyncio.sleep(SLOW_S if fate < 0.2 else self._random.uniform(0, 0.1))
        if fate > 0.8:
            status = self._random.choice([429, 500, 503])
            raise EngineError("a gust", status=status, retryable=status != 500)
        async for chunk in self._inner.generate(request):
            yield chunk


@dataclass
class Outcome:
    """The end of a storm: ids of the replies that clients got, and how many left for good."""

    replies: list[str] = field(default_factory=list)
    left: int = 0


BROKEN = (
    google_errors.APIError,
    httpx.TimeoutException,
    httpx2.TimeoutException,  # of Anthropic's SDK, in the midst of a stream
    openai.APITimeoutError,
)
"""Errors at which a program asks again whose SDK does not."""

Ask = Callable[[], Awaitable[str]]


@asynccontextmanager
async def clients(urls: dict[str, str], key: str, timeout_s: float) -> AsyncIterator[list[Ask]]:
    """One way to ask per dialect and form of reply; each gives the id of the reply."""
    async with AsyncExitStack() as stack:
        options: Any = {"api_key": key, "max_retries": TRIES, "timeout": timeout_s}
        limits = httpx.Limits(max_connections=1000)
        chat: Any = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=urls["openai"], **options)
        )
        claude: Any = await stack.enter_async_context(
            anthropic.AsyncAnthropic(base_url=urls["anthropic"], **options)
        )
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=timeout_s, limits=limits))
        made = google.HttpOptions(base_url=urls["google"], httpx_async_client=http)
        gemini: Any = genai.Client(api_key=key, http_options=made).aio.models
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}

        async def chat_whole() -> str:
            return (await chat.chat.completions.create(**asked)).id

        async def chat_streamed() -> str:
            chunks = await chat.chat.completions.create(**asked, stream=True)
            return [chunk.id async for chunk in chunks][-1]

        async def responses() -> str:
            return (await chat.responses.create(model="m", input="go")).id

        async def messages() -> str:
            return (await claude.messages.create(**asked, max_tokens=90)).id

        async def messages_streamed() -> str:
            async with claude.messages.stream(**asked, max_tokens=90) as events:
                return (await events.get_final_message()).id

        async def generated() -> str:
            return (await gemini.generate_content(model="m", contents="go")).response_id

        yield [
            chat_whole,
            again(chat_streamed),
            responses,
            messages,
            again(messages_streamed),
            again(generated),
        ]


def again(ask: Ask) -> Ask:
    """Ask until there is a reply, as a program does whose SDK does not try again by itself.

    Google's SDK never does, and no SDK does after the headers of a stream.
    """

    async def asked() -> str:
        for _ in range(TRIES):
            try:
                return await ask()
            except BROKEN:
                await asyncio.sleep(0.5)
        raise TimeoutError

    return asked


async def blow(urls: dict[str, str], key: str, seed: int, calls: int) -> Outcome:
    """Have so many calls asked at once and return when all have ended."""
    chance, outcome = random.Random(seed), Outcome()

    async def patient(ask: Ask) -> None:
        outcome.replies.append(await ask())

    async def leaves(ask: Ask, after_s: float) -> None:
        try:
            async with asyncio.timeout(after_s):
                outcome.replies.append(await ask())
        except TimeoutError:
            outcome.left += 1

    async with (
        clients(urls, key, 300) as calm,
        clients(urls, key, HASTY_S) as hasty,
        asyncio.TaskGroup() as group,
    ):
        for number in range(calls):
            kind, which = chance.random(), number % len(calm)
            if kind < 0.4:
                group.create_task(patient(calm[which]))
            elif kind < 0.8:
                group.create_task(patient(hasty[which]))
            else:
                group.create_task(leaves(calm[which], chance.uniform(0, 2)))
    return outcome


Control = Callable[..., Awaitable[tuple[int, Any]]]
"""Status and JSON of a control request, by method, path and body."""


async def pauses(control: Control, seed: int) -> None:
    """Pause the model again and again, for a moment each, until cancelled."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(chance.uniform(0.2, 1))
        await control("POST", "/policy", {"paused": True})
        await asyncio.sleep(chance.uniform(0, 0.3))
        await control("POST", "/policy", {"paused": False})


async def weather(
    control: Control, sessions: Sequence[tuple[str, dict[str, str], str]], seed: int, calls: int
) -> None:
    """Have each session hit by so many calls and by pauses, and check what was recorded.

    `sessions` are names, base URLs and keys.
    """
    async with asyncio.TaskGroup() as group:
        pausing = group.create_task(pauses(control, seed))
        async with asyncio.TaskGroup() as storms:
            blown = [storms.create_task(blow(urls, key, seed, calls)) for _, urls, key in sessions]
        pausing.cancel()
    replies = [reply for one in blown for reply in one.result().replies]
    assert len(set(replies)) == len(replies)
    for (name, _, _), outcome in zip(sessions, blown, strict=True):
        _, found = await control("GET", f"/sessions/{name}/exchanges")
        check(outcome.result(), found["exchanges"], calls)
        _, trajectory = await control("GET", f"/sessions/{name}/trajectory")
        stats = trajectory["metadata"]["stats"]
        delivered = [one for one in found["exchanges"] if one["delivered"]]
        assert stats["tokens_trained"] == sum(len(one["output_ids"]) for one in delivered)
        assert stats["joins"] == sum(len(one["joined_by"]) for one in found["exchanges"])


def check(outcome: Outcome, exchanges: Sequence[dict[str, Any]], calls: int) -> None:
    """Every reply is a delivered exchange of its own; `exchanges` as the gateway shows them."""
    assert len(outcome.replies) + outcome.left == calls
    delivered = [one for one in exchanges if one["delivered"]]
    known = {one["reply"].get("id") or one["reply"]["responseId"] for one in delivered}
    assert len(known) == len(delivered)
    assert len(set(outcome.replies)) == len(outcome.replies)
    assert set(outcome.replies) <= known
    assert len(delivered) <= calls
