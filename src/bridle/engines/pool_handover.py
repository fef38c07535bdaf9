"""The lifecycle of an engine whose memory its trainer uses: serving, draining, released, loading.

`give_up` leaves replicas of a pool to their trainer, and `take_back` has them serve again. In
between nothing is sent to them. Whatever is sent to a replica is a call that it runs, or holds
`Replica.checking` (health checks, starts), or is sent under `Replica.touching` (all else), and a
replica is released once there is none of these. `tests/gateway/test_lifecycle.py` holds that
against servers that crash when they are touched.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace

from bridle.engines.base import EngineInfo, Settling, Versioned, Weights
from bridle.engines.pool_replica import (
    Replica,
    ReplicaState,
    RoutingSettings,
    WeightUpdates,
    check_version,
    engine_id,
)
from bridle.errors import ConfigError, EngineError


@dataclass(frozen=True, slots=True)
class Release:
    """A released server, as the next process of this pool has to know it."""

    info: EngineInfo | None
    """Its abilities and the version of its weights; `None` = it never started."""
    by: str = ""
    cut: bool = False


class EngineHandover(WeightUpdates):
    """Releases of a pool's replicas, and their return.

    `bridle.engines.pool.EnginePool` implements the abstract methods.
    """

    settings: RoutingSettings
    _replicas: dict[str, Replica]
    _absent: dict[str, Release]
    """Released servers that are not in the pool, now or yet."""

    @abstractmethod
    def _refresh(self) -> None:
        """Recompute which replicas may get calls, and wake waiting calls."""

    @abstractmethod
    async def _begun(self, one: Replica, version: int | None = None) -> EngineError | None:
        """Probe a replica, whose weights are `version` if it does not tell; return the error."""

    @abstractmethod
    async def _serving(self, one: Replica, error: EngineError | None) -> bool:
        """Have a replica serve that was looked at; `error` = it cannot. Returns whether it does."""

    async def give_up(
        self,
        names: Collection[str] | None = None,
        *,
        abort: bool = True,
        cut: bool = False,
        by: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        """Release replicas (`None` = all) to their trainer: from here on nothing is sent to them.

        With `abort`, running calls are ended and continue after `take_back` or on another replica,
        or fail if `cut`; otherwise they are awaited. `by` names the trainer: no other one can
        resume them. Raises `EngineError` after `timeout_s` and `ConfigError` for an unknown name or
        a replica that another trainer has; nothing changes then, nor if the caller is cancelled.
        """
        leaving: list[Replica] = []
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                chosen = self._named(names)
                _check_owner(chosen, by)
                leaving = [one for one in chosen if one.state is not ReplicaState.RELEASED]
                for one in leaving:
                    one.leaving, one.released_by, one.cut = one.state, by, cut
                    if one.state in {
                        ReplicaState.LIVE,
                        ReplicaState.QUARANTINED,
                        ReplicaState.PAUSED,
                    }:
                        one.enter(ReplicaState.DRAINING)
                self._refresh()
                for one in leaving:
                    await _release(one, abort=abort)
                for one in leaving:
                    one.leaving = None
        except BaseException as error:
            for one in leaving:
                before, one.leaving, one.released_by, one.cut = one.leaving, None, "", False
                if one.state in {ReplicaState.DRAINING, ReplicaState.RELEASED} and before:
                    one.enter(ReplicaState.LIVE if before is ReplicaState.STARTING else before)
                    one.wake.set()
            self._refresh()
            if not isinstance(error, TimeoutError):
                raise
            raise EngineError(
                f"calls were still running after {timeout_s:g} s; no replica was released"
            ) from None

    async def take_back(
        self,
        names: Collection[str] | None = None,
        *,
        version: int | None = None,
        weights: Weights | None = None,
        by: str = "",
    ) -> None:
        """Resume released replicas (`None` = all): they serve again, each once it has answered a
        probe.

        Their weights are `version`, which they load from `weights` if that is given; without
        `version` they load what they lack. One that was gone is probed anew. Raises `ConfigError`
        for an unknown name, a replica that another trainer has, one that serves another version,
        and one that has an adapter of another version where `weights` are not given; `EngineError`
        if none came back. A replica that did not is down, and is checked until it answers.
        """
        async with self._turns:
            chosen = self._named(names)
            _check_owner(chosen, by)
            if weights is None:
                check_version(chosen, version)
            self._absent = {
                name: kept
                for name, kept in self._absent.items()
                if kept.by != by or not (names is None or {name, engine_id(name)} & set(names))
            }
            back = [one for one in chosen if one.state is ReplicaState.RELEASED]
            for one in chosen:
                other = version not in {None, one.version}
                other |= weights is not None and self._latest != (weights, version)
                if one not in back and other and not one.state.out:
                    raise ConfigError(
                        f"replica {one.name} is {one.state} under weight version {one.version}: "
                        "only a released replica is resumed with another version, or with weights"
                    )
            for one in back:
                one.released_by, one.cut = "", False
                one.enter(ReplicaState.LOADING)
            self._refresh()
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._resume(one, version, weights)) for one in back]
            finally:
                for one in back:
                    if one.state is ReplicaState.LOADING:
                        self.lost(one, EngineError(one.error or "it was not resumed"))
        if back and not any(task.result() for task in tasks):
            raise EngineError(
                f"no released replica could be resumed; {back[0].name} failed with: "
                f"{back[0].error}",
                retryable=True,
            )

    async def _resume(self, one: Replica, version: int | None, weights: Weights | None) -> bool:
        """Look at a replica, and have it load its weights; return whether it serves."""
        async with one.checking:
            if version is not None and weights is None:
                one.version = version
                if isinstance(one.engine, Versioned):
                    await one.engine.set_version(version)
                self.published(version)
            if one.info is None or (one.gone and one.reopen is not None):
                error = await self._begun(one, version)
            else:
                error = await one.well(self.settings.health_timeout_s)
            if error is None and version is not None and weights is not None:
                failed = await self._load(one, weights, version)
                error = EngineError(failed[0]) if failed else None
            elif error is None:
                error = await self.catch_up(one)
            return await self._serving(one, error)

    def released(self) -> dict[str, Release]:
        """Return the releases of the replicas that are released to trainers, by name."""
        there = {
            one.name: Release(
                one.info and replace(one.info, version=one.version), one.released_by, one.cut
            )
            for one in self._replicas.values()
            if one.reopen is not None and one.state is ReplicaState.RELEASED
        }
        return self._absent | there

    def start_released(self, released: dict[str, Release]) -> None:
        """Mark servers as released from the start, or once they join; a resume probes them."""
        self._absent |= released
        for one in self._replicas.values():
            self._stays_released(one)

    def _stays_released(self, one: Replica) -> bool:
        """Return whether a new replica's trainer has it, and let it be so."""
        known = self._absent.pop(one.name, None)
        if known is None or one.reopen is None:
            return False
        one.info, one.gone, one.released_by, one.cut = known.info, True, known.by, known.cut
        one.version = 0 if known.info is None else known.info.version
        one.enter(ReplicaState.RELEASED)
        return True

    def _away(self) -> bool:
        """Return whether a replica is with its trainer, or paused: calls wait longer for it."""
        return any(
            one.state.away or one.state is ReplicaState.PAUSED for one in self._replicas.values()
        )

    def _named(self, names: Collection[str] | None) -> list[Replica]:
        there = (*self._replicas, *self._absent)
        known = {*there, *(engine_id(name) for name in there)}
        if unknown := set(names or ()) - known:
            raise ConfigError(
                f"the engine has no replica {min(unknown)!r}; it has: {sorted(self._replicas)}"
            )
        return [one for one in self._replicas.values() if one.named_in(names)]


async def _release(one: Replica, *, abort: bool) -> None:
    """Return when nothing is sent to a replica any more, and nothing will be."""
    while one.state is not ReplicaState.RELEASED:
        if abort:
            await one.abort_all()
        await one.idle(quiet=True)
        if isinstance(one.engine, Settling):
            await one.engine.settled()
        async with one.checking:
            if not one.running and not one.touches:
                one.enter(ReplicaState.RELEASED)


def _check_owner(replicas: Collection[Replica], by: str) -> None:
    """Raise `ConfigError` if another trainer than `by` has one of the replicas."""
    for one in replicas:
        if one.state is ReplicaState.RELEASED and one.released_by != by:
            raise ConfigError(
                f"replica {one.name} is released to trainer {one.released_by!r}, not to {by!r}: "
                "only that trainer resumes it; who stands in for it gives its name as `by`"
            )
