"""Callbacks: each result is sent until its receiver acknowledges it with 2xx.

A callback's row is written in the transaction that stores its result, so none is lost; all attempts
have the same delivery id. Attempts back off; after `callback_give_up_s` a callback is dead: it is
listed and can be replayed. Bodies are signed with the secret of the task's owner, or with the
server's for owners without one:

    x-bridle-signature: t=<unix seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">

A receiver compares it in constant time, refuses a `t` that is minutes old, and ignores an
`x-bridle-delivery` that it has seen.

A receiver (scheme, host and port) gets one callback at a time until it has acknowledged one, then
`EACH` at once. One that failed or was slow gets one at a time again, and all such receivers share
`DOUBTFUL` of the `AT_ONCE` connections, so that healthy receivers always get some.

`CallbackAddresses` are the addresses that a callback may go to. A name is resolved once, the result
is checked, and the connection goes to that address; redirects are not followed. So DNS rebinding
reaches nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path
from types import MappingProxyType
from typing import Final

import aiohttp
import structlog
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from sqlalchemy import RowMapping
from yarl import URL

from bridle import __version__
from bridle.aio import Nursery
from bridle.credentials import load_or_make_token
from bridle.errors import BridleError
from bridle.server.queries import session_result, task_status
from bridle.server.service import Service
from bridle.server.storage import until_done
from bridle.trajectory.result import encode

SECRET_ENV: Final = "BRIDLE_CALLBACK_SECRET"  # noqa: S105 - the variable's name

TRY_S: Final = 30.0
"""Time that a receiver may take to answer."""

TAKEN_S: Final = 10 * TRY_S
"""Time that no other server sends a callback that one has claimed; its body is read before it is
sent. The callbacks of a server that is known to be dead are released sooner."""

LEAST_TRIES: Final = 5
"""A callback with fewer attempts is not dead, even if a clock jump makes it look old."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
"""Backoff after the first failed attempt, and the longest backoff."""

log = structlog.get_logger(__name__)


class CallbackSender:
    """Sends callbacks while `run` runs."""

    def __init__(
        self,
        service: Service,
        addresses: CallbackAddresses,
        secret: bytes,
        *,
        secrets: Mapping[str, bytes] = MappingProxyType({}),
        first_wait_s: float = FIRST_WAIT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`secret` signs for owners that are not in `secrets`; `clock` returns Unix seconds."""
        self._service = service
        self._first_wait_s = first_wait_s
        self._addresses = addresses
        self._secret = secret
        self._secrets = secrets
        self._clock = clock
        self._receivers = Receivers()

    async def run(self) -> None:
        """Send due callbacks, also those that an earlier process was sending, until cancelled."""
        connector = aiohttp.TCPConnector(
            resolver=CheckedResolver(self._addresses), use_dns_cache=False, limit=AT_ONCE
        )
        timeout = aiohttp.ClientTimeout(total=TRY_S)
        service = self._service
        await until_done(
            lambda: service.store.release_callbacks([service.owner], now=self._clock()),
            "releasing callbacks that this server was sending",
        )
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            Nursery(_log_failure) as nursery,
        ):
            while True:
                ticket = service.callback_due.ticket()
                wait_s = await until_done(
                    lambda: self._start_due(http, nursery), "looking for callbacks"
                )
                await service.callback_due.wait(ticket, wait_s)

    async def _start_due(self, http: aiohttp.ClientSession, nursery: Nursery) -> float | None:
        """Start due callbacks; return the seconds until the next is due, `None` = not known."""
        service, receivers = self._service, self._receivers
        while room := receivers.room:
            now, full = self._clock(), receivers.full()
            rows = await service.queries.due_callbacks(now=now, limit=room, without=full)
            if not rows:
                due = await service.queries.next_callback(without=full)
                return None if due is None else max(0.05, due - self._clock())
            chosen = []
            for row in rows:
                if receivers.has_room(row["receiver"]):
                    receivers.begin(row["receiver"])
                    chosen.append(row)
            for row in await self._claimed(chosen):
                nursery.start(self._deliver(http, row), name=f"callback {row['delivery_id']}")
        return None  # the end of one wakes `run`

    async def _claimed(self, chosen: list[RowMapping]) -> list[RowMapping]:
        """Claim the callbacks `chosen`; return those that no other server sends."""
        now = self._clock()
        taken: set[str] = set()
        try:
            taken = await self._service.store.claim_callbacks(
                [row["delivery_id"] for row in chosen],
                owner=self._service.owner,
                now=now,
                until=now + TAKEN_S,
            )
        finally:
            for row in chosen:
                if row["delivery_id"] not in taken:
                    self._receivers.cancel(row["receiver"])
        return [row for row in chosen if row["delivery_id"] in taken]

    async def _deliver(self, http: aiohttp.ClientSession, row: RowMapping) -> None:
        began = time.monotonic()
        fault: str | None = "interrupted"
        try:
            fault = await self._try(http, row)
            await until_done(lambda: self._note(row, fault), "storing the outcome of a callback")
        finally:
            seconds = time.monotonic() - began
            self._receivers.end(row["receiver"], taken=fault is None, seconds=seconds)
            self._service.callback_due.notify_all()

    async def _try(self, http: aiohttp.ClientSession, row: RowMapping) -> str | None:
        """Send it once; return `None` if it was acknowledged, else the reason."""
        try:
            self._addresses.check_url(row["url"])
            body = await self._body(row)
            headers = self.headers(row, body)
            async with http.post(
                row["url"], data=body, headers=headers, allow_redirects=False
            ) as answer:
                text = (await answer.content.read(200)).decode(errors="replace")
                return None if answer.ok and answer.status < 300 else f"{answer.status}: {text}"
        except ForbiddenAddressError as error:
            return f"forbidden: {error}"
        except (aiohttp.ClientError, TimeoutError, OSError, BridleError, ValueError) as error:
            cause = error.__cause__
            if isinstance(cause, ForbiddenAddressError):
                return f"forbidden: {cause}"
            return f"{type(error).__name__}: {error}"

    def headers(self, row: RowMapping, body: bytes) -> dict[str, str]:
        """Return the HTTP headers of an attempt to send a callback, with the signature of
        its body.
        """
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
        """Return a session's `SessionResult`, or the task's `TaskResult` with all of them."""
        service = self._service
        views = service.queries.of(row["owner"])
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
        """Store the outcome of an attempt."""
        now = self._clock()
        tries = row["tries"] + 1
        wait_s = min(LONGEST_WAIT_S, self._first_wait_s * 2 ** min(row["tries"], 20))
        age_s = now - row["made_at"]
        too_old = age_s > self._service.settings.callback_give_up_s and tries >= LEAST_TRIES
        dead = fault is not None and (too_old or fault.startswith("forbidden: "))
        await self._service.store.record_attempt(
            row["delivery_id"], tries=tries, fault=fault, dead=dead, now=now, next_at=now + wait_s
        )
        self._service.metrics.callback_tried(taken=fault is None, dead=dead)
        if fault is None and row["session_id"] is None:
            # The receiver has the whole group, so it needs no further acknowledgement.
            await self._service.ack(cursor=None, task_ids=[row["task_id"]])
        if dead:
            log.warning("a callback is dead", delivery=row["delivery_id"], error=fault)


def signature(secret: bytes, body: bytes, *, at: int) -> str:
    """Return the header `x-bridle-signature` for a callback's body that is sent at Unix
    time `at`.
    """
    digest = hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def callback_secret(folder: Path) -> bytes:
    """Return the secret that signs callbacks: from the environment, or kept in `folder` (mode
    0600).

    Raises `ConfigError` if its file cannot be read or written.
    """
    if given := os.environ.get(SECRET_ENV):
        return given.encode()
    return load_or_make_token(folder / "callback.secret").encode()


def _log_failure(error: BaseException) -> None:
    log.error("a callback is not sent until the next start", error=repr(error))


AT_ONCE: Final = 32
"""Callbacks in flight."""

EACH: Final = 4
"""Callbacks in flight to one healthy receiver."""

DOUBTFUL: Final = 8
"""Callbacks in flight to all receivers that failed or were slow at their last attempt."""

SLOW_S: Final = 5.0
"""A receiver that takes longer to answer is slow."""

REMEMBERED: Final = 1000
"""Receivers whose health is remembered; beyond, only those with callbacks in flight are."""


class ReceiverHealth(Enum):
    """Health of a receiver, by its last reply."""

    UNKNOWN = auto()
    HEALTHY = auto()
    DOUBTFUL = auto()


@dataclass(slots=True)
class _Receiver:
    health: ReceiverHealth = ReceiverHealth.UNKNOWN
    in_flight: int = 0


class Receivers:
    """Callbacks in flight and health, by receiver."""

    def __init__(self) -> None:
        self._known: dict[str, _Receiver] = {}

    @property
    def room(self) -> int:
        """Number of callbacks that may be sent at the same time, besides those in flight."""
        return AT_ONCE - sum(one.in_flight for one in self._known.values())

    def full(self) -> list[str]:
        """Return the receivers that may get no further callback until one in flight to them
        ends.
        """
        return [name for name in self._known if not self.has_room(name)]

    def has_room(self, name: str) -> bool:
        """Return whether one more callback may be sent to this receiver, by its limit and that of
        all doubtful ones.

        A receiver without an acknowledged callback, or that failed last, gets one at a time.
        """
        known = self._known.get(name, _Receiver())
        if known.health is ReceiverHealth.DOUBTFUL:
            return not known.in_flight and self._doubtful() < DOUBTFUL
        return known.in_flight < (EACH if known.health is ReceiverHealth.HEALTHY else 1)

    def begin(self, name: str) -> None:
        """Count one more callback in flight to this receiver."""
        self._known.setdefault(name, _Receiver()).in_flight += 1

    def cancel(self, name: str) -> None:
        """Count one callback in flight less to this receiver: it was not sent."""
        self._known[name].in_flight -= 1

    def end(self, name: str, *, taken: bool, seconds: float) -> None:
        """Record that a callback to this receiver ended after `seconds`, acknowledged (`taken`) or
        not.

        A failed or slow one makes the receiver doubtful, which limits its further callbacks.
        """
        known = self._known[name]
        known.in_flight -= 1
        known.health = (
            ReceiverHealth.HEALTHY if taken and seconds <= SLOW_S else ReceiverHealth.DOUBTFUL
        )
        if len(self._known) > REMEMBERED:
            self._known = {name: one for name, one in self._known.items() if one.in_flight}

    def _doubtful(self) -> int:
        known = self._known.values()
        return sum(one.in_flight for one in known if one.health is ReceiverHealth.DOUBTFUL)


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

WRAPPERS: Final = tuple(
    ip_network(one) for one in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")
)
"""IPv6 networks whose addresses embed an IPv4 address at their end: the compatible form, SIIT (RFC
7915) and NAT64 (RFC 6052, RFC 8215)."""

ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})
"""Third quarter of an IPv6 address that ends in an IPv4 one (RFC 5214)."""

METADATA: Final = tuple(
    ip_network(one)
    for one in (
        "169.254.0.0/16",  # AWS, Google, Azure, Oracle, DigitalOcean, and AWS's ECS and EKS
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's host
        "192.0.0.192",  # Oracle
        "fd00:ec2::/32",  # AWS
        "fd20:ce::254",  # Google
        "fe80::a9fe:a9fe",  # OpenStack
    )
)
"""Metadata services of clouds, which serve credentials. No operator's list permits them."""


class ForbiddenAddressError(BridleError):
    """The operator does not permit the address of a callback."""


class CallbackAddresses:
    """Addresses that `SubmissionPolicy.callbacks` permits."""

    def __init__(self, listed: Sequence[str]) -> None:
        self._networks: list[Network] = []
        self._names: list[str] = []
        for one in listed:
            network = _network(one)
            if network is None:
                self._names.append(one.lower().rstrip("."))
            else:
                self._networks.append(network)

    def check_url(self, url: str) -> None:
        """Check the host of a callback's URL before its name is resolved.

        Raises `ForbiddenAddressError`. The HTTP client's own parser reads the URL, because it turns
        full-width and circled digits into an address that is never resolved.
        """
        try:
            parts = URL(url)
            is_plain = parts.port != 0 and parts.user is None
        except ValueError as error:
            raise ForbiddenAddressError(f"callback URL {url!r} cannot be read: {error}") from None
        host = (parts.raw_host or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host or not is_plain:
            raise ForbiddenAddressError(
                f"callback URL {url!r} must be http:// or https://, without a user name and with "
                "a valid port"
            )
        address = _address(host)
        if address is not None:
            self.check(host, address)
        elif self._names and not self._networks and not self._is_listed(host):
            raise ForbiddenAddressError(f"callbacks to {host!r} are not permitted by this server")

    def check(self, host: str, address: Address) -> None:
        """Raise `ForbiddenAddressError` if callbacks may not go to `host`, found at `address`."""
        real = _real(address)
        if any(_within(real, network) for network in METADATA):
            raise ForbiddenAddressError(
                f"callbacks to {host!r} are not permitted: {address} is a cloud metadata service"
                " with credentials"
            )
        if self._is_listed(host) or any(_within(real, network) for network in self._networks):
            return
        local = real.is_multicast or (isinstance(real, IPv6Address) and real.is_site_local)
        if local or not real.is_global:
            raise ForbiddenAddressError(
                f"callbacks to {host!r} are not permitted: {address} is an internal address"
            )
        if self._names or self._networks:
            raise ForbiddenAddressError(
                f"callbacks to {host!r} ({address}) are not permitted by this server"
            )

    def _is_listed(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return any(
            host == name or (name.startswith("*.") and host.endswith(name[1:]))
            for name in self._names
        )


class CheckedResolver(AbstractResolver):
    """Resolves names to permitted addresses only."""

    def __init__(
        self, addresses: CallbackAddresses, resolver: AbstractResolver | None = None
    ) -> None:
        self._addresses = addresses
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a host name to those of its addresses that callbacks may go to.

        Raises `ForbiddenAddressError` if it has no such address.
        """
        permitted: list[ResolveResult] = []
        refused: ForbiddenAddressError | None = None
        for found in await self._resolver.resolve(host, port, family):
            try:
                self._addresses.check(host, ip_address(found["host"].partition("%")[0]))
            except ForbiddenAddressError as error:
                refused = error
            else:
                permitted.append(found)
        if refused is not None and not permitted:
            raise refused
        return permitted

    async def close(self) -> None:
        await self._resolver.close()


def _real(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds, or the address itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        is_own = address.is_loopback or address.is_unspecified
        wraps = not is_own and any(address in network for network in WRAPPERS)
        if wraps or int(address) >> 32 & 0xFFFFFFFF in ISATAP:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _address(host: str) -> Address | None:
    """Return the address of a numeric host, in every form that the system's resolver accepts."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:  # 127.1, 0x7f000001, 2130706433
        return ip_address(socket.inet_aton(host))
    except OSError:
        return None


def _network(given: str) -> Network | None:
    try:
        return ip_network(given, strict=False)
    except ValueError:
        return None
