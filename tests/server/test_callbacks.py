"""Callbacks against a real receiver on loopback."""

import asyncio
import hashlib
import hmac
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from tests.server.house import FakeWorkers, a_service, ended, failure, submission, until

from bridle.aio import Nursery
from bridle.errors import ConfigError
from bridle.server.callbacks import (
    AT_ONCE,
    DOUBTFUL,
    EACH,
    LEAST_TRIES,
    REMEMBERED,
    SECRET_ENV,
    SLOW_S,
    CallbackAddresses,
    CallbackSender,
    Receivers,
    callback_secret,
    signature,
)

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


class Slow(Receiver):
    """Answers nothing before `release`."""

    def __init__(self, release):
        super().__init__()
        self.release = release

    async def take(self, request):
        await self.release.wait()
        return await super().take(request)


class Clock:
    """Unix seconds that a test advances."""

    def __init__(self):
        self.now = time.time()

    def __call__(self):
        return self.now


@asynccontextmanager
async def delivering(service, listed=("127.0.0.0/8",), **more):
    """Tries follow one another at once."""
    async with Nursery(service.failed) as nursery:
        more = {"first_wait_s": 0.0, **more}
        deliverer = CallbackSender(service, CallbackAddresses(listed), SECRET, **more)
        nursery.start(deliverer.run(), name="deliverer")
        yield
    assert service.failure is None


async def callbacks(service, state=None):
    return await service.queries.callbacks(after=0, limit=99, state=state)


async def has(service, count, state):
    """Return whether so many callbacks are in this state."""
    rows = await callbacks(service)
    return sum(row["state"] == state for row in rows) == count


async def test_signed_callbacks_are_sent_for_each_session_and_for_the_task(tmp_path):
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
            assert signer(headers, content) == SECRET
        sessions = {one["session_id"]: one for one in receiver.bodies() if "session_id" in one}
        assert sessions["a.0"]["trajectory"]["traces"]
        assert sessions["a.1"]["cause"] == "harness_crash"
        (task,) = [one for one in receiver.bodies() if "session_id" not in one]
        assert (task["status"], len(task["results"])) == ("completed", 2)


async def test_callbacks_are_signed_with_the_owners_secret(tmp_path):
    async with (
        Receiver().up() as receiver,
        a_service(tmp_path, FakeWorkers()) as service,
        delivering(service, secrets={"a": b"the secret of a"}),
    ):
        for owner in ("a", "b"):
            await service.submit([submission(owner, callback_url=receiver.url)], owner=owner)
            await until(lambda owner=owner: is_acked(service, owner))
    signers = {
        json.loads(content)["task_id"]: signer(headers, content)
        for headers, content in receiver.got
    }
    assert signers == {"a": b"the secret of a", "b": SECRET}


def signer(headers, content):
    """Return which secret a callback is signed with."""
    at, sent = (part.partition("=")[2] for part in headers["x-bridle-signature"].split(","))
    for secret in (SECRET, b"the secret of a"):
        if sent == hmac.new(secret, f"{at}.".encode() + content, hashlib.sha256).hexdigest():
            return secret
    return None


async def is_acked(service, task_id):
    return (await service.queries.task(task_id))["acked_at"] is not None


async def test_failed_callback_is_retried_with_the_same_id(tmp_path):
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
        result = (await service.metrics.render(service)).decode()
        for became, count in (("taken", 2), ("failed", 3), ("dead", 0)):
            line = f'bridle_server_callback_tries_total{{became="{became}"}} {count}.0'
            assert line in result


async def test_undelivered_callbacks_are_sent_after_a_restart(tmp_path):
    async with Receiver().up() as receiver:
        async with a_service(tmp_path) as service:
            await service.submit([submission("a", callback_url=receiver.url)], owner="o")
            await ended(service, "a")
        assert receiver.got == []
        async with a_service(tmp_path) as service, delivering(service):
            await until(lambda: is_acked(service, "a"))
        assert len(receiver.got) == 2


async def test_callback_to_an_internal_address_is_dead_at_once_and_can_be_replayed(tmp_path):
    async with (
        Receiver().up() as receiver,
        a_service(tmp_path) as service,
    ):
        url = receiver.url.replace("127.0.0.1", "localhost")
        async with delivering(service, listed=()):
            await service.submit([submission("a", callback_url=url)], owner="o")
            await until(lambda: has(service, 2, "dead"))
        rows = await callbacks(service)
        assert all(
            "forbidden: callbacks to 'localhost' are not permitted: 127.0.0.1 is an internal"
            in row["error"]
            for row in rows
        )
        assert receiver.got == []
        async with delivering(service, listed=("localhost",)):
            assert await service.replay(None) == 2
            await until(lambda: has(service, 2, "delivered"))


async def test_callbacks_to_an_unreachable_receiver_are_dead_after_the_limit(tmp_path):
    async with a_service(tmp_path, callback_give_up_s=0.05) as service, delivering(service):
        task = submission("a", callback_url="http://127.0.0.1:1/x")
        await service.submit([task], owner="o")
        await until(lambda: has(service, 2, "dead"))
        rows = await callbacks(service)
        assert all("Cannot connect" in row["error"] for row in rows)
        assert (await service.queries.task("a"))["acked_at"] is None


async def test_slow_receiver_delays_no_other(tmp_path):
    release = asyncio.Event()
    async with (
        Slow(release).up() as slow,
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


async def next_tries(service, clock):
    """Let the time pass until the next try is due; how long that was."""
    due = await until(lambda: pause_of(service))
    waited, clock.now = due - clock.now, due
    service.callback_due.notify_all()
    return waited


async def pause_of(service):
    """When the next try is due, once all that are under way have been noted."""
    rows = await callbacks(service, "pending")
    if not rows or any(row["sent_by"] for row in rows):
        return None
    return min(row["next_at"] for row in rows)


async def test_receiver_that_answers_500_for_an_hour_gets_all_callbacks_afterwards(tmp_path):
    clock = Clock()
    began = clock.now

    class Broken(Receiver):
        async def take(self, request):
            self.answers = [500] if clock.now < began + 3600 else []
            return await super().take(request)

    async with (
        Broken().up() as receiver,
        a_service(tmp_path, callback_give_up_s=86_400) as service,
        delivering(service, first_wait_s=1.0, clock=clock),
    ):
        await service.submit([submission("a", callback_url=receiver.url)], owner="o")
        await ended(service, "a")
        clock.now = max(clock.now, time.time() + 1)
        service.callback_due.notify_all()
        await until(lambda: has_tried(service, 1))
        tries = {headers["x-bridle-delivery"]: [] for headers, _ in receiver.got}
        while clock.now < began + 3600:
            await next_tries(service, clock)
            await until(lambda: has_no_due(service, clock))
        await until(lambda: has(service, 2, "delivered"))
        for headers, _ in receiver.got:
            tries[headers["x-bridle-delivery"]].append(int(headers["x-bridle-try"]))
        for numbers in tries.values():
            # 1, 2, 4 ... 256 s, then every 5 minutes: an hour is twenty tries, one by one.
            assert numbers == list(range(1, len(numbers) + 1))
            assert 19 <= len(numbers) <= 22
        await until(lambda: is_acked(service, "a"))


async def has_tried(service, times):
    return all(row["tries"] >= times for row in await callbacks(service))


async def has_no_due(service, clock):
    return not await service.queries.due_callbacks(now=clock.now, limit=1) and all(
        not row["sent_by"] for row in await callbacks(service, "pending")
    )


async def test_backoff_doubles_up_to_five_minutes(tmp_path):
    clock = Clock()
    async with Receiver(*[500] * 11).up() as receiver, a_service(tmp_path) as service:
        await service.submit([submission("a", callback_url=receiver.url)], owner="o")
        await ended(service, "a")
        clock.now = time.time() + 1
        only = (await callbacks(service))[0]["delivery_id"]
        await service.store.record_attempt(
            only, tries=1, fault=None, dead=False, now=clock.now, next_at=clock.now
        )
        async with delivering(service, first_wait_s=1.0, clock=clock):
            pauses = []
            for count in range(1, 12):
                await until(lambda count=count: len(receiver.got) == count)
                pauses.append(round(await next_tries(service, clock)))
            await until(lambda: has(service, 2, "delivered"))
        assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


async def test_dead_callback_is_listed_and_delivered_after_a_replay(tmp_path):
    clock = Clock()
    async with (
        Receiver(*[500] * 10).up() as receiver,
        a_service(tmp_path, callback_give_up_s=60) as service,
        delivering(service, first_wait_s=1.0, clock=clock),
    ):
        await service.submit([submission("a", callback_url=receiver.url)], owner="o")
        await ended(service, "a")
        clock.now = time.time() + 3600  # a clock that jumps gives nothing up by itself
        service.callback_due.notify_all()
        await until(lambda: has_no_due(service, clock))
        while not await has(service, 2, "dead"):
            await next_tries(service, clock)
            await until(lambda: has_no_due(service, clock))
        assert len(receiver.got) == 2 * LEAST_TRIES
        dead = await callbacks(service, "dead")
        assert all(row["error"] == "500: said" for row in dead)
        assert await service.replay(None) == 2
        await until(lambda: has(service, 2, "delivered"))


async def test_clock_jump_backwards_delays_no_callback(tmp_path):
    clock = Clock()
    clock.now += 1e6
    async with (
        Receiver(500).up() as receiver,
        a_service(tmp_path) as service,
        delivering(service, first_wait_s=100.0, clock=clock),
    ):
        await service.submit([submission("a", callback_url=receiver.url)], owner="o")
        await until(lambda: has(service, 1, "delivered"))
        clock.now -= 1e6
        service.callback_due.notify_all()
        await until(lambda: has(service, 2, "delivered"))


async def has_delivered(service, count):
    return (await service.queries.counts()).callbacks == {"delivered": count}


async def test_slow_receivers_use_only_their_share_of_connections(tmp_path):
    release = asyncio.Event()
    async with (
        AsyncExitStack() as stack,
        Receiver().up() as quick,
        a_service(tmp_path, FakeWorkers(capacity=8)) as service,
        delivering(service),
    ):
        slow = [await stack.enter_async_context(Slow(release).up()) for _ in range(16)]
        tasks = [
            submission(f"s{number}-{one}", callback_url=receiver.url)
            for number, receiver in enumerate(slow)
            for one in range(2)
        ]
        await service.submit(tasks, owner="o")
        for task in tasks:
            await ended(service, task.task_id)
        await service.submit([submission("q", 5, callback_url=quick.url)], owner="o")
        await until(lambda: is_acked(service, "q"))
        assert all(receiver.got == [] for receiver in slow)
        release.set()
        await until(lambda: has_delivered(service, 16 * 2 * 2 + 6))


async def test_retry_does_not_wait_for_another_receiver(tmp_path):
    release = asyncio.Event()
    async with (
        Slow(release).up() as slow,
        Receiver(500, 500).up() as quick,
        a_service(tmp_path) as service,
        delivering(service, first_wait_s=0.05),
    ):
        urls = {"a": slow.url, "b": quick.url}
        tasks = [submission(name, callback_url=url) for name, url in urls.items()]
        await service.submit(tasks, owner="o")
        await until(lambda: is_acked(service, "b"))
        assert slow.got == []
        release.set()
        await until(lambda: is_acked(service, "a"))


async def test_two_servers_send_each_callback_once(tmp_path):
    async with (
        Receiver().up() as receiver,
        a_service(tmp_path, owner="one") as one,
        a_service(tmp_path, owner="other") as other,
        delivering(one),
        delivering(other),
    ):
        tasks = [submission(f"t{n}", 2, callback_url=receiver.url) for n in range(8)]
        await one.submit(tasks, owner="o")
        while not await has(one, 24, "delivered"):
            for service in (one, other):
                service.callback_due.notify_all()
            await asyncio.sleep(0.005)
        ids = [headers["x-bridle-delivery"] for headers, _ in receiver.got]
        assert len(ids) == len(set(ids)) == 24


async def test_callbacks_claimed_by_an_earlier_process_of_a_server_are_sent_at_once(tmp_path):
    async with Receiver().up() as receiver, a_service(tmp_path, owner="me") as service:
        await service.submit([submission("a", callback_url=receiver.url)], owner="o")
        await ended(service, "a")
        now = time.time()
        ids = [row["delivery_id"] for row in await callbacks(service)]
        taken = await service.store.claim_callbacks(ids, owner="me", now=now + 1, until=now + 900)
        assert taken == set(ids)
        async with delivering(service):
            await until(lambda: is_acked(service, "a"))


def test_callback_secret_is_kept_in_a_private_file_unless_the_environment_sets_it(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(SECRET_ENV, raising=False)
    secret = callback_secret(tmp_path)
    assert callback_secret(tmp_path) == secret
    assert (tmp_path / "callback.secret").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(SECRET_ENV, "given")
    assert callback_secret(tmp_path) == b"given"
    monkeypatch.delenv(SECRET_ENV)
    with pytest.raises(ConfigError, match=r"callback\.secret"):
        callback_secret(tmp_path / "callback.secret")


def test_a_callback_signature_covers_its_time():
    assert signature(b"k", b"{}", at=5) != signature(b"k", b"{}", at=6)
    assert signature(b"k", b"{}", at=5).startswith("t=5,v1=")


def fill(receivers, name):
    """Begin as many as the receiver may have; how many."""
    count = 0
    while receivers.room and receivers.has_room(name):
        receivers.begin(name)
        count += 1
    return count


def known(receivers, name, *, taken=True, seconds=0.0):
    receivers.begin(name)
    receivers.end(name, taken=taken, seconds=seconds)


def test_a_new_receiver_gets_one_callback_at_a_time_until_it_acknowledges_one():
    receivers = Receivers()
    assert fill(receivers, "a") == 1
    receivers.end("a", taken=True, seconds=0.1)
    assert fill(receivers, "a") == EACH
    assert receivers.full() == ["a"]
    assert receivers.room == AT_ONCE - EACH


def test_failing_or_slow_receiver_gets_one_callback_at_a_time():
    for failing in ({"taken": False}, {"seconds": SLOW_S + 1}):
        receivers = Receivers()
        known(receivers, "a")
        known(receivers, "a", **failing)
        assert fill(receivers, "a") == 1
        receivers.end("a", taken=True, seconds=0.0)
        assert fill(receivers, "a") == EACH


def test_sixteen_slow_receivers_leave_connections_to_healthy_ones():
    receivers = Receivers()
    slow = [f"slow{number}" for number in range(16)]
    for name in slow:
        known(receivers, name, taken=False)
    known(receivers, "well")
    assert sum(fill(receivers, name) for name in slow) == DOUBTFUL
    assert fill(receivers, "well") == EACH
    assert fill(receivers, "stranger") == 1
    strangers = Receivers()
    assert sum(fill(strangers, name) for name in slow) == 16  # nobody knows yet
    assert fill(strangers, "well") == 1


def test_callbacks_in_flight_are_limited_and_released():
    receivers = Receivers()
    names = [f"r{number}" for number in range(AT_ONCE + 5)]
    assert sum(fill(receivers, name) for name in names) == AT_ONCE
    assert receivers.room == 0
    receivers.end(names[0], taken=True, seconds=0.0)
    assert receivers.room == 1


def test_receivers_beyond_the_remembered_number_are_forgotten():
    receivers = Receivers()
    for number in range(REMEMBERED + 1):
        known(receivers, f"r{number}", taken=False)
    assert receivers.full() == []
    assert fill(receivers, "r0") == 1
