"""The plain path: what it serves is stored, counted and answered as by the general path."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from tests.gateway.house import (
    SHELL_TOOL,
    TOKEN,
    Caller,
    House,
    scripted,
    tool_result,
    user,
)

from bridle.capture.sqlite import SqliteStore
from bridle.capture.store import MemoryStore
from bridle.config import Limits, SamplingPolicy
from bridle.engines.vllm import VllmEngine
from bridle.errors import EngineError
from bridle.gateway.app import Gateway
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import load_renderer
from bridle.scripted.server import EngineServer
from bridle.types import DeliveryState

CALL = {"name": "bash", "arguments": {"command": "ls"}}
OTHER = {"name": "bash", "arguments": {"command": "cat notes about the second part"}}
TURNS = (
    {"content": "I will look."},
    {"reasoning": "First the files.", "content": "", "tool_calls": [CALL]},
    {"reasoning": "Both are needed.", "content": "I look twice.", "tool_calls": [CALL, OTHER]},
    {"content": "Not whole", "finish": "length"},
    {"reasoning": "Only a thought.", "content": "It is done."},
    {"raw": '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>'},
    {"content": "  spaced \n"},
    {"reasoning": "Only a thought", "content": ""},
)
"""Replies by the number of assistant messages before them."""


@asynccontextmanager
async def played(
    *turns: dict[str, Any],
    store: Any = None,
    plain: bool = True,
    server: Any = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """A gateway before an engine server; ids of calls are counted."""
    numbers = itertools.count()
    async with EngineServer(server or scripted(*turns)) as engine:
        gateway = Gateway(
            engine=VllmEngine(engine.url),
            renderer=load_renderer("builtin", new_call_id=lambda: f"call_{next(numbers):030}"),
            store=store or MemoryStore(),
            settings=GatewaySettings(control_token=TOKEN, **settings),
        )
        async with gateway, aiohttp.ClientSession() as client:
            gateway.plain.is_open = plain
            yield House(gateway, gateway._store, client)


class Harness:
    """One conversation of a harness, which may do odd things with it."""

    def __init__(self, caller: Caller, system: str, choose: random.Random) -> None:
        self.caller = caller
        self.choose = choose
        self.head: dict[str, Any] = {"model": "m", "tools": [SHELL_TOOL]}
        self.messages: list[Any] = [{"role": "system", "content": system}, user("Begin.")]
        self.told: list[Any] = []

    async def send(self, messages: list[Any] | None = None, **more: Any) -> Any:
        body = {**self.head, "messages": messages or self.messages, **more}
        status, reply = await self.caller.post(body)
        self.told.append((status, reply))
        return reply["choices"][0]["message"] if status == 200 else None

    def take(self, said: Any) -> None:
        """Add a reply, and what the harness says to it."""
        said = {name: value for name, value in said.items() if value is not None or name == "content"}
        odd = self.choose.random()
        if odd < 0.15:
            said.pop("reasoning_content", None)
        elif odd < 0.25:
            said["annotations"] = []
        elif odd < 0.3 and isinstance(said["content"], str):
            said["content"] = said["content"].strip()
        self.messages.append(said)
        calls = list(said.get("tool_calls", ()))
        if self.choose.random() < 0.2:
            calls.reverse()
        for call in calls:
            self.messages.append(tool_result(call, f"result {self.choose.randrange(1000)}"))
        if not calls or self.choose.random() < 0.2:
            self.messages.append(user(f"Next {self.choose.randrange(1000)}."))

    async def step(self) -> None:
        """Go on as harnesses mostly do, or do something else."""
        match self.choose.choices(
            ["on", "again", "fork", "rewrite", "edit", "head", "alone", "unknown", "orphan"],
            [14, 1, 1, 1, 1, 1, 1, 1, 1],
        )[0]:
            case "again":
                await self.send()
            case "fork":
                at = self.choose.randrange(2, len(self.messages) + 1)
                while at < len(self.messages) and self.messages[at]["role"] == "tool":
                    at += 1
                await self.send([*self.messages[:at], user("Another way.")])
            case "rewrite" if len(self.messages) > 3:
                for message in self.messages[::-1]:
                    if message["role"] == "assistant":
                        message["content"] = (message["content"] or "") + "."
                        break
            case "edit":
                self.messages[1] = user(f"Begin, {self.choose.randrange(100)}.")
            case "head":
                self.head["max_tokens"] = self.choose.randrange(100, 400)
            case "alone":
                sub = Harness(self.caller, "You are a sub-agent.", self.choose)
                sub.messages[1] = user(OTHER["arguments"]["command"])  # type: ignore[index]
                for _ in range(self.choose.randrange(1, 4)):
                    if (said := await sub.send()) is not None:
                        sub.take(said)
                self.told += sub.told
            case "unknown":
                self.messages[-1] = {**self.messages[-1], "mood": "good"}
            case "orphan":
                await self.send([*self.messages, tool_result({"id": "call_x"}, "lost")])
            case _:
                pass
        if (said := await self.send()) is not None:
            self.take(said)


RANDOM = ("id", "created")


def replies_of(told: list[Any]) -> list[Any]:
    """What a harness was told, without random ids and times."""
    return [
        (status, {name: value for name, value in reply.items() if name not in RANDOM})
        for status, reply in told
    ]


def rows_of(home: House, session_id: str) -> list[dict[str, Any]]:
    """What was stored of a session, exchange ids by their order, without times."""
    exchanges = home.store.exchanges(session_id)
    names = {one.exchange_id: f"e{index}" for index, one in enumerate(exchanges)}
    deliveries = home.store.deliveries(session_id)
    rows = []
    for one in exchanges:
        row: dict[str, Any] = {}
        for name in one.__dataclass_fields__:
            if name in {"session_id", "started_at", "first_token_s", "duration_s"}:
                continue
            value = getattr(one, name)
            row[name] = value.tolist() if isinstance(value, np.ndarray) else repr(value)
        reply = orjson.loads(one.reply)
        row["reply"] = {name: value for name, value in reply.items() if name not in RANDOM}
        delivery = deliveries.get(one.exchange_id)
        if delivery is not None:
            row["delivery"] = [delivery.state, delivery.detail, len(delivery.joined_by)]
        text = json.dumps(row, default=str)
        for exchange_id, number in names.items():
            text = text.replace(exchange_id, number)
        rows.append(json.loads(text))
    bodies = home.store.bodies(session_id)
    rows.append({digest.hex(): body.decode() for digest, body in sorted(bodies.items())})
    return rows


def numbers_of(home: House) -> dict[str, float]:
    """The gateway's metrics that do not tell times or addresses."""
    told = [line for line in home.gateway.metrics().splitlines() if not line.startswith("#")]
    found = {}
    for line in told:
        name, _, value = line.rpartition(" ")
        if "seconds" not in name and "free_bytes" not in name:
            found[name.partition(",replica=")[0]] = float(value)
    return found


async def play(seed: int, *, plain: bool, **settings: Any) -> tuple[Any, int]:
    """Play a seed's traffic; all that can be seen of it, and the calls of the plain path."""
    choose = random.Random(seed)
    async with played(*choose.sample(TURNS, 5), plain=plain, **settings) as home:
        limits = Limits(max_turns=choose.choice([None, 12]), max_tokens=choose.choice([None, 400]))
        policy = SamplingPolicy(
            reasoning=choose.choice(["show", "show", "hide"]),  # type: ignore[arg-type]
            on_rewrite=choose.choice(["extend", "fork"]),  # type: ignore[arg-type]
        )
        caller = await home.session("s", limits=limits, sampling=policy)
        harness = Harness(caller, "You are an agent.", choose)
        for _ in range(12):
            await harness.step()
        facts = caller.facts
        return (
            replies_of(harness.told),
            rows_of(home, "s"),
            numbers_of(home),
            (facts.calls, facts.turns, facts.delivered, facts.tokens, facts.limit),
            (facts.failed_last, facts.last_error, facts.last_error_code),
        ), home.gateway.plain.served


@pytest.mark.parametrize("seed", range(12))
async def test_both_paths_store_count_and_answer_alike(seed):
    general, none = await play(seed, plain=False)
    plain, served = await play(seed, plain=True)
    for one, other in zip(plain, general, strict=True):
        assert one == other
    assert none == 0
    assert served > 1, "the plain path was not taken"


# ---- what is not plain


class Watched:
    """A scripted engine whose calls wait for a sign once it is told to hold, and are counted."""

    def __init__(self, *turns: dict[str, Any]):
        self._inner = scripted(*turns)
        self.held = False
        self.errors: list[Exception] = []
        """Raised by the next calls, in their order."""
        self.sign = asyncio.Event()
        self.waits = asyncio.Event()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request):
        self.asked += 1
        if self.held:
            self.waits.set()
            await self.sign.wait()
        if self.errors:
            raise self.errors.pop(0)
        async for chunk in self._inner.generate(request):
            yield chunk


@asynccontextmanager
async def linear(*turns: dict[str, Any], **settings: Any):
    """A gateway, its engine, a caller and the messages of its next linear request."""
    engine = Watched(*(turns or ({"content": "a"},)))
    async with played(server=engine, **settings) as home:
        caller = await home.session("s")
        messages = [user("go")]
        for _ in range(2):
            messages += [await caller.ask(messages), user("and then")]
        assert home.gateway.plain.served == 1, "the second turn took the plain path"
        yield home, engine, caller, messages


def asked(home: House) -> Any:
    """The calls that are on the plain path now."""
    session = home.gateway._registry.get("s")
    assert session is not None
    return [call for call in session.calls.values() if call.flight is not None]


async def test_a_client_that_goes_leaves_its_call_to_a_retry():
    async with linear() as (home, engine, caller, messages):
        engine.held, before = True, engine.asked
        first = asyncio.create_task(caller.ask(messages))
        await engine.waits.wait()
        assert len(asked(home)) == 1
        first.cancel()
        await caller.unclaimed()
        assert not asked(home)
        second = asyncio.create_task(caller.ask(messages))
        await caller.until(lambda: [call for call in caller.calls if call.clients])
        engine.sign.set()
        assert (await second)["content"] == "a"
        assert engine.asked == before + 1, "the retry joined"
        assert caller.delivery(2) is DeliveryState.DELIVERED
        assert len(caller.exchanges) == 3


@pytest.mark.parametrize("grace_s", [0, 10])
async def test_a_call_that_nobody_claims_is_cancelled(grace_s):
    async with linear(retry_grace_s=grace_s) as (home, engine, caller, messages):
        engine.held = True
        first = asyncio.create_task(caller.ask(messages))
        await engine.waits.wait()
        first.cancel()
        if grace_s:
            await caller.unclaimed()
            caller.end_grace()
        await caller.until(lambda: len(caller.calls) == 2)
        pool = home.gateway._engine
        await caller.until(lambda: not pool._calls and not pool.replicas()[0]["calls_in_flight"])
        assert len(caller.exchanges) == 2
        engine.held = False
        engine.sign.set()
        assert (await caller.ask(messages))["content"] == "a"


async def test_a_session_that_ends_ends_its_call():
    async with linear() as (home, engine, caller, messages):
        engine.held = True
        call = asyncio.create_task(caller.post({"model": "m", "messages": messages}))
        await engine.waits.wait()
        assert len(asked(home)) == 1
        await home.gateway.seal("s")
        status, reply = await call
        assert status == 401
        assert "ended" in reply["error"]["message"]
        assert len(caller.exchanges) == 2
        assert not home.gateway._engine._calls


async def test_a_gateway_that_closes_tells_the_client():
    async with linear() as (home, engine, caller, messages):
        engine.held = True
        call = asyncio.create_task(caller.post({"model": "m", "messages": messages}))
        await engine.waits.wait()
        await home.gateway.__aexit__(None, None, None)
        assert (await call)[0] == 503


async def test_a_weight_update_in_the_middle_is_one_reply():
    async with linear() as (home, engine, caller, messages):
        engine.held = True
        call = asyncio.create_task(caller.ask(messages))
        await engine.waits.wait()
        pool = home.gateway._engine
        async with asyncio.TaskGroup() as group:
            held = group.create_task(pool.hold("abort"))
            await caller.until(lambda: any(one.moved for one in pool._calls.values()))
            engine.held = False
            engine.sign.set()
            await held
            await pool.release()
        assert (await call)["content"] == "a"
        assert caller.exchanges[2].extra["resumed"] == 1
        assert home.gateway.plain.served == 1
        assert len(caller.exchanges) == 3


async def test_a_paused_policy_and_a_full_budget_are_told_as_always():
    async with linear() as (home, engine, caller, messages):
        before = engine.asked
        await home.control("POST", "/policy", {"paused": True})
        status, _ = await caller.post({"model": "m", "messages": messages})
        assert (status, engine.asked) == (503, before)


@pytest.mark.parametrize("error", [EngineError("busy", status=503, retryable=True)])
async def test_a_call_that_the_engine_refuses_is_tried_again(error):
    async with linear() as (home, engine, caller, messages):
        engine.errors.append(error)
        before = engine.asked
        assert (await caller.ask(messages))["content"] == "a"
        assert engine.asked == before + 2
        assert home.gateway.plain.served == 1
        assert len(caller.exchanges) == 3


async def test_a_store_that_is_busy_is_waited_for(tmp_path):
    async with await SqliteStore.open(tmp_path / "capture.sqlite", fsync="group") as store:
        engine = Watched({"content": "a"})
        async with played(server=engine, store=store) as home:
            caller = await home.session("s")
            messages: list[Any] = [user("go")]
            before = engine.asked
            for _ in range(4):
                messages += [await caller.ask(messages), user("and then")]
            assert home.gateway.plain.served == 0, "the general path waited for the disk"
            assert engine.asked == before + 4
            assert [caller.delivery(n) for n in range(4)] == [DeliveryState.DELIVERED] * 4
            parents = [one.parent_id for one in caller.exchanges]
            assert parents[1:] == [one.exchange_id for one in caller.exchanges[:-1]]
