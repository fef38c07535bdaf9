"""Sessions on many nodes: scheduled as slots become free, followed, and failed with their node.

For each `RemoteNode` one task connects to the node and then polls it: the reported capacity, events
and ends drive everything. Free slots are never queried; a run that was sent counts as taken before
the node reports it, so sessions that arrive together spread over the nodes.

A node that does not answer for `lost_after_s` is lost: callers that wait for its runs get a
`NodeLostError` and run them again elsewhere. A node whose process was restarted on the same folder
is asked for the runs that had ended there; their results count even if they run again meanwhile.
Runs of a node that no caller waits for are ended there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import structlog

from bridle.aio import LoopClock, Nursery, run_shielded
from bridle.config import Task
from bridle.errors import BridleError, ConfigError, NodeLostError
from bridle.node.base import (
    EventBatch,
    Events,
    Handshake,
    RemoteNode,
    RoomChanged,
    RunRequest,
    SessionChanged,
    SessionEnded,
)
from bridle.node.fleet import (
    Fleet,
    Member,
    NodeSlots,
    NodeTimeouts,
    PendingRun,
    choose,
    earlier_runs,
    relevant,
)
from bridle.node.results import SessionResult

T = TypeVar("T")

MAX_BLOCKED = 1000
"""Sessions that may wait at once for a resource that no node has free."""

END_S = 60.0
"""Time limit for the end of a cancelled run."""

log = structlog.get_logger(__name__)


class ClusterRunner(Fleet):
    """Runs sessions on many nodes; implements `base.SessionRunner`.

    Use as an async context manager.
    """

    capture: Path | None = None

    def __init__(
        self,
        owner: str,
        *,
        outlive: bool = False,
        timeouts: NodeTimeouts | None = None,
    ) -> None:
        """`owner` names the owner of the runs, the same in every process of the caller.

        With `outlive`, runs continue when their caller is cancelled, and the caller's next process
        finds them.
        """
        super().__init__()
        self.owner = owner
        self.events = Events()
        self.outlive = outlive
        self._timeouts = timeouts or NodeTimeouts()
        self._clock = LoopClock(self._timeouts.lost_after_s / 5)
        self._runs: dict[str, PendingRun] = {}
        self._waiting: dict[str, PendingRun] = {}
        """Those of `_runs` that have no node, oldest first."""
        self._found: dict[str, Member] = {}
        """Runs of an earlier process that no caller has joined yet."""
        self._expected = set[str]()
        """Those that a caller will join."""
        self._held: dict[str, Member] = {}
        """Runs whose result has arrived and is not acknowledged yet."""
        self._settled, self._reported_slots = False, 0
        self._nursery = Nursery(
            lambda error: log.error("a task of the cluster's runner has failed", error=repr(error))
        )

    async def __aenter__(self) -> Self:
        self._nursery.start(self._clock.run(), name="clock")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop polling; runs on nodes continue there."""
        await self._nursery.cancel()

    # ---- nodes

    def join(self, node: RemoteNode) -> None:
        """Add a node to the cluster; one that is in it already is left alone."""
        if node.name in self._members:
            return
        member = Member(node, NodeSlots(node.name, node.offers), self._clock)
        self._members[node.name] = member
        member.task = self._nursery.start(self._serve(member), name=f"node {node.name}")

    def gone(self, name: str, why: str) -> None:
        """Remove a node that is lost for good, and fail its runs at once."""
        member = self._members.pop(name, None)
        if member is not None:
            if member.task is not None:
                member.task.cancel()
            self._lose(member, NodeLostError(f"node {member.slots.node_id or name}: {why}"))

    async def drain_node(self, name: str) -> None:
        """Give a node (by its name or its `node_id`) no further run; its sessions continue.

        `ConfigError` if there is none. `NodeLostError` if it could not be reached; it gets no
        further run of this server then, either.
        """
        known = {one.slots.name: one for one in self.members()}
        member = known.get(name) or {one.slots.node_id: one for one in self.members()}.get(name)
        if member is None:
            raise ConfigError(f"no node {name!r}; there are: {sorted(known)}")
        member.slots.open = False
        member.state = "draining"
        self._report_room()
        await member.node.drain()

    async def first_contact(self) -> None:
        """Return when every node that has joined is live, or has failed or been lost once.

        `ConfigError` with one node's error if none of them could be opened.
        """
        for member in self.members():
            await member.tried.wait()
        errors = [m for m in self._members.values() if m.error is not None]
        if errors and len(errors) == len(self._members):
            raise ConfigError(
                f"no node of the cluster could be opened; {errors[0].slots.name} failed with: "
                f"{errors[0].error}"
            )

    async def _serve(self, member: Member) -> None:
        """Connect to a node and poll it, again after each failure, until it is gone."""
        while True:
            try:
                await self._listen(member)
            except (NodeLostError, TimeoutError) as error:
                if self._silent(member, error):
                    return
            except BridleError as error:
                member.error = str(error)
                member.tried.set()
                log.warning("a node cannot be opened", node=member.slots.name, error=str(error))
                await asyncio.sleep(self._timeouts.lost_after_s)
            await asyncio.sleep(self._timeouts.again_s)

    async def _listen(self, member: Member) -> None:
        timeouts = self._timeouts
        opening = member.state == "opening"
        async with asyncio.timeout(timeouts.open_s if opening else timeouts.lost_after_s):
            shake = await member.node.connect(self.owner)
        await self._connected(member, shake)
        while True:
            async with asyncio.timeout(timeouts.lost_after_s):
                batch = await member.node.poll(
                    self.owner, member.epoch, member.after, timeouts.tell_s
                )
            self._receive(member, batch)

    def _silent(self, member: Member, error: Exception) -> bool:
        """Handle a node that does not answer; returns whether it never will."""
        name = member.slots.node_id or member.slots.name
        for_good = isinstance(error, NodeLostError) and not error.may_return
        if for_good or member.silent_s > self._timeouts.lost_after_s:
            why = error if isinstance(error, NodeLostError) else "it does not answer"
            member.tried.set()
            if member.state != "lost":
                log.warning("node_lost", node=name, sessions=len(member.runs), error=str(why))
            member.state = "lost"
            self._lose(member, NodeLostError(f"node {name}: {why}"))
        elif member.state not in ("lost", "opening"):
            member.state, member.slots.open = "away", False
            self._report_room()
        return for_good

    def _lose(self, member: Member, error: NodeLostError) -> None:
        member.slots.open = False
        self._found = {one: at for one, at in self._found.items() if at is not member}
        self._held = {one: at for one, at in self._held.items() if at is not member}
        for run in list(member.runs.values()):
            self._drop(run)
            run.finish(NodeLostError(str(error)))
        self._report_room()

    async def _connected(self, member: Member, shake: Handshake) -> None:
        """Compare the runs that a node reports with those that are expected there."""
        slots = member.slots
        slots.node_id, slots.capacity = shake.node_id, shake.room.capacity
        known = {*shake.living, *shake.ended}
        expected = list(member.runs.values())
        for run_id in known - member.runs.keys():
            run = self._runs.get(run_id)
            if run is not None and run.member is None:
                self._give(run, member)
            elif run is None and not self._settled:
                self._found[run_id] = member
            else:
                self._unwanted(member, run_id)
        slots.placed = shake.room.placed
        member.epoch, member.after, member.policy = shake.epoch, 0, shake.policy
        member.last_contact, member.error = self._clock(), None
        async with asyncio.timeout(self._timeouts.open_s):
            await self.release_on(member)
            if self.common is not None:
                member.policy = await member.node.set_policy(self.common)
            await self.give_engines(member)
        member.state = "draining" if shake.room.draining or member.state == "draining" else "live"
        self._update_slots(member, shake)
        missing = [run for run in expected if run.run_id not in known]
        await self._recover(member, missing)
        self._report_ended(member, shake.ended)
        member.tried.set()
        self._place_waiting()
        self._report_room()

    async def _recover(self, member: Member, missing: Sequence[PendingRun]) -> None:
        """Ask a process that has just started for the runs that ended on its folder before."""
        lost = {run.run_id: run for run in missing}
        again = {one: run for run in self._runs.values() for one in earlier_runs(run.run_id)}
        if not lost and not again:
            return
        async with asyncio.timeout(self._timeouts.lost_after_s):
            ended = await member.node.recall_all([*lost, *again])
        for run_id, result in ended.items():
            run = lost.pop(run_id, None) or again.get(run_id)
            if run is not None and not run.done.done():
                elsewhere = run.member
                self._drop(run)
                run.finish(result)
                if elsewhere is not None and elsewhere is not member:
                    self._unwanted(elsewhere, run.run_id)
        for run in lost.values():
            self._drop(run)
            why = "its process was restarted"
            run.finish(NodeLostError(f"node {member.slots.node_id}: {why}"))

    def _receive(self, member: Member, batch: EventBatch) -> None:
        member.last_contact, member.after = self._clock(), batch.at
        self._update_slots(member, batch)
        for event in batch.events:
            if not isinstance(event, SessionChanged) or event.session_id in member.runs:
                self.events.tell(event)
            elif event.session_id not in self._found:
                self._unwanted(member, event.session_id)
        self._report_ended(member, batch.ended)
        self._place_waiting()
        self._report_room()

    def _update_slots(self, member: Member, report: Handshake | EventBatch) -> None:
        slots, room = member.slots, report.room
        slots.capacity, slots.reported_free = room.capacity, room.free
        slots.reported_placed = room.placed
        if room.draining and member.state == "live":
            member.state = "draining"
        slots.open = member.state == "live"
        member.stages = room.stages

    def _report_ended(self, member: Member, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if (run := member.runs.get(run_id)) is not None:
                run.ended = True
                self._fetch(member, run)
            elif run_id not in self._found:
                self._unwanted(member, run_id)

    def _unwanted(self, member: Member, run_id: str) -> None:
        """End a run that no caller waits for, on its node, and acknowledge it."""

        async def end() -> None:
            if not await member.node.cancel(run_id):
                await member.node.ack(self.owner, [run_id])

        self._nursery.start(self._persist(member, end), name=f"end {run_id}")

    async def _persist(self, member: Member, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a call until the node answers; `None` = the node is lost."""
        while member.state != "lost":
            with suppress(NodeLostError, TimeoutError):
                async with asyncio.timeout(self._timeouts.lost_after_s):
                    return await call()
            await asyncio.sleep(self._timeouts.again_s)
        return None

    # ---- room

    @property
    def capacity(self) -> int:
        """Number of sessions that run or could start now on all nodes together.

        Sessions that wait for a resource of some node do not take the slots of others.
        """
        free = self.free
        blocked = min(len(self._waiting), MAX_BLOCKED) if free else 0
        return sum(len(member.runs) for member in self._members.values()) + free + blocked

    @property
    def free(self) -> int:
        """Number of free slots on all nodes together."""
        return sum(member.slots.free for member in self._members.values())

    def session_ids(self) -> tuple[str, ...]:
        """Return the ids of the runs that are in progress or wait for a node."""
        return tuple(self._runs)

    def _report_room(self) -> None:
        slots = self.capacity
        if slots != self._reported_slots:
            self._reported_slots = slots
            self.events.tell(RoomChanged(slots))

    # ---- runs

    def expect(self, run_id: str) -> bool:
        """Return whether a run that an earlier server process started still continues."""
        if run_id in self._found:
            self._expected.add(run_id)
        return run_id in self._found

    async def settle(self) -> None:
        """End the runs of an earlier server process that were not expected."""
        self._settled = True
        for run_id in self._found.keys() - self._expected:
            self._unwanted(self._found.pop(run_id), run_id)

    async def recall(self, run_id: str) -> SessionResult | None:
        """Return the result of a run that ended under an earlier server process.

        Every live node is asked; `None` = the run ended on none of them.
        """
        for member in self.members():
            if member.state in ("live", "draining"):
                with suppress(NodeLostError, TimeoutError):
                    async with asyncio.timeout(self._timeouts.lost_after_s):
                        found = await member.node.recall_all([run_id])
                    if run_id in found:
                        return found[run_id]
        return None

    async def run(
        self,
        task: Task,
        sample_index: int = 0,
        run_id: str | None = None,
        avoid: frozenset[str] = frozenset(),
    ) -> SessionResult:
        """Run one session on a node with a free slot.

        A run of this id that an earlier server process began is awaited instead.
        """
        run_id = run_id or f"{task.task_id[:180]}.{sample_index}.{time.time_ns():x}"
        if run_id in self._runs:
            raise ConfigError(f"session {run_id!r} is running already; give the new run another id")
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda one: one.cancelled() or one.exception())
        run = self._runs[run_id] = PendingRun(run_id, task, sample_index, avoid, done)
        try:
            self._begin(run)
            result = await asyncio.shield(run.done)
            self.events.tell(SessionEnded(result, None))
            return result
        except asyncio.CancelledError:
            if not self.outlive:
                await run_shielded(self._end(run), timeout_s=END_S)
            elif run.member is not None:
                self._found[run_id] = run.member
            raise
        finally:
            self._runs.pop(run_id, None)
            self._drop(run)
            self._place_waiting()
            self._report_room()

    def release(self, run_id: str) -> None:
        """Acknowledge a run to its node, which then drops it from memory."""
        member = self._held.pop(run_id, None)
        if member is not None:
            said = self._persist(member, lambda: member.node.ack(self.owner, [run_id]))
            self._nursery.start(said, name=f"release {run_id}")

    def cancel(self, run_id: str) -> bool:
        """End a run, or its wait for a node, with the result CANCELLED; returns whether there was
        one.
        """
        run = self._runs.get(run_id)
        if run is None:
            return False
        if run.member is None:
            self._drop(run)
            run.finish(run.never_began())
        else:
            self._cancel(run, run.member)
        return True

    def _cancel(self, run: PendingRun, member: Member) -> None:
        said = self._persist(member, lambda: member.node.cancel(run.run_id))
        self._nursery.start(said, name=f"cancel {run.run_id}")

    def _begin(self, run: PendingRun) -> None:
        """Join a run that continues somewhere, or wait for a free slot."""
        self._expected.discard(run.run_id)
        member = self._found.pop(run.run_id, None)
        if member is None:
            self._waiting[run.run_id] = run
            self._place_waiting()
            return
        self._give(run, member)
        self._fetch(member, run)

    def _give(self, run: PendingRun, member: Member) -> None:
        self._waiting.pop(run.run_id, None)
        run.member, member.runs[run.run_id] = member, run
        member.slots.take(run.needs)

    def _drop(self, run: PendingRun) -> None:
        """Take a run off its node and off the queue."""
        self._waiting.pop(run.run_id, None)
        member, run.member = run.member, None
        if member is not None:
            member.runs.pop(run.run_id, None)
            member.slots.release(run.needs)

    def _place_waiting(self) -> None:
        """Send waiting runs to nodes that have room for them."""
        if not self._waiting or not self.free:
            return
        nodes = [member.slots for member in self._members.values()]
        offered = {name for node in nodes for name in node.offers}
        in_vain = set[object]()
        for run in list(self._waiting.values()):
            run.needs = relevant(run.task.runtime, offered)
            kind = (frozenset(run.needs.items()), run.avoid)
            chosen = None if kind in in_vain else choose(run.needs, run.avoid, nodes)
            if chosen is None:
                in_vain.add(kind)
                continue
            chosen.placed += 1
            member = self._members[chosen.name]
            self._give(run, member)
            self._nursery.start(self._start(run, member), name=f"start {run.run_id}")

    async def _start(self, run: PendingRun, member: Member) -> None:
        """Send a run to its node; one that the node refuses waits again."""
        request = RunRequest(run.run_id, run.task.model_dump_json(), run.sample_index)
        refusals = await self._persist(member, lambda: member.node.start(self.owner, [request]))
        if refusals is None:
            return
        if run.member is not member:
            self._unwanted(member, run.run_id)
        elif refusals[0] is not None:
            member.slots.placed -= 1
            member.slots.reported_free = 0
            self._drop(run)
            self._waiting[run.run_id] = run
            self._place_waiting()

    def _fetch(self, member: Member, run: PendingRun) -> None:
        """Fetch the end of a run, if it has ended."""
        if not run.fetching:
            run.fetching = True
            self._nursery.start(self._fetched(member, run), name=f"fetch {run.run_id}")

    async def _fetched(self, member: Member, run: PendingRun) -> None:
        ended_before = run.ended
        end = await self._persist(member, lambda: member.node.result(run.run_id))
        run.fetching = False
        if run.member is not member:
            return
        if end is not None:
            self._drop(run)
            self._held[run.run_id] = member
            run.finish(end)
        elif run.ended and not ended_before:  # it ended during the call
            self._fetch(member, run)

    async def _end(self, run: PendingRun) -> None:
        """End a run whose caller has gone, and wait for its end."""
        member = run.member
        if member is None or run.done.done():
            return
        self._cancel(run, member)
        with suppress(BridleError):
            await asyncio.shield(run.done)
