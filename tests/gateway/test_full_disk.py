"""The gateway while its disk is full: refusals that pass, no sample lost or handed out twice."""

import asyncio
from contextlib import asynccontextmanager, suppress

import aiohttp
import orjson
from tests.disks import full_disk
from tests.gateway.house import house, scripted, user

from bridle.capture.sqlite import SqliteStore
from bridle.types import DeliveryState

FULL = {"status": "store_error", "detail": "File too large"}


class Counted:
    """An engine that counts its samples."""

    def __init__(self):
        self._inner = scripted({"content": "a"}, {"content": "b"})
        self.samples = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def generate(self, request):
        self.samples += 1
        return self._inner.generate(request)


@asynccontextmanager
async def one_turn(path, engine):
    """A gateway on a file, and a caller who has had one reply."""
    async with (
        await SqliteStore.open(path) as store,
        house(engine=engine, store=store) as home,
    ):
        caller = await home.session()
        first = await caller.ask([user("go")])
        while caller.delivery(0) is not DeliveryState.DELIVERED:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        yield home, caller, [user("go"), first, user("on")]


async def healthy(home):
    while (await home.control("GET", "/health", token=""))[0] != 200:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.05)


async def test_a_retry_after_a_full_disk_is_one_new_sample(tmp_path):
    engine = Counted()
    async with one_turn(tmp_path / "capture.sqlite", engine) as (home, caller, messages):
        with full_disk():
            assert await home.control("GET", "/health", token="") == (503, FULL)
            status, reply = await caller.post({"model": "m", "messages": messages})
            assert (status, reply["error"]["code"]) == (503, "store_error")
            assert str(tmp_path) not in str(reply)
            assert (caller.facts.turns, caller.facts.last_error_code) == (1, "store_error")
        await healthy(home)
        assert (await caller.ask(messages))["content"] == "b"
        assert engine.samples == 3
        first, second = caller.exchanges
        assert second.parent_id == first.exchange_id
        assert caller.facts.turns == 2


async def test_a_stream_on_a_full_disk_is_refused_or_cut_without_its_last_event(tmp_path):
    async with one_turn(tmp_path / "capture.sqlite", Counted()) as (home, caller, messages):
        came = b""
        with full_disk():
            body = orjson.dumps({"model": "m", "messages": messages, "stream": True})
            async with home.client.post(caller.url, data=body, headers=caller.headers) as response:
                with suppress(aiohttp.ClientPayloadError):
                    async for piece in response.content.iter_any():
                        came += piece
        assert response.status == 200 or b"store_error" in came
        assert b"[DONE]" not in came
        assert caller.facts.last_error_code == "store_error"
        assert len(caller.exchanges) == 1


async def test_no_session_opens_on_a_full_disk(tmp_path):
    async with one_turn(tmp_path / "capture.sqlite", Counted()) as (home, _, _):
        with full_disk():
            status, reply = await home.control("POST", "/sessions", {"session_id": "late"})
            assert (status, reply["error"]["code"]) == (503, "store_error")
        status, _ = await home.control("POST", "/sessions", {"session_id": "late"})
        assert status == 200
