"""Callbacks against a real receiver on loopback."""

import asyncio
import hashlib
import hmac
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.server.house import FakeWorkers, a_service, ended, failure, submission, until

from bridle.aio import Nursery
from bridle.errors import ConfigError
from bridle.server import delivery
from bridle.server.addresses import Addresses
from bridle.server.delivery import Deliverer, callback_secret, signature

SECRET = b"a secret"


class Receiver:
    """Takes callbacks; answers each with the next of `answers`, at last with 200."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.got = []
        self.url = ""

    async def take(self, request):
        self.got.append((dict(request.headers), await request.read()))
        status = self.answers.pop(0) if self.answers else 200
        headers = {"location": "/elsewhere"} if status == 302 else {}
        return web.Response(status=status, headers=headers, text="said")

    @asynccontextmanager
    async def up(self):
        app = web.Application()
        app.router.add_post("/callbacks/session_result", self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/callbacks/session_result"
        try:
            yield self
        finally:
            await runner.cleanup()

    def bodies(self):
        return [json.loads(content) for _, content in self.got]


@asynccontextmanager
async def delivering(service, listed=("127.0.0.0/8",)):
    """Tries follow one another at once."""
    async with Nursery(service.lost) as nursery:
        deliverer = Deliverer(service, Addresses(listed), SECRET, first_wait_s=0.0)
        nursery.start(deliverer.run(), name="deliverer")
        yield
    assert service.broken is None


async def callbacks(service, state=None):
    return await service.views.callbacks(after=0, limit=99, state=state)


async def has(service, count, state):
    """Whether so many callbacks are in this state."""
    rows = await callbacks(service)
    return sum(row["state"] == state for row in rows) == count


async def test_each_session_and_then_the_task_is_told_and_signed(tmp_path):
    async with (
        Receiver().up() as receiver,
        a_service(tmp_path, FakeWorkers(answers={"a.1": failure("harness_crash")})) as service,
        delivering(service),
    ):
        await service.submit([submission("a", 2, callback_url=receiver.url)], owner="o")
        await until(lambda: is_acked(service, "a"))
        kinds = [headers["x-bridle-event"] for headers, _ in receiver.got]
        assert sorted(kinds) == ["session", "session", "task"]
        for headers, content in receiver.got:
            at, sent = (part.partition("=")[2] for part in headers["x-bridle-signature"].split(","))
            expected = hmac.new(SECRET, f"{at}.".encode() + content, hashlib.sha256).hexdigest()
            assert sent == expected
        sessions = {one["session_id"]: one for one in receiver.bodies() if "session_id" in one}
        assert sessions["a.0"]["trajectory"]["traces"]
        assert sessions["a.1"]["cause"] == "harness_crash"
        (task,) = [one for one in receiver.bodies() if "session_id" not in one]
        assert (task["status"], len(task["results"])) == ("completed", 2)


async def is_acked(service, task_id):
    return (await service.views.task(task_id))["acked_at"] is not None


async def test_a_receiver_that_fails_is_asked_again_under_the_same_id(tmp_path):
    async with (
        Receiver(500, 302, 404).up() as receiver,
        a_service(tmp_path) as service,
        delivering(service),
    ):
        await service.submit([submission("a", callback_url=receiver.url)], owner="o")
        await until(lambda: has(service, 2, "delivered"))
        ids = [headers["x-bridle-delivery"] for headers, _ in receiver.got]
        assert (len(ids), len(set(ids))) == (5, 2)
        rows = await callbacks(service)
        assert sum(row["tries"] for row in rows) == 5


async def test_what_was_not_delivered_is_delivered_by_the_next_server(tmp_path):
    async with Receiver().up() as receiver:
        async with a_service(tmp_path) as service:
            await service.submit([submission("a", callback_url=receiver.url)], owner="o")
            await ended(service, "a")
        assert receiver.got == []
        async with a_service(tmp_path) as service, delivering(service):
            await until(lambda: is_acked(service, "a"))
        assert len(receiver.got) == 2


async def test_a_name_that_means_the_inside_is_dead_at_once_and_can_be_replayed(tmp_path):
    async with (
        Receiver().up() as receiver,
        a_service(tmp_path) as service,
    ):
        url = receiver.url.replace("127.0.0.1", "localhost")
        async with delivering(service, listed=()):
            await service.submit([submission("a", callback_url=url)], owner="o")
            await until(lambda: has(service, 2, "dead"))
        rows = await callbacks(service)
        assert all("forbidden: 'localhost' is the address" in row["error"] for row in rows)
        assert receiver.got == []
        async with delivering(service, listed=("localhost",)):
            assert await service.replay(None) == 2
            await until(lambda: has(service, 2, "delivered"))


async def test_an_unreachable_receiver_is_given_up_after_its_time(tmp_path):
    async with a_service(tmp_path, callback_give_up_s=0.05) as service, delivering(service):
        task = submission("a", callback_url="http://127.0.0.1:1/x")
        await service.submit([task], owner="o")
        await until(lambda: has(service, 2, "dead"))
        rows = await callbacks(service)
        assert all("Cannot connect" in row["error"] for row in rows)
        assert (await service.views.task("a"))["acked_at"] is None


async def test_a_slow_receiver_holds_no_other_up(tmp_path):
    release = asyncio.Event()

    class Slow(Receiver):
        async def take(self, request):
            await release.wait()
            return await super().take(request)

    async with (
        Slow().up() as slow,
        Receiver().up() as quick,
        a_service(tmp_path) as service,
        delivering(service),
    ):
        await service.submit(
            [
                submission("a", callback_url=slow.url),
                submission("b", callback_url=quick.url),
            ],
            owner="o",
        )
        await until(lambda: len(quick.got) == 2)
        assert slow.got == []
        release.set()
        await until(lambda: len(slow.got) == 2)


def test_the_secret_is_kept_and_for_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.delenv(delivery.SECRET_ENV, raising=False)
    secret = callback_secret(tmp_path)
    assert callback_secret(tmp_path) == secret
    assert (tmp_path / "callback.secret").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(delivery.SECRET_ENV, "given")
    assert callback_secret(tmp_path) == b"given"
    monkeypatch.delenv(delivery.SECRET_ENV)
    with pytest.raises(ConfigError, match=r"callback\.secret"):
        callback_secret(tmp_path / "none")


def test_a_signature_covers_time_and_body():
    assert signature(b"k", b"{}", at=5) != signature(b"k", b"{}", at=6)
    assert signature(b"k", b"{}", at=5).startswith("t=5,v1=")
