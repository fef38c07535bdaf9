"""Several servers on one database: each one's runs are its own until it is not heard of any more.

A server renews its leases three times per `lease_s`. Whether another one lives is judged by its
leases changing, timed by our own monotonic clock, so no clock of anyone's can make a living server
look dead. What a dead one was running is taken over, and the callbacks that it was sending are due.

What the others did (tasks that came, ended or were cancelled, a pause) is looked for every `LOOK_S`
seconds; a server alone finds nothing then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from bridle.server.database import until_done

if TYPE_CHECKING:
    from bridle.server.service import Service

LOOK_S: Final = 2.0

log = structlog.get_logger(__name__)


class Heard(NamedTuple):
    """The last sign of life of another server."""

    until: float
    """Its latest lease."""
    at: float
    """When we saw that for the first time."""


class Neighbours:
    """Watches the other servers for `service`. `run` and `keep_leases` are its whole life."""

    def __init__(self, service: Service, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._heard: dict[str, Heard] = {}

    async def keep_leases(self) -> None:
        """Renew our own leases until cancelled."""
        service = self._service
        lease_s = service.settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 3)
            await until_done(
                lambda: service.state.renew(owner=service.owner, until=time.time() + lease_s),
                "renewing leases",
            )

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._service.settings.lease_s / 4))
            await until_done(self.look, "looking for other servers")

    async def look(self) -> None:
        """See what the others did, and take over what a dead one was running."""
        service = self._service
        if dead := self._dead(await service.views.leases()):
            log.warning("took over from servers that are not heard of", servers=dead)
            await self.take_over(dead)
        running = service.dispatcher.running  # first: one that starts meanwhile is not gone
        held = await service.views.held_by(service.owner)
        gone = tuple(one.run_id for one in running if not held.get(one.run_id, False))
        service.dispatcher.cancel_runs(gone)
        service.dispatcher.paused = bool(await service.state.number("paused"))
        for pulse in (service.dispatcher.wake, service.ended, service.groups):
            pulse.beat()

    def _dead(self, leases: dict[str, float]) -> list[str]:
        now, lease_s = self._clock(), self._service.settings.lease_s
        others = {name: until for name, until in leases.items() if name != self._service.owner}
        self._heard = {
            name: heard
            if (heard := self._heard.get(name)) is not None and heard.until == until
            else Heard(until, now)
            for name, until in others.items()
        }
        return [name for name, heard in self._heard.items() if now - heard.at > lease_s]

    async def take_over(self, dead: Sequence[str]) -> None:
        """Store what had ended of what the servers `dead` were running, and run the rest again.

        Our own earlier life may be one of them.
        """
        service = self._service
        claims = await service.state.take_over(
            dead, owner=service.owner, now=time.time(), lease_s=service.settings.lease_s
        )
        await service.state.leave_callbacks(dead, now=time.time())
        living = [claim for claim in claims if service.workers.expect(claim.run_id)]
        service.dispatcher.adopt(living)
        for claim in claims:
            if claim in living:
                continue
            result = await service.workers.recall(claim.run_id)
            if result is not None:
                service.closed(await service.dispatcher.keep(claim, result))
                service.workers.release(claim.run_id)
                continue
            closed = await service.state.put_back(
                claim.session_id,
                claim.attempt,
                owner=service.owner,
                why="interrupted",
                now=time.time(),
            )
            service.closed(closed)
        if claims:
            service.dispatcher.wake.beat()
            log.info("took over what a server was running", sessions=len(claims))
