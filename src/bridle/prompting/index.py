"""The look-up of a session's exchanges by chain keys, issued ids, and content. Pure.

`by_turn`, chain after an answer -> exchanges: the exact parent. `by_prompt`, chain after a request
-> exchanges, those in flight included: repeats, rewritten turns, siblings. `by_id`, every id that
we issued -> exchange: proof of a turn, ties, lineage. `by_content`, digest of an answer's atoms
without the history before them -> exchanges: lineage under another history. An exchange enters all
but `by_prompt` when it commits, with only what a client can have seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from bridle.prompting.canonical import (
    KEPT,
    Atom,
    AtomKind,
    Canonical,
    Hint,
    chain_after,
    digest,
)
from bridle.types import DeliveryState

_URL_SAFE = str.maketrans("-_", "+/")

_CONTENT = digest("bridle-content-1")
"""The first link of the digest of an answer without its history."""


def content_key(atoms: Iterable[Atom]) -> bytes:
    """Return 16 bytes of a hash over atoms alone, whatever history precedes them."""
    return chain_after(_CONTENT, atoms)


@dataclass(slots=True, eq=False)
class Indexed:
    """One exchange, as the indexes know it."""

    exchange_id: str
    order: int
    """Order of begin; after commit, order of commit."""
    prompt_key: bytes
    prompt_atoms: int
    tools_digest: bytes
    committed: bool = False
    answer: tuple[Atom, ...] = ()
    """Its answer's atoms; TEXT, CALL and the like, no EVIDENCE."""
    shown: tuple[Atom, ...] = ()
    """The texts of it that a client can have seen; `by_turn` holds the key after these."""
    joined_key: bytes | None = None
    """The chain's digest after the answer in one piece with what the client began of it; `None` =
    it began nothing."""
    joined_content: bytes | None = None
    """The same without the history."""
    turn_keys: tuple[bytes, ...] = ()
    """Under which `by_turn` has it."""
    content_keys: tuple[bytes, ...] = ()
    """Under which `by_content` has it."""
    tokens: int = 0
    """Sampled tokens of its reply."""
    reasoning: frozenset[bytes] = frozenset()
    template_args: Hashable = None
    state: DeliveryState | None = None
    """`None` = not known yet: its last event has left or is about to."""
    calls: bool = False
    """True if its answer has calls."""
    children: int = 0
    continues: Indexed | None = None

    @property
    def usable(self) -> bool:
        """Return whether the exchange can be a parent of a request that names none of its ids."""
        return self.committed and self.state is not DeliveryState.ABANDONED


class Index:
    """The exchanges of one session by what a later request shows of them."""

    def __init__(self) -> None:
        self._exchanges: dict[str, Indexed] = {}
        self._by_turn: dict[bytes, list[Indexed]] = {}
        self._by_prompt: dict[bytes, list[Indexed]] = {}
        self._by_id: dict[str, Indexed] = {}
        self._by_content: dict[bytes, list[Indexed]] = {}
        self._without_content: list[Indexed] = []
        """Exchanges that `_by_content` does not have yet: a turn as it was delivered needs none."""
        self._continued: dict[bytes, Indexed] = {}
        """The exchange that the last request under this prompt key continues, until it begins."""
        self._beginnings: set[bytes] = set()
        """Digests of the first atoms of answers."""
        self._longest = 0
        """Number of atoms of the longest answer."""
        self._by_reasoning: dict[bytes, list[Indexed]] = {}
        """Answers without atoms."""
        self._newest: deque[Canonical] = deque(maxlen=KEPT)
        """The last requests."""
        self._clock = 0
        self.given: set[bytes] = set()
        """Contents of turns of nobody here that were shown before there was a reply."""
        self.replied = False
        """True if any reply is or was there for a harness to show."""

    def begin(
        self, exchange_id: str, canonical: Canonical, *, continues: str | None = None
    ) -> None:
        """Record an exchange in progress; its parent has one child more until it is forgotten.

        `continues` names the parent of one that is read from the store instead of placed.
        """
        prompt_key = canonical.chain[-1]
        parent = self._continued.pop(prompt_key, None)
        if continues is not None:
            parent = self._exchanges.get(continues)
        if parent is not None:
            parent.children += 1
        self._clock += 1
        exchange = Indexed(
            exchange_id=exchange_id,
            order=self._clock,
            prompt_key=prompt_key,
            prompt_atoms=len(canonical.atoms),
            tools_digest=canonical.tools_digest,
            continues=parent,
        )
        self._exchanges[exchange_id] = exchange
        self._newest.append(canonical)
        _put_in(self._by_prompt, prompt_key, exchange)

    def commit(
        self,
        exchange_id: str,
        canonical: Canonical,
        answer: Sequence[Atom],
        issued: Iterable[str],
        *,
        joined: Sequence[Atom] = (),
        template_args: Hashable = None,
        tokens: int = 0,
    ) -> None:
        """Record an exchange with the atoms of its reply (`answer`) and the ids that were issued in
        it.

        `joined` are the atoms of the reply joined with a beginning that the client gave it,
        `tokens` how many were sampled.
        """
        if exchange_id not in self._exchanges:
            self.begin(exchange_id, canonical)
        exchange = self._exchanges[exchange_id]
        self._clock += 1
        exchange.order = self._clock
        exchange.committed = True
        exchange.template_args = template_args
        exchange.answer, exchange.reasoning, exchange.calls = (), frozenset(), False
        for atom in answer:
            if atom.kind is AtomKind.EVIDENCE:
                exchange.reasoning |= {atom.reasoning} if atom.reasoning else set()
            else:
                exchange.answer += (atom,)
                exchange.calls |= atom.kind is AtomKind.CALL
        exchange.joined_key = chain_after(canonical.chain[-2], joined) if joined else None
        exchange.joined_content = content_key(joined) if joined else None
        exchange.tokens = tokens
        self.replied = True
        if joined:
            self._longest = max(self._longest, len(joined))
            self._beginnings.add(joined[0].digest)
        for key in () if exchange.answer else exchange.reasoning:
            self._by_reasoning.setdefault(key, []).append(exchange)
        self._index_turn(exchange, exchange.answer)
        for value in issued:
            self._by_id[id_key(value)] = exchange

    def forget(self, exchange_id: str) -> None:
        """Remove an exchange in progress that failed: nothing was captured of it."""
        exchange = self._exchanges.pop(exchange_id, None)
        if exchange is not None:
            if exchange.continues is not None:
                exchange.continues.children -= 1
            _take_out(self._by_prompt, exchange.prompt_key, exchange)
            self._index_turn(exchange, ())

    def mark(
        self, exchange_id: str, state: DeliveryState, *, delivered: Sequence[Atom] | None = None
    ) -> None:
        """Record whether a reply was delivered.

        `delivered` are the atoms that were written before the connection was lost, where that is
        known: only they can come back, so only they are indexed. Unknown exchanges are ignored.
        """
        exchange = self._exchanges.get(exchange_id)
        if exchange is None or not exchange.committed:
            return
        exchange.state = state
        if state is DeliveryState.DELIVERED:
            others: list[Indexed] = []
            for key in exchange.turn_keys:
                others += self._by_turn[key][1:]
            # One that is alone need not go behind the others: the newest is found by its `order`.
            if others or exchange.shown is not exchange.answer:
                self._index_turn(exchange, exchange.answer)
        elif delivered is not None:
            seen = tuple(atom for atom in delivered if atom.kind is not AtomKind.EVIDENCE)
            self._index_turn(exchange, seen)

    def _index_turn(self, exchange: Indexed, shown: tuple[Atom, ...]) -> None:
        """Put the exchange under the keys of the atoms that can come back."""
        for key in exchange.turn_keys:
            _take_out(self._by_turn, key, exchange)
        for key in exchange.content_keys:
            _take_out(self._by_content, key, exchange)
        exchange.shown, exchange.content_keys = shown, ()
        self._without_content += (exchange,)
        if shown[self._longest :]:
            self._longest = len(shown)
        exchange.turn_keys = (chain_after(exchange.prompt_key, shown),) if shown else ()
        if exchange.joined_key is not None and shown and shown == exchange.answer:
            exchange.turn_keys += (exchange.joined_key,)
        for key in exchange.turn_keys:
            _put_in(self._by_turn, key, exchange)

    def _index_contents(self) -> None:
        """Put the exchanges that wait for it under the contents of their answers."""
        waiting, self._without_content = dict.fromkeys(self._without_content), []
        for exchange in waiting:
            shown = exchange.shown
            if exchange.answer:
                self._beginnings.add(exchange.answer[0].digest)
            exchange.content_keys = (content_key(shown),) if shown else ()
            if exchange.joined_content is not None and shown and shown == exchange.answer:
                exchange.content_keys += (exchange.joined_content,)
            for key in exchange.content_keys:
                _put_in(self._by_content, key, exchange)

    # ---- looking up

    def turns_at(self, key: bytes) -> list[Indexed]:
        """Return the exchanges whose request with its reply has this hash chain."""
        return self._by_turn.get(key, [])

    def prompts_at(self, key: bytes) -> list[Indexed]:
        """Return the exchanges, those in progress included, whose request has this hash chain;
        oldest first.
        """
        return self._by_prompt.get(key, [])

    def asked(self, exchange: Indexed) -> Canonical | None:
        """Return the request of a recent exchange; `None` = it is too old to be remembered."""
        keys = (one for one in self._newest if one.chain[-1] == exchange.prompt_key)
        return next(keys, None)

    def known(self, exchange_id: str) -> Indexed | None:
        """Return the exchange of this id; `None` = there is none."""
        return self._exchanges.get(exchange_id)

    def longest_said(self, atoms: Sequence[Atom]) -> tuple[int, Indexed | None]:
        """Return the longest beginning of `atoms` that is a whole reply of this session: its
        length, and the newest exchange that gave it.

        (0, `None`) = there is none.
        """
        length, owner = 0, None
        self._index_contents()
        if not atoms or atoms[0].digest not in self._beginnings:
            return length, owner
        key = _CONTENT
        for count, atom in enumerate(atoms[: self._longest], start=1):
            key = chain_after(key, (atom,))
            if found := [one for one in self._by_content.get(key, ()) if one.usable]:
                length, owner = count, max(found, key=lambda one: one.order)
        return length, owner

    def silent_at(self, key: bytes, hints: Sequence[Hint]) -> Indexed | None:
        """Return the exchange of a turn without atoms (no text, no call) at the point `key` of a
        chain.

        `hints` are the ids and reasoning in the turn: an id that the gateway issued decides, else
        its reasoning, under any history. Without either, the point decides.
        """
        ids = [value for hint in reversed(hints) for value in reversed(hint.ids)]
        for value in ids:
            if (owner := self.owner_of(value)) is not None:
                return owner
        here = [e for e in self.prompts_at(key) if e.usable and not e.answer]
        thoughts = [hint.reasoning for hint in hints if hint.reasoning]
        found = [e for thought in thoughts for e in self._by_reasoning.get(thought, ())]
        found = here if not ids and not thoughts else [e for e in found if e.usable]
        return max(found, key=lambda e: (e in here, e.order), default=None)

    def owner_of(self, value: str) -> Indexed | None:
        """Return the exchange in which the gateway issued an id."""
        return self._by_id.get(id_key(value))


def id_key(value: str) -> str:
    """Return the form of an id under which it is looked up: Google's Python clients return base64
    in its URL-safe form.
    """
    return value.translate(_URL_SAFE).rstrip("=")


def _put_in(index: dict[bytes, list[Indexed]], key: bytes, exchange: Indexed) -> None:
    """Add one exchange to an index, as the newest."""
    if key in index:
        index[key] += (exchange,)
    else:
        index[key] = [exchange]


def _take_out(index: dict[bytes, list[Indexed]], key: bytes, exchange: Indexed) -> None:
    """Remove one exchange from an index; its key goes with its last one."""
    left = [other for other in index.get(key, ()) if other is not exchange]
    if left:
        index[key] = left
    else:
        index.pop(key, None)
