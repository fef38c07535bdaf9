"""The choice of a replica for a call, and the tracking of calls and replicas that cause failures.

A session's calls go to one replica, for its prefix cache, unless that has too many calls.

When an engine dies, each of its calls may be the cause. A call that saw `SUSPECTED` deaths runs
apart, in a group that gets smaller with each death until the call is alone; a death counts against
that group only. Of n suspects that takes about `3 * n ** (1 / 3)` rounds with 5 attempts; a call
fails only if it ran alone at the last death. A session whose call used up its attempts in this way
is an offender: its next calls run alone and get one attempt.

A session whose calls fail `STRIKES` times while others are served is quarantined: its calls fail at
once with the same cause, except one every `QUARANTINE_S`. A replica that fails `BREAKS` calls of
several sessions in a row gets no calls until its health is good, while another one serves.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

import structlog

from bridle.engines.pool_replica import Replica, ReplicaState, RoutedCall
from bridle.errors import EngineError

log = structlog.get_logger()


class HasLoad(Protocol):
    """Replica with a load, compared by identity."""

    @property
    def load(self) -> int:
        """Number of calls that the replica runs."""


ReplicaT = TypeVar("ReplicaT", bound=HasLoad)


class RoutingReason(StrEnum):
    """Reason of a routing decision."""

    FIRST = "first"
    """The session's first call, or a call of no session."""
    STUCK = "stuck"
    """The session's own replica."""
    SPILLED = "spilled"
    """Another replica, because the session's own was at its bound."""
    MOVED = "moved"
    """Another replica, because the session's own was not available."""


class ReplicaRouter(Generic[ReplicaT]):
    """Chooses a replica for each call, and remembers the replica of each session."""

    def __init__(
        self,
        *,
        sticky: bool = True,
        load_factor: float = 1.25,
        slack: int = 8,
        remembered: int = 100_000,
    ) -> None:
        """`remembered` is how many sessions are kept; the one that called longest ago is dropped
        first.

        Without `sticky` every call goes to the replica with the fewest calls.
        """
        self._sticky = sticky
        self._load_factor = load_factor
        self._slack = slack
        self._remembered = remembered
        self._homes: OrderedDict[str, ReplicaT] = OrderedDict()
        self._living: dict[ReplicaT, int] = {}
        self._turn = 0

    def bound(self, replicas: Sequence[ReplicaT]) -> int:
        """Return the most calls that one replica may run while `replicas` get one more call."""
        calls = 1 + sum([replica.load for replica in replicas])
        return max(self._slack, math.ceil(self._load_factor * calls / len(replicas)))

    def pick(
        self, session_id: str | None, replicas: Sequence[ReplicaT]
    ) -> tuple[ReplicaT, RoutingReason]:
        """Choose one of the available `replicas` (at least one) for a call, and say by which rule.

        Calls of one session go to the same replica where possible.
        """
        home = self._homes.get(session_id) if session_id is not None else None
        if home is None:
            how = RoutingReason.FIRST
        elif home not in replicas:
            how = RoutingReason.MOVED
        elif (load := home.load) < self._slack or load < self.bound(replicas):
            assert session_id is not None
            self._homes.move_to_end(session_id)
            return home, RoutingReason.STUCK
        else:
            how = RoutingReason.SPILLED
        replica = self._least(replicas)
        if session_id is not None and self._sticky:
            self._settle(session_id, replica)
        return replica, how

    def sessions(self, replica: ReplicaT) -> int:
        """Return how many living sessions are assigned to a replica."""
        return self._living.get(replica, 0)

    def forget(self, session_id: str) -> None:
        """Drop the assignment of a session that has ended; unknown ones are ignored."""
        replica = self._homes.pop(session_id, None)
        if replica is not None:
            self._living[replica] -= 1

    def drop(self, replica: ReplicaT) -> None:
        """Drop a removed replica and the assignments of its sessions."""
        self._homes = OrderedDict(
            (session_id, home) for session_id, home in self._homes.items() if home is not replica
        )
        self._living.pop(replica, None)

    def _least(self, replicas: Sequence[ReplicaT]) -> ReplicaT:
        """Return the one with the fewest calls, then the fewest sessions; equal ones take turns."""
        self._turn += 1
        turned = [*replicas[self._turn % len(replicas) :], *replicas[: self._turn % len(replicas)]]
        return min(turned, key=lambda replica: (replica.load, self.sessions(replica)))

    def _settle(self, session_id: str, replica: ReplicaT) -> None:
        self.forget(session_id)
        self._homes[session_id] = replica
        self._living[replica] = self.sessions(replica) + 1
        if len(self._homes) > self._remembered:
            self.forget(next(iter(self._homes)))


SUSPECTED: Final = 2
"""Deaths of engines around a call after which it runs apart."""

STRIKES: Final = 6
"""Failures in a row, others being served between, before a session is quarantined."""

QUARANTINE_S: Final = 10.0
"""Interval in which a quarantined session may try one call."""

BREAKS: Final = 5
"""Failures in a row, of two sessions at least, before a replica is quarantined."""


@dataclass(slots=True)
class _Record:
    """Failures in a row of one session."""

    served: int
    """Replies served to all sessions when the last failure was counted."""
    strikes: int = 0
    until: float = 0.0
    """Time (of `time.monotonic`) of its next trial, once it is quarantined."""
    kind: str = ""


class FailureTracker:
    """Counts failures against calls, sessions and replicas. `attempts` is how many fail a call."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._held: dict[RoutedCall, Replica | None] = {}
        """Suspects that may run, and the replica that runs each or ran it last."""
        self._waiting: dict[RoutedCall, None] = {}
        self._most = 0
        """The most suspects at once since there were none."""
        self.offenders: set[str | None] = set()
        """Sessions of calls that used up their attempts as suspects."""
        self.records: dict[str | None, _Record] = {}
        """Sessions with failures in a row."""
        self._served = 0

    def begin(self, call: RoutedCall) -> None:
        """Mark a call as a suspect if earlier calls of its session failed with their replica.

        Raises `EngineError`, with the kind of the last failure, if its session is quarantined.
        """
        session_id = call.request.session_id
        if session_id in self.offenders:
            call.deaths = max(SUSPECTED, self._attempts - 1)
        record = self.records.get(session_id or "")
        if record is None or record.strikes < STRIKES:
            return
        now = time.monotonic()
        if now < record.until:
            raise EngineError(
                f"the last {STRIKES} tries of this session failed while other sessions were "
                f"served; until it works again, one call is tried every {QUARANTINE_S:g} s",
                kind=record.kind,
            )
        record.until = now + QUARANTINE_S

    # ---- calls that kill

    async def apart(self, call: RoutedCall) -> None:
        """Wait until a suspect call may run beside the suspects that already do, unless it is
        aborted.

        `end` frees its place.
        """
        while call.deaths >= SUSPECTED and call not in self._held and not call.aborted:
            self._waiting[call] = None
            self._most = max(self._most, len(self._held) + len(self._waiting))
            places = min(map(self._places, (*self._held, call)))
            if next(iter(self._waiting)) is call and len(self._held) < places:
                del self._waiting[call]
                self._held[call] = None
                self._wake()
                return
            await call.changed.wait()
            call.changed.clear()

    def _places(self, call: RoutedCall) -> int:
        """Return how many suspects may run beside this call; 1 at its last attempt."""
        left = self._attempts - 1 - call.deaths
        if left <= 0:
            return 1
        return math.ceil(math.pow(self._most, left / (self._attempts - SUSPECTED)))

    def _wake(self) -> None:
        for one in self._waiting:
            one.changed.set()

    def tries(self, one: Replica, call: RoutedCall) -> None:
        """Record that a replica is about to run a call."""
        if call in self._held:
            self._survived(call)
            one.suspects.add(call)
            self._held[call] = one

    def died(self, one: Replica, call: RoutedCall) -> bool:
        """Count the death of a replica against a call that it ran; return whether the call's
        attempts are used up.

        If suspect calls ran there, the death counts against them only.
        """
        if one.suspects and call not in one.suspects:
            return False
        call.deaths += 1
        if self._held.pop(call, None) is not None:
            self._wake()
        if call.deaths < self._attempts:
            return False
        if call.request.session_id is not None:
            self.offenders.add(call.request.session_id)
        return True

    def end(self, call: RoutedCall) -> None:
        """Let the next suspect calls run, if the ended call was a suspect."""
        self._waiting.pop(call, None)
        if call in self._held:
            self._survived(call)
            del self._held[call]
        if self._waiting:
            self._wake()
        elif not self._held:
            self._most = 0

    def _survived(self, call: RoutedCall) -> None:
        """Clear the suspect of a replica that lives; a dead one keeps it until it is back."""
        at = self._held[call]
        if at is not None and at.state is not ReplicaState.DOWN:
            at.suspects.discard(call)

    # ---- sessions and replicas that fail again and again

    def served(self, one: Replica, call: RoutedCall) -> None:
        """Record a call that ended well."""
        self._served += 1
        if self.records:
            self.records.pop(call.request.session_id or "", None)
        if one.breaks or one.quarantines:
            one.broke.clear()
            one.breaks = one.quarantines = 0

    def broke(self, one: Replica, call: RoutedCall, error: EngineError) -> bool:
        """Count a failed call that its replica survived; return whether to quarantine the
        replica.
        """
        if error.kind == "engine_error":
            return False
        session_id = call.request.session_id
        one.breaks += 1
        one.broke.add(session_id)
        if session_id is not None:
            record = self.records.setdefault(session_id, _Record(self._served))
            if record.served != self._served:  # else the engine may be at fault
                record.served, record.kind = self._served, error.kind
                record.strikes += 1
                if record.strikes == STRIKES:
                    record.until = time.monotonic() + QUARANTINE_S
                    log.warning("session_quarantined", session=session_id, kind=error.kind)
        return one.breaks >= BREAKS and len(one.broke) > 1

    def forget(self, session_id: str) -> None:
        """Drop all state of a session that has ended."""
        self.offenders.discard(session_id)
        self.records.pop(session_id, None)
