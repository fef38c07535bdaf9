"""Finds the call that kills engines, so that no other call pays for it.

When an engine dies, every call that it had may be the reason. A call that saw `SUSPECTED` deaths
runs apart: only one such call runs at a time, and a death then counts against it alone. A session
whose call used up its tries in this way is an offender: its next calls run apart and get one try.
"""

from __future__ import annotations

from typing import Final

from bridle.engines.pool_replica import Replica, ReplicaState, RoutedCall

SUSPECTED: Final = 2
"""Engines that died around a call before it runs apart."""


class Blame:
    """Counts deaths against calls. `attempts` is how many fail a call."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._held: RoutedCall | None = None
        """The suspect that has the only place."""
        self._waiting: set[RoutedCall] = set()
        self._at: Replica | None = None
        """The replica that runs it, or ran it last."""
        self._offenders: set[str | None] = set()

    def begin(self, call: RoutedCall) -> None:
        """Suspect a call at once if its session is an offender."""
        if call.request.session_id in self._offenders:
            call.deaths = max(SUSPECTED, self._attempts - 1)

    async def apart(self, call: RoutedCall) -> None:
        """Wait until no other suspect runs, if the call is one and is not aborted meanwhile.

        `end` gives the place up.
        """
        while call.deaths >= SUSPECTED and self._held is not call and not call.aborted:
            if self._held is None:
                self._held, self._at = call, None
                return
            self._waiting.add(call)
            await call.changed.wait()
            call.changed.clear()

    def tries(self, one: Replica, call: RoutedCall) -> None:
        """Note that a replica is about to run a call."""
        if self._held is call:
            self._survived()
            one.suspect, self._at = call, one

    def died(self, one: Replica, call: RoutedCall) -> bool:
        """Count the death of a replica against a call that it had; return if its tries are spent.

        While a suspect ran there, the death counts against the suspect only.
        """
        if one.suspect is not None and one.suspect is not call:
            return False
        call.deaths += 1
        if call.deaths < self._attempts:
            return False
        if call.request.session_id is not None:
            self._offenders.add(call.request.session_id)
        return True

    def end(self, call: RoutedCall) -> None:
        """Let the next suspect run, if the call was one that ran apart."""
        self._waiting.discard(call)
        if self._held is call:
            self._survived()
            self._held = self._at = None
            for one in self._waiting:
                one.changed.set()

    def forget(self, session_id: str) -> None:
        """Drop what is known of a session that has ended."""
        self._offenders.discard(session_id)

    def _survived(self) -> None:
        """Clear the suspect of a replica that lives; a dead one keeps it until it is back."""
        if self._at is not None and self._at.state is not ReplicaState.DOWN:
            self._at.suspect = None
