"""A gateway that was killed and started again on the same store."""

import asyncio
import sqlite3
import sys
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import orjson
import pytest
from tests.conformance.memory import MemoryStore
from tests.dialects.sse import SseParser
from tests.gateway.gated import Gated
from tests.gateway.house import (
    SHELL_TOOL,
    Caller,
    House,
    house,
    scripted,
    tool_result,
    user,
)
from tests.gateway.test_data import REQUESTS, request
from tests.gateway.test_relay import went

from bridle.capture.reader import SqliteReader
from bridle.capture.sqlite import SqliteStore
from bridle.config import Limits
from bridle.errors import StoreError
from bridle.trajectory import rebuild
from bridle.types import DeliveryState, Dialect

TURNS = (
    {
        "reasoning": "hm",
        "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}],
    },
    {"content": "one file"},
    {"content": "more"},
)


@asynccontextmanager
async def on_disk(path, *turns, **settings):
    """A gateway on the SQLite file at `path`."""
    store = await SqliteStore.open(path)
    try:
        async with house(*turns, store=store, **settings) as home:
            yield home
    finally:
        await store.aclose()


def again(home: House, caller: Caller) -> Caller:
    """The same harness, its base URL pointing at the new gateway."""
    moved = Caller(home, caller.handle)
    moved.url = f"{home.gateway.url}/s/{caller.session_id}/v1/chat/completions"
    return moved


async def test_a_session_continues_with_its_facts_tokens_and_limits_after_a_restart(tmp_path):
    path = tmp_path / "capture.sqlite"
    messages = [user("list")]
    async with on_disk(path, *TURNS) as home:
        caller = await home.session("one", limits=Limits(max_turns=3))
        messages.append(await caller.ask(messages, tools=[SHELL_TOOL]))
        messages.append(tool_result(messages[1]["tool_calls"][0], "a.txt"))
        messages.append(await caller.ask(messages, tools=[SHELL_TOOL]))
        before = caller.facts
    messages.append(user("go on"))
    async with on_disk(path, *TURNS) as home:
        caller = again(home, caller)
        assert home.gateway.session_ids() == ["one"]
        facts = caller.facts
        assert (facts.turns, facts.tokens, facts.delivered) == (2, before.tokens, 2)
        assert (await caller.ask(messages, tools=[SHELL_TOOL]))["content"] == "more"
        first, second, third = caller.exchanges
        assert (third.parent_id, third.index) == (second.exchange_id, 2)
        assert third.kept == second.prompt_length + len(second.output_ids)
        assert third.request.kept_spans == 3
        # The limit of the session still holds.
        assert (await caller.post({"model": "m", "messages": [user("x")]}))[0] == 429
        assert first.parent_id is None
        _, trajectory = await home.control("GET", "/sessions/one/trajectory")
        assert trajectory["metadata"]["stats"]["merge_ratio"] == 1.0


async def test_a_turn_with_a_prefill_is_extended_after_a_restart(tmp_path):
    asked = [user("2+2?"), {"role": "assistant", "content": "The answer"}]
    whole = [asked[0], {"role": "assistant", "content": "The answer is 4."}, user("on")]
    async with on_disk(tmp_path / "c.sqlite", {"raw": " is 4.<|im_end|>"}) as home:
        caller = await home.session("one")
        await messages_of(caller, asked)
    async with on_disk(tmp_path / "c.sqlite", {"content": "5"}) as home:
        caller = again(home, caller)
        await messages_of(caller, whole)
        one, two = caller.exchanges
        assert two.parent_id == one.exchange_id


async def messages_of(caller, messages):
    """Ask in Anthropic's dialect."""
    body = {"model": "m", "max_tokens": 99, "messages": messages}
    path = f"/s/{caller.session_id}/v1/messages"
    status, _, _ = await request(caller.house, "POST", path, key=caller.handle.key, body=body)
    assert status == 200


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_every_dialect_s_exchanges_come_back(dialect, tmp_path):
    path, body, _ = REQUESTS[dialect]
    async with on_disk(tmp_path / "c.sqlite", {"content": "hello"}) as home:
        caller = await home.session("one")
        _, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
    body = {**body, **continued(dialect, body, orjson.loads(raw))}
    async with on_disk(tmp_path / "c.sqlite", {"content": "hello"}, {"content": "again"}) as home:
        caller = again(home, caller)
        status, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
        assert status == 200, raw
        first, second = caller.exchanges
        assert second.parent_id == first.exchange_id


def continued(dialect, body, reply):
    """Return what a faithful client sends after `reply`."""
    match dialect:
        case Dialect.ANTHROPIC:
            answer = {"role": "assistant", "content": reply["content"]}
            return {"messages": [*body["messages"], answer, user("on")]}
        case Dialect.OPENAI_CHAT:
            answer = reply["choices"][0]["message"]
            return {"messages": [*body["messages"], answer, user("on")]}
        case Dialect.OPENAI_RESPONSES:
            return {"input": [user(body["input"]), *reply["output"], user("on")]}
        case Dialect.GOOGLE:
            answer = reply["candidates"][0]["content"]
            on = {"role": "user", "parts": [{"text": "on"}]}
            return {"contents": [*body["contents"], answer, on]}


async def test_an_ended_session_stays_ended_and_can_be_read(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one")
        await caller.ask([user("go")])
        await home.control("DELETE", "/sessions/one")
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        assert (await caller.post({"model": "m", "messages": [user("go")]}))[0] == 401
        assert (caller.facts.turns, caller.facts.sealed) == (1, True)
        _, read = await home.control("GET", "/sessions/one/exchanges")
        assert len(read["exchanges"]) == 1


async def test_a_reply_that_never_arrived_is_given_to_the_retry_after_a_restart(tmp_path):
    path = tmp_path / "c.sqlite"
    call = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
    engine = Gated(call)
    async with on_disk(path, engine=engine) as home:
        caller = await home.session("one")
        await went(caller, engine)
        engine.sign.set()
        await caller.until(lambda: caller.facts.turns == 1)
        kept = orjson.loads(caller.exchanges[0].reply)["choices"][0]["message"]
    async with on_disk(path, call) as home:
        caller = again(home, caller)
        reply = await caller.ask([user("go")])
        assert reply == kept
        assert caller.facts.turns == 1
        assert caller.delivery(0) is DeliveryState.DELIVERED


STREAMS = {
    "/v1/messages": {"max_tokens": 99, "stop_sequences": ["zz"]},
    "/v1/chat/completions": {"logprobs": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_lost_stream_that_is_asked_for_after_a_restart_ends_as_it_would_have(
    path, tmp_path
):
    body = {"model": "m", "messages": [user("go")], "stream": True, **STREAMS[path]}
    engine = Gated({"reasoning": "hm", "content": "alpha zz beta"})
    async with on_disk(tmp_path / "c.sqlite", engine=engine) as home:
        whole, lost = await home.session("whole"), await home.session("lost")
        engine.sign.set()
        expected = await pieces(home, path, whole, body)
        engine.sign.clear()
        engine.waits.clear()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(pieces(home, path, lost, body))
            await engine.waits.wait()
            asking.cancel()
        await lost.unclaimed()
        engine.sign.set()
        await lost.until(lambda: lost.facts.turns == 1)
    async with on_disk(tmp_path / "c.sqlite", {"content": "another"}) as home:
        assert await pieces(home, path, lost, body) == expected


async def pieces(home, path, caller, body):
    """Return what the events of a stream say besides their ids."""
    _, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
    said = [orjson.loads(one.data) for one in SseParser().feed(raw) if one.data != "[DONE]"]
    return [(one.get("delta"), one.get("choices"), one.get("usage")) for one in said]


async def test_a_delivered_reply_asked_again_by_its_idempotency_key_after_a_restart_is_superseded(
    tmp_path,
):
    path, key = tmp_path / "c.sqlite", {"idempotency-key": "k" * 5000}
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one")
        await caller.ask([user("go")], key)
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        await caller.ask([user("go")], key)
        await caller.ask([user("go")], {"idempotency-key": "another"})
        states = [caller.delivery(index) for index in range(3)]
        assert states == [DeliveryState.SUPERSEDED, *[DeliveryState.DELIVERED] * 2]
        stats = rebuild(home.store.read("one")).metadata["stats"]
        assert stats["tokens_excluded"] == {"superseded": len(caller.exchanges[0].output_ids)}


async def test_a_branch_of_an_old_session_keeps_only_what_is_new(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one")
        messages = [user("go")]
        for step in range(3):
            messages += [await caller.ask(messages), user(f"on {step}")]
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        await caller.ask([*messages[:2], user("another way")])
        branch = caller.exchanges[-1]
        assert branch.parent_id == caller.exchanges[0].exchange_id
        assert branch.request.kept_spans == 1 + (branch.request.base != branch.parent_id)


async def test_sessions_that_no_gateway_opened_are_left_alone(tmp_path):
    store = await SqliteStore.open(tmp_path / "c.sqlite")
    from bridle.capture.records import SessionRecord

    await store.open_session(SessionRecord("foreign", 0.0))
    try:
        async with house({"content": "a"}, store=store) as home:
            assert home.gateway.session_ids() == []
    finally:
        await store.aclose()


async def test_a_damaged_exchange_costs_its_session_only_that_exchange(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one")
        messages = [user("go")]
        for _ in range(3):
            messages += [await caller.ask(messages), user("on")]
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE exchanges SET base = 'unknown' WHERE idx = 1")
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        await caller.ask(messages)
        assert caller.facts.turns == 4
        assert caller.exchanges[-1].continues == caller.exchanges[0].exchange_id


async def test_a_row_that_cannot_be_decoded_costs_its_session_only_that_exchange(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one", limits=Limits(max_turns=4))
        messages = [user("go")]
        for _ in range(3):
            messages += [await caller.ask(messages), user("on")]
        tokens = caller.facts.tokens
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE exchanges SET kind = 'unknown' WHERE idx = 1")
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        assert (caller.facts.turns, caller.facts.tokens) == (3, tokens)
        await caller.ask(messages)
        with SqliteReader(path) as reader:
            assert [one.index for one in reader.read("one").exchanges] == [0, 2, 3]
        status, _ = await caller.post({"model": "m", "messages": [user("more")]})
        assert status == 429


async def test_the_seconds_of_a_session_count_from_its_first_call_in_an_earlier_process(tmp_path):
    path = tmp_path / "c.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session("one", limits=Limits(max_seconds=60))
        messages = [user("go")]
        messages += [await caller.ask(messages), user("on")]
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE exchanges SET started_at = started_at - 61")
    async with on_disk(path, {"content": "a"}) as home:
        caller = again(home, caller)
        status, _ = await caller.post({"model": "m", "messages": messages})
        assert status == 429
        assert caller.facts.limit == "seconds"


class Unreadable(MemoryStore):
    """It fails to read as often as `faults` says."""

    faults = 0

    def exchanges(self, session_id):
        self._fail()
        return super().exchanges(session_id)

    def read(self, session_id):
        self._fail()
        return super().read(session_id)

    def _fail(self):
        if self.faults:
            self.faults -= 1
            raise StoreError("cannot read")


async def test_a_session_that_could_not_be_read_back_is_read_at_its_next_request():
    store = Unreadable()
    async with house({"content": "a"}, store=store) as home:
        caller = await home.session("one")
        messages = [user("go")]
        messages += [await caller.ask(messages), user("on")]
    async with house({"content": "a"}, store=store) as home:
        caller = again(home, caller)
        store.faults = 2
        for _ in range(2):
            status, _ = await caller.post({"model": "m", "messages": messages})
            assert status == 503
        await caller.ask(messages)
        assert caller.exchanges[-1].continues == caller.exchanges[0].exchange_id
        assert caller.facts.turns == 2


# ---- kill -9


SERVER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.gateway.house import house, scripted
from bridle.capture.sqlite import SqliteStore

async def main():
    store = await SqliteStore.open(Path(sys.argv[1]))
    async with house(engine=scripted({{"content": "a reply of some words"}}), store=store) as home:
        handle = await home.gateway.open_session("one")
        print(home.gateway.url, handle.key, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_every_reply_that_left_before_a_kill_is_there_after_it(tmp_path):
    path = tmp_path / "c.sqlite"
    program = SERVER.format(root=str(Path(__file__).parents[2]))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url, key = (await process.stdout.readline()).decode().split()
        replies = await ask_until_killed(url, key, process.kill)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    async with on_disk(path, {"content": "a"}) as home:
        exchanges = home.store.exchanges("one")
        assert {orjson.loads(exchange.reply)["id"] for exchange in exchanges} >= replies
        assert len(replies) >= 8
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "m", "messages": [user("once more")]}
        url = f"{home.gateway.url}/v1/chat/completions"
        async with home.client.post(url, json=body, headers=headers) as response:
            assert response.status == 200


async def ask_until_killed(url, key, kill) -> set[str]:
    """Ask in four conversations at once; kill after some replies; the ids of all that arrived."""
    replies: set[str] = set()
    headers = {"Authorization": f"Bearer {key}"}

    async def ask(client, name):
        messages = [user(name)]
        try:
            while True:
                body = {"model": "m", "messages": messages}
                async with client.post(
                    f"{url}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    reply = await response.json()
                replies.add(reply["id"])
                messages += [reply["choices"][0]["message"], user("on")]
                if len(replies) == 8:
                    kill()
        except (aiohttp.ClientError, OSError):
            return

    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(ask(client, name))
    return replies


def test_the_server_program_of_the_kill_test_compiles():
    compile(SERVER.format(root="x"), "server", "exec")
    assert scripted({"content": "a"}).script.model == "scripted"


async def test_a_sealed_session_s_deliveries_are_in_the_file_that_others_read(tmp_path):
    path = tmp_path / "capture.sqlite"
    async with on_disk(path, {"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        await home.gateway.seal(caller.session_id)
        with SqliteReader(path) as reader:
            found = reader.deliveries(caller.session_id)
        assert [one.state for one in found.values()] == [DeliveryState.DELIVERED]
