"""Prefix cache of finished calls, looked up by the longest common prefix.

An entry is the ids that a call's cache covered and that cache. A lookup compares the prompt with
every entry; that is four bytes of ids for kilobytes of keys and values, so the budget of bytes
bounds it too. Entries are dropped least recently used first when their bytes exceed the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from bridle.embedded.call import common_prefix

if TYPE_CHECKING:
    from bridle.types import Ids

Cache: TypeAlias = Any
"""What a decoder keeps for a call; only the decoder looks into it."""

SHORTEST = 16
"""Ids; a common beginning shorter than this is not found."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One remembered beginning."""

    ids: Ids
    cache: Cache
    """The decoder's own: covers exactly `ids`."""
    size_bytes: int


class PrefixStore:
    """Remembered beginnings within a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Ids) -> tuple[Entry | None, int]:
        """The entry with the longest common beginning, and how many ids that is (0 = none)."""
        best, matched = None, 0
        for entry in reversed(self._entries):
            common = common_prefix(entry.ids, ids)
            if common >= SHORTEST and common > matched:
                best, matched = entry, common
        if best is not None:
            self._entries.move_to_end(best)
        return best, matched

    def add(self, ids: Ids, cache: Cache, size_bytes: int) -> None:
        """Remember `cache` for `ids`; what doesn't fit the budget at all is not kept.

        An entry that is a beginning of `ids` is dropped: the new one serves for it.
        """
        if size_bytes > self._budget_bytes or len(ids) < SHORTEST:
            return
        shorter, matched = self.find(ids)
        if shorter is not None and matched == len(shorter.ids):
            self.remove(shorter)
        entry = Entry(ids.copy(), cache, size_bytes)
        self._entries[entry] = None
        self.size_bytes += size_bytes
        while self.size_bytes > self._budget_bytes:
            self.remove(next(iter(self._entries)))

    def covers(self, ids: Ids) -> bool:
        """Return whether an entry starts with all of `ids`, so that storing them adds nothing."""
        return len(ids) > 0 and self.find(ids)[1] == len(ids)

    def remove(self, entry: Entry) -> None:
        """Forget one entry; its cache is then the caller's alone."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self.size_bytes -= entry.size_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0
