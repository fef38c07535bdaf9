"""Sessions on many nodes: placed as slots become free, followed, and given up with their node.

A `Link` is one node's words (`bridle.executors.hosting.NodeHost`) carried over a network. For each
there is one task here that greets the node and then listens: what it hears (room, events, ends)
drives everything. Nothing asks a node how full it is; what was given away counts as taken before
the node says so, so sessions that come together spread over the nodes.

A node that does not answer for `lost_after_s` is lost: who waits for its runs gets a
`NodeLostError` and runs them again elsewhere. One whose process was started anew on the same folder
is asked for what had ended; its own ends count, whoever runs them again meanwhile. Runs that a node
has and nobody here waits for are ended there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self, TypeVar

import structlog

from bridle.aio import LoopClock, Nursery, run_shielded
from bridle.config import Task
from bridle.errors import BridleError, ConfigError, EngineError, NodeLostError
from bridle.executors.hosting import Hello, News, Start
from bridle.executors.members import Link, Member, Patience, Place, Run, choose, relevant
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.events import Events, RoomChanged, SessionChanged, SessionEnded
from bridle.lifecycle.results import SessionResult
from bridle.types import SessionStatus

T = TypeVar("T")

MAX_BLOCKED = 1000
"""Sessions that may be in hand while they wait for what no node has free."""

END_S = 60.0
"""How long a run that nobody wants any more is waited for."""

log = structlog.get_logger(__name__)


class ClusterRunner:
    """Runs sessions on many nodes. Use as an async context manager.

    `owner` is whose runs these are: the same in every life of who asks. With `outlive`, runs go on
    when their caller is cancelled, to be found by its next life.
    """

    def __init__(
        self, owner: str, *, outlive: bool = False, patience: Patience | None = None
    ) -> None:
        self.owner = owner
        self.events = Events()
        self._outlive = outlive
        self._patience = patience or Patience()
        self._clock = LoopClock(self._patience.lost_after_s / 5)
        self._members: dict[str, Member] = {}
        self._runs: dict[str, Run] = {}
        self._waiting: dict[str, Run] = {}
        """Those of `_runs` that have no node, oldest first."""
        self._found: dict[str, Member] = {}
        """Runs of an earlier life that nobody has asked for yet."""
        self._expected = set[str]()
        """Those that somebody will ask for."""
        self._held: dict[str, Member] = {}
        """Runs whose end came from a node that is still to let go of it."""
        self.common: list[SetPolicy] = []
        """What every node is steered by before it gets its first run, those that join late too."""
        self.replicas: list[str] = []
        """Engines that joined at run time, as `AddReplica.engine`."""
        self._settled, self._told_slots = False, 0
        self._stages: dict[str, SessionStatus] = {}
        self._nursery = Nursery(_log_lost)

    async def __aenter__(self) -> Self:
        self._nursery.start(self._clock.run(), name="clock")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hear no more; what runs on nodes goes on there."""
        await self._nursery.cancel()

    # ---- nodes

    def join(self, link: Link) -> None:
        """A node takes part from now on; nothing changes if it does already."""
        if link.name in self._members:
            return
        member = Member(link, Place(link.name, link.offers), self._clock)
        self._members[link.name] = member
        member.task = self._nursery.start(self._serve(member), name=f"node {link.name}")

    def gone(self, name: str, why: str) -> None:
        """A node will not come back; who waits for its runs is told at once."""
        member = self._members.pop(name, None)
        if member is not None:
            if member.task is not None:
                member.task.cancel()
            self._lose(member, NodeLostError(f"node {member.place.node_id or name}: {why}"))

    async def drain(self, name: str) -> None:
        """A node (by its name or its `node_id`) takes no further run; what lives there goes on.

        `ConfigError` if there is none. `NodeLostError` if it could not be told; it gets none of
        ours then, either.
        """
        known = {one.place.name: one for one in self.nodes()}
        member = known.get(name) or {one.place.node_id: one for one in self.nodes()}.get(name)
        if member is None:
            raise ConfigError(f"no node {name!r}; there are: {sorted(known)}")
        member.place.open = False
        member.state = "draining"
        self._tell_room()
        await member.link.drain()

    def nodes(self) -> list[Member]:
        return list(self._members.values())

    async def first_heard(self) -> None:
        """Return when every node that has joined is live, or has failed or been lost once.

        Raises what opening them raised if none came up.
        """
        for member in self.nodes():
            await member.tried.wait()
        errors = [m for m in self._members.values() if m.error is not None]
        if errors and len(errors) == len(self._members):
            raise ConfigError(f"no node came up; {errors[0].place.name}: {errors[0].error}")

    async def _serve(self, member: Member) -> None:
        """Greet a node and listen to it, again and again, until it is gone."""
        while True:
            try:
                await self._listen(member)
            except (NodeLostError, TimeoutError) as error:
                if self._silent(member, error):
                    return
            except BridleError as error:
                member.error = str(error)
                member.tried.set()
                log.warning("a node does not come up", node=member.place.name, error=str(error))
                await asyncio.sleep(self._patience.lost_after_s)
            await asyncio.sleep(self._patience.again_s)

    async def _listen(self, member: Member) -> None:
        patience = self._patience
        opening = member.state == "opening"
        async with asyncio.timeout(patience.open_s if opening else patience.lost_after_s):
            hello = await member.link.hello(self.owner)
        await self._greeted(member, hello)
        while True:
            async with asyncio.timeout(patience.lost_after_s):
                news = await member.link.news(
                    self.owner, member.epoch, member.after, wait_s=patience.tell_s
                )
            self._hear(member, news)

    def _silent(self, member: Member, error: Exception) -> bool:
        """A node does not answer; whether it never will."""
        name = member.place.node_id or member.place.name
        for_good = isinstance(error, NodeLostError) and not error.may_return
        if for_good or member.silent_s > self._patience.lost_after_s:
            why = error if isinstance(error, NodeLostError) else "it does not answer"
            member.tried.set()
            if member.state != "lost":
                log.warning("node_lost", node=name, sessions=len(member.runs), error=str(why))
            member.state = "lost"
            self._lose(member, NodeLostError(f"node {name}: {why}"))
        elif member.state not in ("lost", "opening"):
            member.state, member.place.open = "away", False
            self._tell_room()
        return for_good

    def _lose(self, member: Member, error: NodeLostError) -> None:
        member.place.open = False
        self._found = {one: at for one, at in self._found.items() if at is not member}
        self._held = {one: at for one, at in self._held.items() if at is not member}
        for run in list(member.runs.values()):
            self._drop(run)
            run.finish(NodeLostError(str(error)))
        self._tell_room()

    async def _greeted(self, member: Member, hello: Hello) -> None:
        """Compare what a node has with what is expected of it."""
        place = member.place
        place.node_id, place.capacity = hello.node_id, hello.room.capacity
        known = {*hello.living, *hello.ended}
        expected = list(member.runs.values())
        for run_id in known - member.runs.keys():
            run = self._runs.get(run_id)
            if run is not None and run.member is None:
                self._give(run, member)
            elif run is None and not self._settled:
                self._found[run_id] = member
            else:
                self._unwanted(member, run_id)
        place.placed = hello.room.placed
        member.epoch, member.after, member.policy = hello.epoch, 0, hello.policy
        member.heard, member.error = self._clock(), None
        async with asyncio.timeout(self._patience.open_s):
            for wanted in self.common:
                member.policy = await member.link.set_policy(wanted)
            for engine in self.replicas:
                try:
                    member.policy = await member.link.add_replica(engine)
                except EngineError as error:  # it is gone, maybe; the others are there
                    log.warning("an engine cannot join", engine=engine, error=str(error))
        member.state = "draining" if hello.room.draining or member.state == "draining" else "live"
        self._take_room(member, hello)
        missing = [run for run in expected if run.run_id not in known]
        await self._recover(member, missing)
        self._told_ended(member, hello.ended)
        member.tried.set()
        self._place_waiting()
        self._tell_room()

    async def _recover(self, member: Member, missing: Sequence[Run]) -> None:
        """Ask a process that has just come up for what ended here before."""
        lost = {run.run_id: run for run in missing}
        again = {one: run for run in self._runs.values() for one in run.earlier}
        if not lost and not again:
            return
        async with asyncio.timeout(self._patience.lost_after_s):
            ended = await member.link.recall([*lost, *again])
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
            why = "its process was started anew"
            run.finish(NodeLostError(f"node {member.place.node_id}: {why}"))

    def _hear(self, member: Member, news: News) -> None:
        member.heard, member.after = self._clock(), news.at
        self._take_room(member, news)
        for event in news.events:
            if not isinstance(event, SessionChanged):
                self.events.tell(event)
            elif event.session_id in member.runs:
                self._stages[event.session_id] = event.status
                self.events.tell(event)
            elif event.session_id not in self._found:
                self._unwanted(member, event.session_id)
        self._told_ended(member, news.ended)
        self._place_waiting()
        self._tell_room()

    def _take_room(self, member: Member, said: Hello | News) -> None:
        place, room = member.place, said.room
        place.capacity, place.told_free, place.told_placed = room.capacity, room.free, room.placed
        if room.draining and member.state == "live":
            member.state = "draining"
        place.open = member.state == "live"
        member.stages = room.stages

    def _told_ended(self, member: Member, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if (run := member.runs.get(run_id)) is not None:
                run.ended = True
                self._fetch(member, run)
            elif run_id not in self._found:
                self._unwanted(member, run_id)

    def _unwanted(self, member: Member, run_id: str) -> None:
        """Nobody here waits for a run that a node has: end it there and let it go."""

        async def end() -> None:
            if not await member.link.cancel(run_id):
                await member.link.ack(self.owner, [run_id])

        self._nursery.start(self._persist(member, end), name=f"end {run_id}")

    async def _persist(self, member: Member, say: Callable[[], Awaitable[T]]) -> T | None:
        """Say something to a node until it is heard; `None` = the node is lost."""
        while member.state != "lost":
            with suppress(NodeLostError, TimeoutError):
                async with asyncio.timeout(self._patience.lost_after_s):
                    return await say()
            await asyncio.sleep(self._patience.again_s)
        return None

    # ---- room

    @property
    def capacity(self) -> int:
        """Sessions that are here, and those that fit beside them.

        Those that wait for what only some node has do not take the room of others.
        """
        free = self.free
        blocked = min(len(self._waiting), MAX_BLOCKED) if free else 0
        return sum(len(member.runs) for member in self._members.values()) + free + blocked

    @property
    def free(self) -> int:
        return sum(member.place.free for member in self._members.values())

    def stages(self) -> Mapping[SessionStatus, int]:
        """Count the running sessions per stage; those without a node are REGISTERED."""
        waiting = SessionStatus.REGISTERED
        return Counter(self._stages.get(run_id, waiting) for run_id in self._runs)

    def session_ids(self) -> tuple[str, ...]:
        return tuple(self._runs)

    def _tell_room(self) -> None:
        slots = self.capacity
        if slots != self._told_slots:
            self._told_slots = slots
            self.events.tell(RoomChanged(slots))

    # ---- runs

    def expect(self, run_id: str) -> bool:
        """Return whether a run of an earlier process still runs, or has ended and waits to be
        fetched.

        If so it is kept for who will ask for it.
        """
        if run_id in self._found:
            self._expected.add(run_id)
        return run_id in self._found

    def settle(self) -> None:
        """All runs of an earlier life that anybody wants are expected: end the others."""
        self._settled = True
        for run_id in self._found.keys() - self._expected:
            self._unwanted(self._found.pop(run_id), run_id)

    async def recall(self, run_id: str) -> SessionResult | None:
        """The result of a run of an earlier life that ended on some node; `None` = on none."""
        for member in self.nodes():
            if member.state in ("live", "draining"):
                with suppress(NodeLostError, TimeoutError):
                    async with asyncio.timeout(self._patience.lost_after_s):
                        found = await member.link.recall([run_id])
                    if run_id in found:
                        return found[run_id]
        return None

    async def run(
        self,
        task: Task,
        sample_index: int = 0,
        *,
        session_id: str | None = None,
        avoid: frozenset[str] = frozenset(),
        earlier: tuple[str, ...] = (),
    ) -> SessionResult:
        """Run one session as `Node.run` does, on a node with a free slot. `NodeLostError` if that
        node was lost.

        A run of this id that an earlier life began is taken up. `earlier` are runs of the same
        session on nodes that were lost; should one of those turn out to have ended, it counts.
        """
        run_id = session_id or f"{task.task_id[:180]}.{sample_index}.{time.time_ns():x}"
        if run_id in self._runs:
            raise ConfigError(f"session {run_id!r} runs already")
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda one: one.cancelled() or one.exception())
        run = self._runs[run_id] = Run(run_id, task, sample_index, avoid, earlier, done)
        try:
            self._begin(run)
            result = await asyncio.shield(run.done)
            self.events.tell(SessionEnded(result, None))
            return result
        except asyncio.CancelledError:
            if not self._outlive:
                await run_shielded(self._end(run), timeout_s=END_S)
            elif run.member is not None:
                self._found[run_id] = run.member
            raise
        finally:
            self._runs.pop(run_id, None)
            self._stages.pop(run_id, None)
            self._drop(run)
            self._place_waiting()
            self._tell_room()

    def release(self, run_id: str) -> None:
        """The result of a run is kept elsewhere: its node need not hold it any more."""
        member = self._held.pop(run_id, None)
        if member is not None:
            said = self._persist(member, lambda: member.link.ack(self.owner, [run_id]))
            self._nursery.start(said, name=f"release {run_id}")

    def cancel(self, session_id: str) -> bool:
        """End a run, whose result will be CANCELLED; whether there was one."""
        run = self._runs.get(session_id)
        if run is None:
            return False
        if run.member is None:
            self._drop(run)
            run.finish(run.never_began())
        else:
            self._cancel(run, run.member)
        return True

    def _cancel(self, run: Run, member: Member) -> None:
        said = self._persist(member, lambda: member.link.cancel(run.run_id))
        self._nursery.start(said, name=f"cancel {run.run_id}")

    def _begin(self, run: Run) -> None:
        """Take up what goes on somewhere, or wait for a place."""
        self._expected.discard(run.run_id)
        member = self._found.pop(run.run_id, None)
        if member is None:
            self._waiting[run.run_id] = run
            self._place_waiting()
            return
        self._give(run, member)
        self._fetch(member, run)

    def _give(self, run: Run, member: Member) -> None:
        self._waiting.pop(run.run_id, None)
        run.member, member.runs[run.run_id] = member, run
        member.place.take(run.needs)

    def _drop(self, run: Run) -> None:
        """It has no node any more, and waits for none."""
        self._waiting.pop(run.run_id, None)
        member, run.member = run.member, None
        if member is not None:
            member.runs.pop(run.run_id, None)
            member.place.give(run.needs)

    def _place_waiting(self) -> None:
        """Give those that wait to nodes that have room for them."""
        if not self._waiting or not self.free:
            return
        places = [member.place for member in self._members.values()]
        offered = {name for place in places for name in place.offers}
        in_vain = set[object]()
        for run in list(self._waiting.values()):
            run.needs = relevant(run.task.runtime, offered)
            kind = (frozenset(run.needs.items()), run.avoid)
            place = None if kind in in_vain else choose(run.needs, run.avoid, places)
            if place is None:
                in_vain.add(kind)
                continue
            member = self._members[place.name]
            place.placed += 1
            self._give(run, member)
            self._nursery.start(self._start(run, member), name=f"start {run.run_id}")

    async def _start(self, run: Run, member: Member) -> None:
        """Hand a run to its node; one that does not take it gives it back."""
        start = Start(run.run_id, run.task.model_dump_json(), run.sample_index)
        said = await self._persist(member, lambda: member.link.start(self.owner, [start]))
        if said is None:
            return
        if run.member is not member:
            self._unwanted(member, run.run_id)
        elif said[0] is not None:
            member.place.placed -= 1
            member.place.told_free = 0
            self._drop(run)
            self._waiting[run.run_id] = run
            self._place_waiting()

    def _fetch(self, member: Member, run: Run) -> None:
        """Get what a run came to, if it has ended."""
        if not run.fetching:
            run.fetching = True
            self._nursery.start(self._fetched(member, run), name=f"fetch {run.run_id}")

    async def _fetched(self, member: Member, run: Run) -> None:
        ended_before = run.ended
        end = await self._persist(member, lambda: member.link.result(run.run_id))
        run.fetching = False
        if run.member is not member:
            return
        if end is not None:
            self._drop(run)
            self._held[run.run_id] = member
            run.finish(end)
        elif run.ended and not ended_before:  # it ended while we asked
            self._fetch(member, run)

    async def _end(self, run: Run) -> None:
        """End a run whose caller has gone, and wait until it has."""
        member = run.member
        if member is None or run.done.done():
            return
        self._cancel(run, member)
        with suppress(BridleError):
            await asyncio.shield(run.done)


def _log_lost(error: BaseException) -> None:
    log.error("a part of the cluster's runner has failed", error=repr(error))
