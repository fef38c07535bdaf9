"""Toward 10,000 sessions at once: a discrete-event simulation of many nodes under one server.

Nodes have the pools of `node.local` at their defaults: init workers and a buffer of ready
sessions of half the run slots each, and a capacity of two and a half times the slots. One server
starts and ends sessions, one after the other on one core. Machines die at random; what they had in
hand is run again elsewhere once the server knows, and they come back empty. Run times are
log-normal with sigma 1, making ready takes a fifth of a run (sigma 0.5), giving back 2 %.

What a step costs is `MEASURED`, from docs/benchmarks.md; what the simulation gives is no better
than that table, and it knows nothing of engines and networks.

    python -m benchmarks.scale [--nodes 100] [--slots 100] [--sessions 100000]
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of Bridle take."""

    session_cpu_s: float
    """Of the server's core per session: taken from the queue, ended, its trajectory stored."""
    dispatch_s: float
    """From the server's decision until a node has the session."""
    lost_after_s: float
    """From a machine's death until the server knows."""


MEASURED = Costs(
    session_cpu_s=1 / 52,  # The rollout server: 52 sessions of 30,000 tokens per CPU second
    dispatch_s=0.030,  # Many machines: the budget; three words of 1.4 ms each, on a quiet machine
    lost_after_s=5.0,  # Many machines: 2.5 s, and 4.9 s at load 17
)
"""The constants, each with where it is from."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Size of the fleet, and its rate of failures."""

    nodes: int = 100
    slots: int = 100
    """Run slots of a node."""
    mean_s: float = 300.0
    """Of a run."""
    sigma: float = 1.0
    init_share: float = 0.2
    init_sigma: float = 0.5
    post_share: float = 0.02
    node_mtbf_s: float = math.inf
    """Between two deaths of one machine, on average."""
    repair_s: float = 600.0
    costs: Costs = MEASURED


@dataclass(slots=True)
class Seen:
    """Result of a batch; shares are of its steady time: from one mean run after its beginning
    until its queue is empty.
    """

    ended: int = 0
    lost_runs: int = 0
    """Runs of sessions that died with their machine."""
    deaths: int = 0
    useful_s: float = 0.0
    """Run time of runs that ended."""
    wasted_s: float = 0.0
    """Run time of runs that were lost."""
    made_twice: int = 0
    """Sessions that ended more than once: none, by law."""
    steady_s: float = 0.0
    slot_use: float = 0.0
    server_use: float = 0.0
    took_s: float = 0.0
    delays: list[float] = field(default_factory=list)
    """How long each end waited for the server."""

    @property
    def wasted_share(self) -> float:
        """Of all run time."""
        return self.wasted_s / (self.useful_s + self.wasted_s or 1.0)

    def delay_s(self, share: float) -> float:
        """The delay that `share` of all ends did not exceed."""
        ordered = sorted(self.delays)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class _Node:
    """One machine: what of its pools is taken."""

    def __init__(self) -> None:
        self.alive = True
        self.epoch = 0
        self.in_hand: set[int] = set()
        self.reported: set[int] = set()
        """Sessions whose end the server has and has not acknowledged."""
        self.arrived: deque[int] = deque()
        self.ready: deque[int] = deque()
        self.ahead = 0
        self.running: dict[int, float] = {}
        """Session -> when its run began."""


class Simulation:
    """One batch on one fleet; `run` gives what was seen."""

    def __init__(self, fleet: Fleet, sessions: int, *, seed: int = 0) -> None:
        self.fleet = fleet
        self.seen = Seen()
        self._random = random.Random(seed)  # noqa: S311 - a simulation
        self._queue = deque(range(sessions))
        self._sessions = sessions
        self._nodes = [_Node() for _ in range(fleet.nodes)]
        self._ahead = max(2, math.ceil(fleet.slots / 2))
        self._capacity = self._ahead + fleet.slots + 2 * self._ahead
        self._events: list[tuple[float, int, str, int, int, int]] = []
        self._order = count()
        self._now = 0.0
        self._server_free = 0.0
        self._slots_busy = 0.0
        self._server_steady = 0.0
        self._done: set[int] = set()
        self._running = 0

    # ---- time

    def _at(self, delay_s: float, what: str, node: int, session: int = -1) -> None:
        epoch = self._nodes[node].epoch
        event = (self._now + delay_s, next(self._order), what, node, session, epoch)
        heapq.heappush(self._events, event)

    def run(self) -> Seen:
        """Play the batch to its end."""
        for index in range(self.fleet.nodes):
            self._next_death(index)
        self._hand_out(range(self.fleet.nodes))
        while len(self._done) < self._sessions:
            at, _, what, index, session, epoch = heapq.heappop(self._events)
            self._look(at)
            self._now = at
            # What the server has stays with it, whatever becomes of the node.
            if what == "ended" or epoch == self._nodes[index].epoch:
                getattr(self, f"_on_{what}")(index, session)
        seen, fleet = self.seen, self.fleet
        seen.ended, seen.took_s = len(self._done), self._now
        seen.slot_use = self._slots_busy / (fleet.nodes * fleet.slots * seen.steady_s or 1.0)
        seen.server_use = self._server_steady / (seen.steady_s or 1.0)
        return seen

    def _look(self, until: float) -> None:
        """Count what is busy from now `until` the next event."""
        if self._queue and self._now > self.fleet.mean_s:
            self.seen.steady_s += until - self._now
            self._slots_busy += self._running * (until - self._now)
            self._server_steady += max(0.0, min(until, self._server_free) - self._now)

    # ---- a session's way

    def _hand_out(self, nodes: Sequence[int]) -> None:
        """Give sessions to nodes with room, one to each in turn."""
        open_nodes = deque(nodes)
        while open_nodes and self._queue:
            index = open_nodes.popleft()
            node = self._nodes[index]
            if node.alive and len(node.in_hand) + len(node.reported) < self._capacity:
                session = self._queue.popleft()
                node.in_hand.add(session)
                self._at(self.fleet.costs.dispatch_s, "arrived", index, session)
                open_nodes.append(index)

    def _on_arrived(self, index: int, session: int) -> None:
        self._nodes[index].arrived.append(session)
        self._make_ready(index)

    def _make_ready(self, index: int) -> None:
        node = self._nodes[index]
        while node.arrived and node.ahead < self._ahead:
            node.ahead += 1
            mean_s = self.fleet.init_share * self.fleet.mean_s
            delay_s = self._log_normal(mean_s, self.fleet.init_sigma)
            self._at(delay_s, "ready", index, node.arrived.popleft())

    def _on_ready(self, index: int, session: int) -> None:
        self._nodes[index].ready.append(session)
        self._begin(index)

    def _begin(self, index: int) -> None:
        node = self._nodes[index]
        while node.ready and len(node.running) < self.fleet.slots:
            session = node.ready.popleft()
            node.ahead -= 1
            node.running[session] = self._now
            self._running += 1
            delay_s = self._log_normal(self.fleet.mean_s, self.fleet.sigma)
            self._at(delay_s, "ran", index, session)
        self._make_ready(index)

    def _on_ran(self, index: int, session: int) -> None:
        node = self._nodes[index]
        self.seen.useful_s += self._now - node.running.pop(session)
        self._running -= 1
        self._at(self.fleet.post_share * self.fleet.mean_s, "reported", index, session)
        self._begin(index)

    def _on_reported(self, index: int, session: int) -> None:
        """The server hears of an end; it does one thing at a time."""
        node = self._nodes[index]
        node.in_hand.discard(session)
        node.reported.add(session)
        cpu_s = self.fleet.costs.session_cpu_s
        begins = max(self._now, self._server_free)
        self.seen.delays.append(begins - self._now)
        self._server_free = begins + cpu_s
        self._at(self._server_free - self._now, "ended", index, session)

    def _on_ended(self, index: int, session: int) -> None:
        self.seen.made_twice += session in self._done
        self._done.add(session)
        self._nodes[index].reported.discard(session)
        self._hand_out([index])

    # ---- deaths

    def _next_death(self, index: int) -> None:
        if self.fleet.node_mtbf_s < math.inf:
            self._at(self._random.expovariate(1 / self.fleet.node_mtbf_s), "died", index)

    def _on_died(self, index: int, _session: int) -> None:
        node, seen = self._nodes[index], self.seen
        seen.deaths += 1
        seen.wasted_s += sum(self._now - began for began in node.running.values())
        self._running -= len(node.running)
        lost = sorted(node.in_hand)
        seen.lost_runs += len(lost)
        epoch = node.epoch + 1
        self._nodes[index] = fresh = _Node()
        fresh.alive, fresh.epoch = False, epoch
        for session in lost:
            self._at(self.fleet.costs.lost_after_s, "missed", index, session)
        self._at(self.fleet.repair_s, "back", index)

    def _on_missed(self, _index: int, session: int) -> None:
        self._queue.appendleft(session)
        self._hand_out(self._random.sample(range(self.fleet.nodes), self.fleet.nodes))

    def _on_back(self, index: int, _session: int) -> None:
        self._nodes[index].alive = True
        self._next_death(index)
        self._hand_out([index])

    def _log_normal(self, mean_s: float, sigma: float) -> float:
        return self._random.lognormvariate(math.log(mean_s) - sigma * sigma / 2, sigma)


def main() -> None:
    """Print a fleet's slot use, lost work and server load, by how often machines die."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--slots", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=100_000)
    args = parser.parse_args()
    fleet = Fleet(nodes=args.nodes, slots=args.slots)
    print(
        "| mean run, s | a machine dies every | slot use | lost work | runs lost | server | delay |"
    )
    print("|---|---|---|---|---|---|---|")
    for mean_s in (600.0, 300.0, 150.0):
        for hours in (math.inf, 168.0, 24.0, 4.0):
            each = replace(fleet, mean_s=mean_s, node_mtbf_s=hours * HOUR_S)
            seen = Simulation(each, args.sessions).run()
            often = "never" if hours == math.inf else f"{hours:.0f} h"
            shares = f"{seen.slot_use:.1%} | {seen.wasted_share:.2%} | {seen.lost_runs}"
            load = f"{seen.server_use:.0%} | {seen.delay_s(0.5):.2f} / {seen.delay_s(0.99):.1f}"
            print(f"| {mean_s:.0f} | {often} | {shares} | {load} |")


if __name__ == "__main__":
    main()
