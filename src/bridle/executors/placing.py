"""Choice of the node for a session: one with the resources it needs, and the most free slots.

Pure: no clock, no network. `Place` is what is known of a node here; a choice costs one look at each
node, and what is given away is counted at once, so sessions that come together spread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bridle.config import AUTO, RuntimeSpec

CPU: Final = "CPU"
MEMORY: Final = "memory"
"""In bytes."""
GPU: Final = "GPU"

_LEAST: Final = 1e-6
"""Amounts that differ by less are equal; sums of floats are not exact."""


def needs_of(runtime: RuntimeSpec) -> dict[str, float]:
    """Return the resources that a session needs beside a slot.

    The name of its runtime counts too (`docker`: 1): it matters where some node offers a resource
    of that name, and says then how many such sandboxes a node takes.
    """
    needs = dict(runtime.resources)
    if runtime.cpus is not None:
        needs[CPU] = runtime.cpus
    if runtime.memory_mb is not None:
        needs[MEMORY] = runtime.memory_mb * 2.0**20
    if runtime.gpus is not None:
        needs[GPU] = float(runtime.gpus)
    if runtime.backend != AUTO:
        needs.setdefault(runtime.backend, 1.0)
    return needs


@dataclass(eq=False, slots=True)
class Place:
    """A node as far as choosing goes."""

    name: str
    """Unique among the nodes."""
    offers: Mapping[str, float] = field(default_factory=dict)
    """How much it has of each resource."""
    node_id: str = ""
    """What results call it; known once it has answered."""
    capacity: int = 0
    """Sessions that it takes in all."""
    open: bool = False
    """Whether it takes new sessions."""
    used: dict[str, float] = field(default_factory=dict)
    """Of each resource, by the sessions that were placed here."""
    placed: int = 0
    """Sessions that were ever placed here."""
    told_free: int = 0
    """Free slots as it told last."""
    told_placed: int = 0
    """How many of ours it had taken in then."""

    @property
    def free(self) -> int:
        """Slots that are free now, as far as is known: what is on its way counts as taken."""
        return max(0, self.told_free - (self.placed - self.told_placed)) if self.open else 0

    def has(self, needs: Mapping[str, float]) -> bool:
        """Return whether the node has these resources when it is empty."""
        return all(self.offers.get(name, 0.0) >= much - _LEAST for name, much in needs.items())

    def fits(self, needs: Mapping[str, float]) -> bool:
        """Return whether the node has these resources free now."""
        return all(
            self.offers.get(name, 0.0) - self.used.get(name, 0.0) >= much - _LEAST
            for name, much in needs.items()
        )

    def take(self, needs: Mapping[str, float]) -> None:
        """A session of these needs is here."""
        for name, much in needs.items():
            self.used[name] = self.used.get(name, 0.0) + much

    def give(self, needs: Mapping[str, float]) -> None:
        for name, much in needs.items():
            self.used[name] = max(0.0, self.used.get(name, 0.0) - much)


def relevant(runtime: RuntimeSpec, offered: Collection[str]) -> dict[str, float]:
    """The needs that count: what a task names itself, GPUs, and what some node offers."""
    named = {GPU, *runtime.resources}
    needs = needs_of(runtime)
    return {name: much for name, much in needs.items() if name in named or name in offered}


def choose(
    needs: Mapping[str, float], avoid: frozenset[str], places: Iterable[Place]
) -> Place | None:
    """The node for a session; `None` = there is none now.

    One of `avoid` (by `node_id`) is taken only where no other node could ever do it. Of those that
    can, the one with the greatest share of free slots.
    """
    able = [place for place in places if place.open and place.has(needs)]
    others = [place for place in able if place.node_id not in avoid]
    ready = [place for place in others or able if place.free > 0 and place.fits(needs)]
    return max(ready, key=lambda place: (place.free / place.capacity, place.name), default=None)
