"""Callbacks: every result is sent until its receiver acknowledges it with 2xx.

A callback is a row that was written with the result it tells, so none is forgotten; its id is the
same in every try. Tries wait longer and longer; one that nobody takes for `callback_give_up_s` is
dead, is listed, and can be replayed. The body is signed:

    x-bridle-signature: t=<unix seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">

The secret is that of the task's owner, or the server's for owners that have none of their own. A
receiver compares it in constant time, refuses a `t` that is minutes old, and drops an
`x-bridle-delivery` that it has seen.

A receiver (scheme, host and port) is tried one callback at a time until it has taken one, then
`EACH` at once. One that failed or was slow gets one at a time again, and all such share
`DOUBTFUL` of the `AT_ONCE` places, so those who answer always find room.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Final

import aiohttp
import structlog
from sqlalchemy import RowMapping

from bridle import __version__
from bridle.aio import Nursery
from bridle.credentials import kept_token
from bridle.errors import BridleError
from bridle.server.addresses import Addresses, ForbiddenAddressError, JudgingResolver
from bridle.server.database import until_done
from bridle.server.results import session_result, task_status
from bridle.server.service import Service
from bridle.trajectory.result import encode

SECRET_ENV: Final = "BRIDLE_CALLBACK_SECRET"  # noqa: S105 - the variable's name

TRY_S: Final = 30.0
"""How long a receiver may take to answer."""

TAKEN_S: Final = 10 * TRY_S
"""How long no other server tries a callback that one is trying; its body is read before it is sent.
A server that is known to have died leaves its callbacks sooner."""

LEAST_TRIES: Final = 5
"""No callback is given up with fewer, however old a clock that jumped makes it."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
"""Wait after the first failed try, and the most after a later one."""

log = structlog.get_logger(__name__)


class Deliverer:
    """Sends callbacks. `run` is its whole life."""

    def __init__(
        self,
        service: Service,
        addresses: Addresses,
        secret: bytes,
        *,
        secrets: Mapping[str, bytes] = MappingProxyType({}),
        first_wait_s: float = FIRST_WAIT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`secret` signs for the owners that are not in `secrets`; `clock` tells Unix seconds."""
        self._service = service
        self._first_wait_s = first_wait_s
        self._addresses = addresses
        self._secret = secret
        self._secrets = secrets
        self._clock = clock
        self._receivers = Receivers()

    async def run(self) -> None:
        """Send what is due until cancelled; what an earlier life of this server was sending is."""
        connector = aiohttp.TCPConnector(
            resolver=JudgingResolver(self._addresses), use_dns_cache=False, limit=AT_ONCE
        )
        timeout = aiohttp.ClientTimeout(total=TRY_S)
        service = self._service
        await until_done(
            lambda: service.state.leave_callbacks([service.owner], now=self._clock()),
            "looking for callbacks that were being sent",
        )
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            Nursery(_log_lost) as nursery,
        ):
            while True:
                ticket = service.ended.ticket()
                wait_s = await until_done(
                    lambda: self._start_due(http, nursery), "looking for callbacks"
                )
                await service.ended.after(ticket, wait_s)

    async def _start_due(self, http: aiohttp.ClientSession, nursery: Nursery) -> float | None:
        """Start what is due and fits; how long until there is more to do, `None` = not known."""
        service, receivers = self._service, self._receivers
        while room := receivers.room:
            now, full = self._clock(), receivers.full()
            rows = await service.views.due_callbacks(now=now, limit=room, without=full)
            if not rows:
                due = await service.views.next_callback(without=full)
                return None if due is None else max(0.05, due - self._clock())
            chosen = []
            for row in rows:
                if receivers.has_room(row["receiver"]):
                    receivers.begin(row["receiver"])
                    chosen.append(row)
            for row in await self._taken(chosen):
                nursery.start(self._one(http, row), name=f"callback {row['delivery_id']}")
        return None  # the end of one looks again

    async def _taken(self, chosen: list[RowMapping]) -> list[RowMapping]:
        """Those of `chosen` that no other server sends; the others' places are free again."""
        now = self._clock()
        taken: set[str] = set()
        try:
            taken = await self._service.state.take_callbacks(
                [row["delivery_id"] for row in chosen],
                owner=self._service.owner,
                now=now,
                until=now + TAKEN_S,
            )
        finally:
            for row in chosen:
                if row["delivery_id"] not in taken:
                    self._receivers.leave(row["receiver"])
        return [row for row in chosen if row["delivery_id"] in taken]

    async def _one(self, http: aiohttp.ClientSession, row: RowMapping) -> None:
        began = time.monotonic()
        fault: str | None = "broken off"
        try:
            fault = await self._try(http, row)
            await until_done(lambda: self._note(row, fault), "noting a callback")
        finally:
            seconds = time.monotonic() - began
            self._receivers.end(row["receiver"], taken=fault is None, seconds=seconds)
            self._service.ended.beat()

    async def _try(self, http: aiohttp.ClientSession, row: RowMapping) -> str | None:
        """Send it once; `None` = acknowledged, else why not."""
        try:
            self._addresses.check_url(row["url"])
            body = await self._body(row)
            headers = self.headers(row, body)
            async with http.post(
                row["url"], data=body, headers=headers, allow_redirects=False
            ) as answer:
                said = (await answer.content.read(200)).decode(errors="replace")
                return None if answer.ok and answer.status < 300 else f"{answer.status}: {said}"
        except ForbiddenAddressError as error:
            return f"forbidden: {error}"
        except (aiohttp.ClientError, TimeoutError, OSError, BridleError, ValueError) as error:
            cause = error.__cause__
            if isinstance(cause, ForbiddenAddressError):
                return f"forbidden: {cause}"
            return f"{type(error).__name__}: {error}"

    def headers(self, row: RowMapping, body: bytes) -> dict[str, str]:
        secret = self._secrets.get(row["owner"], self._secret)
        return {
            "content-type": "application/json",
            "user-agent": f"bridle/{__version__}",
            "x-bridle-delivery": row["delivery_id"],
            "x-bridle-event": "task" if row["session_id"] is None else "session",
            "x-bridle-try": str(row["tries"] + 1),
            "x-bridle-signature": signature(secret, body, at=int(self._clock())),
        }

    async def _body(self, row: RowMapping) -> bytes:
        """A session's `SessionResult`, or the task's `TaskResult` with all of them."""
        service = self._service
        views = service.views.of(row["owner"])
        if row["session_id"] is not None:
            session = await views.session(row["session_id"])
            assert session is not None
            return await asyncio.to_thread(
                encode, await session_result(service, session, polar=True)
            )
        task = await views.task(row["name"])
        assert task is not None
        return await asyncio.to_thread(encode, await task_status(service, task, results=True))

    async def _note(self, row: RowMapping, fault: str | None) -> None:
        """Write down what came of a try."""
        now = self._clock()
        tries = row["tries"] + 1
        wait_s = min(LONGEST_WAIT_S, self._first_wait_s * 2 ** min(row["tries"], 20))
        age_s = now - row["made_at"]
        too_old = age_s > self._service.settings.callback_give_up_s and tries >= LEAST_TRIES
        dead = fault is not None and (too_old or fault.startswith("forbidden: "))
        await self._service.state.note_callback(
            row["delivery_id"], tries=tries, fault=fault, dead=dead, now=now, next_at=now + wait_s
        )
        self._service.metrics.callback_tried(taken=fault is None, dead=dead)
        if fault is None and row["session_id"] is None:
            # Whoever took the whole group has it: it needs no ack of the cursor's.
            await self._service.ack(cursor=None, task_ids=[row["task_id"]])
        if dead:
            log.warning("a callback is given up", delivery=row["delivery_id"], error=fault)


def signature(secret: bytes, body: bytes, *, at: int) -> str:
    """The value of `x-bridle-signature` for a body that is sent at Unix time `at`."""
    digest = hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def callback_secret(folder: Path) -> bytes:
    """The secret that bodies are signed with: from the environment, or kept in `folder` (0600).

    `ConfigError` if its file cannot be read or written.
    """
    if given := os.environ.get(SECRET_ENV):
        return given.encode()
    return kept_token(folder / "callback.secret").encode()


def _log_lost(error: BaseException) -> None:
    log.error("a callback was lost until the next start", error=repr(error))


AT_ONCE: Final = 32
"""Callbacks under way at once."""

EACH: Final = 4
"""To one receiver that does well."""

DOUBTFUL: Final = 8
"""To all receivers together that failed or were slow at their last try."""

SLOW_S: Final = 5.0
"""A receiver that takes longer to answer is slow."""

KNOWN: Final = 1000
"""Receivers that are remembered; beyond, those with nothing under way are strangers again."""


class Standing(Enum):
    """State of a receiver, by its last answers."""

    STRANGER = auto()
    WELL = auto()
    DOUBTFUL = auto()


@dataclass(slots=True)
class _Receiver:
    standing: Standing = Standing.STRANGER
    under_way: int = 0


class Receivers:
    """Counts what is under way."""

    def __init__(self) -> None:
        self._known: dict[str, _Receiver] = {}

    @property
    def room(self) -> int:
        """Return how many more deliveries may be in flight."""
        return AT_ONCE - sum(one.under_way for one in self._known.values())

    def full(self) -> list[str]:
        """The receivers that are to get no further one now."""
        return [name for name in self._known if not self.has_room(name)]

    def has_room(self, name: str) -> bool:
        """Return whether this receiver may get one more delivery, if any receiver may."""
        known = self._known.get(name, _Receiver())
        if known.standing is Standing.DOUBTFUL:
            return not known.under_way and self._doubtful() < DOUBTFUL
        return known.under_way < (EACH if known.standing is Standing.WELL else 1)

    def begin(self, name: str) -> None:
        self._known.setdefault(name, _Receiver()).under_way += 1

    def leave(self, name: str) -> None:
        """It was not begun after all."""
        self._known[name].under_way -= 1

    def end(self, name: str, *, taken: bool, seconds: float) -> None:
        """It was answered, or not, after so long."""
        known = self._known[name]
        known.under_way -= 1
        known.standing = Standing.WELL if taken and seconds <= SLOW_S else Standing.DOUBTFUL
        if len(self._known) > KNOWN:
            self._known = {name: one for name, one in self._known.items() if one.under_way}

    def _doubtful(self) -> int:
        known = self._known.values()
        return sum(one.under_way for one in known if one.standing is Standing.DOUBTFUL)
