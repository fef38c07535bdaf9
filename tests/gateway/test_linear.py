"""Turns that go on from the last one: later requests find them as those of the general path."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.gateway.house import SHELL_TOOL, Caller, user
from tests.gateway.test_plain import CALL, OTHER, Watched, played, rows_of

from bridle.dialects import history as history_file
from bridle.gateway import exchange as exchange_file
from bridle.gateway import linear as linear_file
from bridle.gateway import plain as plain_file
from bridle.gateway.listener import AT_ONCE

JSON = dict[str, Any]


class Talk:
    """A harness with one conversation, whose requests are large enough to be remembered."""

    def __init__(self, caller: Caller, engine: Watched):
        self.caller, self.engine = caller, engine
        self.messages: list[JSON] = [user("Begin.")]
        self.before: list[list[JSON]] = []
        """The requests so far."""

    async def turns(self, count: int, *texts: str) -> None:
        """Take so many turns; a user says these texts after each."""
        for _ in range(count):
            self.before.append(list(self.messages))
            reply = await self.caller.ask(self.messages, tools=[SHELL_TOOL])
            self.messages.append(reply)
            for call in reply.get("tool_calls") or ():
                result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                self.messages.append(result)
            if not reply.get("tool_calls"):
                self.messages += [user(text) for text in texts or ("And then?",)]


async def rows(
    steps: Callable[[Talk], Awaitable[None]], *turns: JSON, plain: bool
) -> tuple[list[JSON], int]:
    """Play steps; the records of the session, and how many turns went on without a search."""
    taken: list[linear_file.LinearTurn] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_file, "os", SimpleNamespace(urandom=random.Random(0).randbytes))
        patch.setattr(history_file, "SMALLEST", 1)
        begun = linear_file.Tip.begun

        def counted(*given: Any) -> linear_file.LinearTurn:
            turn = begun(*given)
            taken.append(turn)
            return turn

        patch.setattr(linear_file.Tip, "begun", counted)
        engine = Watched(*(turns or ({"content": "a"}, {"content": "b"})))
        async with played(server=engine, plain=plain) as home:
            caller = Caller(home, (await home.session("s")).handle)
            await steps(Talk(caller, engine))
            return rows_of(home, "s"), len(taken)


async def repeated(talk: Talk) -> None:
    await talk.turns(5)
    await talk.caller.ask(talk.before[-1], tools=[SHELL_TOOL])
    await talk.turns(3)


async def rewound(talk: Talk) -> None:
    await talk.turns(5)
    talk.messages = [*talk.before[3], {"role": "assistant", "content": "b"}, user("Else?")]
    await talk.turns(4)


async def rewritten(talk: Talk) -> None:
    await talk.turns(4)
    talk.messages[-2] = {"role": "assistant", "content": "What I never said."}
    await talk.turns(4)


async def altered(talk: Talk) -> None:
    """The first message becomes another one of the same length."""
    await talk.turns(4)
    talk.messages[0] = user("Regin.")
    await talk.turns(3)


async def beside_another(talk: Talk) -> None:
    other = Talk(talk.caller, talk.engine)
    other.messages = [user("Begin elsewhere.")]
    for _ in range(4):
        await talk.turns(2)
        await other.turns(2)


async def interrupted(talk: Talk) -> None:
    """Another conversation begins while a turn is sampled."""
    await talk.turns(3)
    talk.engine.held = True
    async with asyncio.TaskGroup() as group:
        group.create_task(talk.turns(1))
        await talk.engine.waits.wait()
        talk.engine.held = False
        await talk.caller.ask([user("Something else.")])
        talk.engine.sign.set()
    await talk.turns(4)


def said(text: str) -> JSON:
    return {"role": "assistant", "content": text}


BY_OTHERS = [
    *(user("Begin."), said("a"), user("And then?"), said("b"), user("And then?")),
    *(said("b"), user("And then?")),
]
"""A history whose replies nobody sampled, which `Talk` comes to by its own turns."""


async def foretold(talk: Talk) -> None:
    await talk.caller.ask(BY_OTHERS, tools=[SHELL_TOOL])
    await talk.turns(6)


async def foretold_and_lost(talk: Talk) -> None:
    """A client leaves before the reply to a question that is asked again later."""
    talk.engine.held = True
    async with asyncio.TaskGroup() as group:
        lost = group.create_task(talk.caller.ask(BY_OTHERS, tools=[SHELL_TOOL]))
        await talk.engine.waits.wait()
        lost.cancel()
    await talk.caller.unclaimed()
    talk.engine.held = False
    talk.engine.sign.set()
    await talk.caller.until(lambda: len(talk.caller.exchanges) == 1)
    await talk.turns(6)
    assert len(talk.caller.exchanges) == 6, "the lost call was joined"


async def many(talk: Talk) -> None:
    await talk.turns(12)
    await talk.caller.ask(talk.before[4], tools=[SHELL_TOOL])


async def several_messages(talk: Talk) -> None:
    await talk.turns(6, "One.", "Two.")


@pytest.mark.parametrize(
    "steps",
    [
        *(
            repeated,
            rewound,
            rewritten,
            altered,
            beside_another,
            interrupted,
            many,
            several_messages,
        ),
        *(foretold, foretold_and_lost),
    ],
)
async def test_the_fast_path_for_linear_turns_records_the_same_rows_as_the_general_path(
    steps, monkeypatch
):
    monkeypatch.setattr(linear_file, "MOST_TURNS", 4)
    general, none = await rows(steps, plain=False)
    linear, taken = await rows(steps, plain=True)
    assert linear == general
    assert none == 0
    assert taken >= 1


async def test_a_limit_makes_linear_turns_settle_in_smaller_batches(monkeypatch):
    async def work(talk: Talk) -> None:
        await talk.turns(9)

    general, _ = await rows(work, plain=False)
    monkeypatch.setattr(linear_file, "MOST_TURNS", 1)
    linear, taken = await rows(work, plain=True)
    assert linear == general
    assert taken == 4, "every other turn is settled with the one before it"


async def test_a_turn_after_a_reply_too_long_to_be_sent_in_one_write_extends_that_reply():
    async def work(talk: Talk) -> None:
        await talk.turns(4)

    turns = ({"content": "function " * (AT_ONCE // 8)},) * 4
    general, _ = await rows(work, *turns, plain=False)
    linear, taken = await rows(work, *turns, plain=True)
    assert linear == general
    assert taken >= 1


@pytest.mark.parametrize("calls", [[CALL], [CALL, OTHER]])
async def test_the_linear_path_serves_turns_with_one_tool_result_and_no_parallel_ones(calls):
    async def work(talk: Talk) -> None:
        await talk.turns(6)

    turns = ({"content": "I look.", "tool_calls": calls},) * 6
    general, _ = await rows(work, *turns, plain=False)
    linear, taken = await rows(work, *turns, plain=True)
    assert linear == general
    assert taken == (5 if len(calls) == 1 else 0)


async def test_a_tool_call_without_a_result_is_recorded_alike_on_both_paths():
    async def work(talk: Talk) -> None:
        await talk.turns(3)
        talk.messages[-1] = user("Never mind.")
        await talk.turns(3)

    turns = ({"content": "I look.", "tool_calls": [CALL]},) * 6
    general, _ = await rows(work, *turns, plain=False)
    linear, taken = await rows(work, *turns, plain=True)
    assert linear == general
    assert taken >= 2


async def test_a_result_that_no_call_asked_for_is_refused():
    async def work(talk: Talk) -> None:
        await talk.turns(3)
        result = {"role": "tool", "tool_call_id": "call_of_nobody", "content": "?"}
        status, _ = await talk.caller.post({"model": "m", "messages": [*talk.messages, result]})
        assert status == 400
        await talk.turns(2)

    general, _ = await rows(work, plain=False)
    linear, taken = await rows(work, plain=True)
    assert linear == general
    assert taken == 3


async def test_a_reply_is_the_conversation_tip_for_its_own_request_object_only(monkeypatch):
    monkeypatch.setattr(history_file, "SMALLEST", 1)
    monkeypatch.setattr(plain_file, "tip_of", lambda *_: None)
    async with played({"content": "a"}) as home:
        gateway = home.gateway
        caller = Caller(home, (await home.session("s")).handle)
        await caller.ask([user("Begin.")])
        session = caller._session
        assert session.newest is not None, "no tip was made of it"
        own, (known,) = session.newest[1].request, gateway.plain._known.values()
        models = gateway.plain.exchanges.models
        assert linear_file.tip_of(session, replace(own), known, models) is None
        assert linear_file.tip_of(session, own, known, models) is not None
