"""The conversation: a session's exchanges as a forest over exact tokens.

An exchange is a node; its parent is the exchange whose ids its prompt extends. Each node owns only
the ids that are new with it: the suffix of its prompt and its output. What a path spells is put
together once per trace (`first_ids`, `pieces`), never kept per node, so a forest costs what its new
tokens cost (law 9).

Token identity (law 1) is checked here and nowhere else: the digest of each prompt is computed from
the ids that lead to it, with one running sha256 per path, and compared with the digest of what the
engine was given. An exchange that fails a check is left out by name and the rest is still built:

- `lost`: its prompt cannot be put together (unknown parent, cycle, parent lost...);
- `ExchangeNode.sound` is false: it can, but it is not what the engine was given.

The order in which exchanges are given does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bridle.capture.records import Exchange, no_ids
from bridle.types import Ids, first_difference

if TYPE_CHECKING:
    from hashlib import _Hash


SHOWN = 16
"""Ids of each side that a break shows."""


@dataclass(frozen=True, slots=True, order=True)
class Break:
    """A place where something that should continue does not."""

    exchange: str
    position: int
    """First differing token position, or 0 where the position is not known."""
    reason: str
    """A root reason of capture (`tools_changed`...), or one of the checks of `grow`."""
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = field(default=None, compare=False)
    """Ids from the position on, as they stood and as they came; `None` = they are not known."""


@dataclass(slots=True, eq=False)
class ExchangeNode:
    """One exchange in the forest."""

    exchange: Exchange
    parent: ExchangeNode | None
    """Nearest ancestor of whose own ids (suffix or output) the prompt keeps some; `None` = root."""
    kept: int
    """Number of ids of (parent's prompt + output) that the prompt begins with; 0 at a root."""
    path_digest: bytes
    """sha256 of the ids from the root to the end of this output."""
    sound: bool
    """True if the prompt is what the engine was given."""
    prompt_length: int
    """Ids from the root to the start of this output."""
    suffix: Ids
    """Ids of the prompt after the `kept` ones: the exchange's own, or what `stats.join` left."""
    children: list[ExchangeNode] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of ids from the root to the end of this exchange's output."""
        return self.prompt_length + len(self.exchange.output_ids)

    @property
    def is_leaf(self) -> bool:
        """Return whether no child's prompt contains all ids up to the end of this exchange's
        output.
        """
        return all(child.kept < self.length for child in self.children)

    def sampled(self, take: int) -> int:
        """Return how many of the first `take` ids from the root are this exchange's own output."""
        return max(0, take - self.prompt_length)


class Piece(NamedTuple):
    """A run of ids that one exchange brought, on a path."""

    node: ExchangeNode
    is_output: bool
    ids: Ids
    """The suffix or the output, or its beginning."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A session's forest."""

    nodes: dict[str, ExchangeNode]
    """By exchange id; parents before children, else by start time and id."""
    lost: tuple[tuple[Exchange, str], ...]
    """Exchanges without a place, with the name of the check that they failed."""
    breaks: tuple[Break, ...]
    """Findings of the checks, and places where conversations were not extended, by time."""

    @property
    def roots(self) -> Iterator[ExchangeNode]:
        """Yield the nodes without a parent."""
        return (node for node in self.nodes.values() if node.parent is None)


def order_of(exchange: Exchange) -> tuple[float, str]:
    """Return the sort key that orders exchanges by the time they began."""
    return exchange.started_at, exchange.exchange_id


def by_time(node: ExchangeNode) -> tuple[float, str]:
    """Return the sort key that orders nodes by the time their exchanges began."""
    return order_of(node.exchange)


def grow(session_id: str, exchanges: Iterable[Exchange]) -> Graph:
    """Build the forest of a session: each exchange below the one whose tokens its prompt extends.

    Any order of `exchanges` gives the same forest.
    """
    grower = _Grower()
    unique = grower.admit(session_id, exchanges)
    for exchange in _parents_first(unique, grower.lose):
        grower.place(exchange)
    grower.note_forks(unique)
    grower.note_gaps(unique)
    lost = sorted(grower.lost, key=lambda item: (order_of(item[0]), item[1]))
    breaks = tuple(found for _, found in sorted(grower.breaks))
    return Graph(grower.nodes, tuple(lost), breaks)


def pieces(node: ExchangeNode, take: int) -> list[Piece]:
    """Return the first `take` ids from the root to a node, in runs that one exchange
    brought each.
    """
    found: list[Piece] = []
    at: ExchangeNode | None = node
    while at is not None and take > 0:
        exchange = at.exchange
        if (sampled := at.sampled(take)) > 0:
            output = exchange.output_ids
            found.append(Piece(at, is_output=True, ids=output[:sampled]))
            take = at.prompt_length
        own = take - at.kept
        if own > 0:
            suffix = at.suffix
            found.append(Piece(at, is_output=False, ids=suffix[:own]))
            take = at.kept
        at = at.parent
    return found[::-1]


def first_ids(node: ExchangeNode, take: int) -> Ids:
    """Return the first `take` ids of the path from the root to a node, shape (take,), int32."""
    runs = [piece.ids for piece in pieces(node, take)]
    return np.concatenate(runs) if runs else no_ids()


def _content(exchange: Exchange) -> tuple[object, ...]:
    """Return the sort key of exchanges that share an id and a time."""
    return exchange.index, exchange.prompt_digest, exchange.output_ids.tobytes()


def _parents_first(
    unique: dict[str, Exchange], lose: Callable[[Exchange, str], None]
) -> Iterator[Exchange]:
    """Yield exchanges in an order in which parents come first; what has no such place goes to
    `lose`.
    """
    waiting: dict[str, list[Exchange]] = {}
    ready: list[Exchange] = []
    for exchange in unique.values():
        if exchange.kept <= 0:
            ready.append(exchange)
        elif exchange.parent_id is None:
            lose(exchange, "no_parent")
        elif exchange.parent_id not in unique:
            lose(exchange, "unknown_parent")
        else:
            waiting.setdefault(exchange.parent_id, []).append(exchange)
    while ready:
        following: list[Exchange] = []
        for exchange in ready:
            yield exchange
            following += waiting.pop(exchange.exchange_id, [])
        ready = following
    for children in waiting.values():
        for exchange in children:
            lose(exchange, "cycle" if _in_cycle(exchange, unique) else "parent_lost")


def _in_cycle(exchange: Exchange, unique: dict[str, Exchange]) -> bool:
    """Return whether following the parents of `exchange` leads back to it."""
    seen = {exchange.exchange_id}
    at = exchange
    while at.parent_id is not None and (above := unique.get(at.parent_id)) is not None:
        if above is exchange:
            return True
        if above.exchange_id in seen:
            return False
        seen.add(above.exchange_id)
        at = above
    return False


class _Grower:
    """The state of `grow`: running hashes by exchange id, which no finished graph needs."""

    def __init__(self) -> None:
        self.nodes: dict[str, ExchangeNode] = {}
        self.lost: list[tuple[Exchange, str]] = []
        self.breaks: list[tuple[tuple[float, str], Break]] = []
        """Each with the place in time of its exchange."""
        self._hashes: dict[str, tuple[_Hash, _Hash]] = {}
        """After the prompt, after the output."""

    def note(
        self,
        exchange: Exchange,
        reason: str,
        position: int = 0,
        around: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        found = Break(exchange.exchange_id, position, reason, around)
        self.breaks.append((order_of(exchange), found))

    def lose(self, exchange: Exchange, reason: str) -> None:
        self.lost.append((exchange, reason))
        self.note(exchange, reason)

    def admit(self, session_id: str, exchanges: Iterable[Exchange]) -> dict[str, Exchange]:
        """Return the session's exchanges by id, each id once, in the order of `order_of`."""
        unique: dict[str, Exchange] = {}
        given = [*exchanges]
        if len({exchange.exchange_id for exchange in given}) < len(given):
            given.sort(key=_content)
        given.sort(key=order_of)
        for exchange in given:
            if exchange.session_id != session_id:
                self.lose(exchange, "foreign_session")
            elif exchange.exchange_id in unique:
                self.lose(exchange, "duplicate")
            else:
                unique[exchange.exchange_id] = exchange
        return unique

    def place(self, exchange: Exchange) -> None:
        """Give an exchange its node, its parent having been tried before."""
        parent, kept = None, exchange.kept
        if kept > 0:
            parent = self.nodes.get(exchange.parent_id or "")
            if parent is None:
                self.lose(exchange, "parent_lost")
                return
            if kept > (length := parent.length):
                self.lose(exchange, "kept_beyond_parent")
                return
            if kept < length:
                self.note(exchange, exchange.root_reason or "parent_kept_in_part", kept)
        elif exchange.parent_id is not None and exchange.prompt_length > 0:
            self.note(exchange, "nothing_kept")
        state = self._hash_of(parent, kept)
        state.update(_bytes(exchange.suffix_ids))
        sound = state.digest() == exchange.prompt_digest or exchange.prompt_length == 0
        if not sound:
            self.note(exchange, "digest_mismatch")
        end = state.copy()
        end.update(_bytes(exchange.output_ids))
        self._hashes[exchange.exchange_id] = state, end
        while parent is not None and kept <= parent.kept:
            parent = parent.parent
        length, suffix = exchange.prompt_length, exchange.suffix_ids
        node = ExchangeNode(exchange, parent, kept, end.digest(), sound, length, suffix)
        if parent is not None:
            parent.children.append(node)
        self.nodes[exchange.exchange_id] = node

    def _hash_of(self, parent: ExchangeNode | None, kept: int) -> _Hash:
        """Return a running sha256 over the first `kept` ids of the parent's path."""
        if parent is None:
            return hashlib.sha256()
        after_prompt, after_output = self._hashes[parent.exchange.exchange_id]
        if kept == parent.length:
            return after_output.copy()
        if kept == parent.exchange.prompt_length:
            return after_prompt.copy()
        return hashlib.sha256(_bytes(first_ids(parent, kept)))

    def note_forks(self, unique: dict[str, Exchange]) -> None:
        """Note where the messages continued but the ids could not.

        An exchange whose engine used another prompt than ours says itself where they part.
        """
        for exchange in unique.values():
            before = exchange.continues
            old, new = self.nodes.get(before or ""), self.nodes.get(exchange.exchange_id)
            if found := exchange.extra.get("break"):
                around = (
                    None if old is None or new is None else _around(old, new, found["position"])
                )
                self.note(exchange, found["reason"], found["position"], around)
                continue
            if before is None or exchange.parent_id is not None:
                continue
            reason = exchange.root_reason or "forked"
            if before not in unique:
                self.note(exchange, "unknown_continues")
            elif old is not None and new is not None:
                prompt = first_ids(new, exchange.prompt_length)
                position = first_difference(first_ids(old, old.length), prompt)
                self.note(exchange, reason, position, _around(old, new, position))
            else:
                self.note(exchange, reason)

    def note_gaps(self, unique: dict[str, Exchange]) -> None:
        """Note where commit numbers are missing: an exchange was committed and is not here."""
        by_index = sorted(unique.values(), key=lambda e: (e.index, e.exchange_id))
        expected = 0
        for exchange in by_index:
            if exchange.index > expected:
                self.note(exchange, "missing_exchange")
            expected = exchange.index + 1


def _around(
    old: ExchangeNode, new: ExchangeNode, position: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return up to `SHOWN` ids of both from where they part."""
    end = position + SHOWN
    one, two = first_ids(old, min(old.length, end)), first_ids(new, min(new.prompt_length, end))
    return tuple(one[position:].tolist()), tuple(two[position:].tolist())


_LITTLE = np.dtype("<i4")


def _bytes(array: Ids) -> memoryview:
    """Return the ids in the form that digests are taken of."""
    if array.dtype == _LITTLE and array.flags.c_contiguous:
        return array.data
    return np.ascontiguousarray(array, dtype=_LITTLE).data
