"""The conversation tree of one session: which exchange does a request continue? Pure.

`index` holds what exchanges are found by. The chain says that the history is unchanged, an id says
which turn it is; only both together, or the chain alone where no id contradicts it, make a child.
Extending the parent's ids is a second decision with its own guards. The specification, tested on
recorded traffic of 15 harnesses, is the project's matching document; its cases' names are used.

`habit_of` names the way in which a harness changed its history where a request does not extend one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Literal

from bridle.prompting.canonical import (
    ASSISTANT,
    NO_TOOLS,
    Atom,
    AtomKind,
    Canonical,
    Hint,
)
from bridle.prompting.index import Index, Indexed
from bridle.prompting.turns import (
    EXTENDABLE,
    WEAK,
    Drift,
    drift_of,
    has_text,
    is_beginning,
    turns_of,
)
from bridle.types import DeliveryState, ModelRequest, Role, record

_ID_IN_TEXT = re.compile(r"[A-Za-z0-9_-]{16,}")
"""Pattern of ids of ours inside text; looked up, so a wrong guess costs nothing."""


class PlacementKind(StrEnum):
    """Relation of a request to the exchanges before it."""

    ROOT = "root"
    """It continues nothing of ours."""
    CHILD = "child"
    """It continues an exchange exactly."""
    REWRITTEN = "rewritten"
    """It continues an exchange whose answer the harness changed; `drift` says how."""
    PARTIAL = "partial"
    """It continues an exchange of whose cut answer it kept a part."""
    FORK = "fork"
    """It holds turns of ours, but under another history or beside unknown turns."""


@record()
class Placement:
    """Position of a request in its session's conversation."""

    kind: PlacementKind
    parent: str | None = None
    """The exchange whose messages it continues; `None` at a root."""
    reason: str | None = None
    """Reason why it is not extended, or is no child: `first`, `foreign`, `history_changed`,
    `unknown_turn`, `tools_changed`, `tools_removed`, `template_args_changed`, `parent_abandoned`,
    or a drift that forks; from the gateway `other_model` and `summarised`. `None` = extend it."""
    drift: str | None = None
    """A `Drift`; `None` = the turn came back as it was delivered."""
    extend: bool = False
    """True if the parent's ids may be extended; the renderer may still refuse."""
    new_from: int = 0
    """Index into the request's messages of the first one after the parent's answer."""
    repeats: tuple[str, ...] = ()
    """Exchanges, in flight or committed, with exactly this prompt key; oldest first."""
    habit: str | None = None
    """A `Habit`: what the harness did to the history of a fork; `None` = not known."""
    tie: str | None = None
    """The criterion that decided between equal candidates: `id`, `reasoning`, `delivery`,
    `childless`, `newest`; `None` = there was one."""


@record()
class _Found:
    """Result of the search, before the guards."""

    kind: PlacementKind
    exchange: Indexed | None = None
    reason: str | None = None
    drift: Drift | None = None
    new_from: int = 0
    tie: str | None = None


_RANK: dict[DeliveryState | None, int] = {
    DeliveryState.DELIVERED: 0,
    None: 1,
    DeliveryState.SUPERSEDED: 2,
    DeliveryState.CUT: 3,
    DeliveryState.ABANDONED: 4,
}
"""Delivery states by how likely the reply was read."""


class Conversation(Index):
    """The exchanges of one session and the search among them. Not shared between sessions."""

    def __init__(self, *, on_rewrite: Literal["extend", "fork"] = "extend") -> None:
        super().__init__()
        self._on_rewrite = on_rewrite
        """Treatment of a turn that the harness rewrote within `EXTENDABLE`."""

    def place(
        self, request: ModelRequest, canonical: Canonical, *, template_args: Hashable = None
    ) -> Placement:
        """Find the exchange that a request continues, and whether its token ids may be extended.

        `template_args` are what shapes the prompt besides messages and tools; a parent's must equal
        them.
        """
        found = self._plainly(request, canonical)
        found = found or _Search(self, request, canonical).run()
        key, reason = canonical.chain[-1], found.reason
        if found.exchange is None:
            self._continued.pop(key, None)
        else:
            self._continued[key] = found.exchange
            if found.drift is not None and self._on_rewrite == "fork":
                reason = reason or found.drift.value
            if reason is None or reason == "unknown_turn":
                if found.exchange.tools_digest != canonical.tools_digest:
                    without = canonical.tools_digest == NO_TOOLS
                    reason = "tools_removed" if without else "tools_changed"
                elif found.exchange.template_args != template_args:
                    reason = "template_args_changed"
        before, alike = None, self._by_prompt.get(key, ())
        if found.exchange is not None and found.reason == "history_changed":
            before = self.asked(found.exchange)
        return Placement(
            kind=found.kind,
            habit=None if before is None else habit_of(before, canonical).value,
            parent=None if found.exchange is None else found.exchange.exchange_id,
            reason=reason,
            drift=None if found.drift is None else found.drift.value,
            extend=found.exchange is not None and reason in {None, "unknown_turn"},
            new_from=found.new_from,
            repeats=tuple([exchange.exchange_id for exchange in alike]) if alike else (),
            tie=found.tie,
        )

    def _plainly(self, request: ModelRequest, canonical: Canonical) -> _Found | None:
        """Return the turn that comes last, if it is one delivered reply as it was; `None` = search.

        What `_Search` finds, too, where nothing else can be meant.
        """
        atoms = canonical.atoms
        last = len(atoms) - 1
        while last >= 0 and atoms[last].kind not in ASSISTANT:
            last -= 1
        found = self._by_turn.get(canonical.chain[last + 1])
        if last < 0 or not found or found[1:]:
            return None
        chosen = found[0]
        if chosen.state is not DeliveryState.DELIVERED or chosen.shown is not chosen.answer:
            return None
        new_from = canonical.message_of[last] + 1
        for message in request.messages[new_from:]:
            if message.role is Role.ASSISTANT:
                return None
        if chosen.calls or canonical.hints:
            first = last + 1 - len(chosen.shown)
            ids = [value for atom in atoms[first : last + 1] for value in atom.ids]
            for hint in reversed(canonical.hints):
                if hint.position < first:
                    break
                ids += hint.ids
            if any(self.owner_of(value) is not chosen for value in ids):
                return None
        return _Found(PlacementKind.CHILD, chosen, new_from=new_from)


class _Search:
    """One search: the last turn exactly, else by its ids, else by its text, else what is before."""

    def __init__(self, index: Index, request: ModelRequest, canonical: Canonical) -> None:
        self._index = index
        self._tools = request.tools
        self._messages = request.messages
        self._canonical = canonical
        self._atoms = canonical.atoms
        self._chain = canonical.chain
        self._message_of = canonical.message_of
        self._hints = canonical.hints

    def run(self) -> _Found:
        last = self._last_assistant(len(self._atoms))
        silent = self._silent_turn(last)
        if silent is not None:
            return silent
        if last < 0:
            return self._by_content() or _Found(PlacementKind.ROOT, reason="first")
        return self._exact(last) or self._changed(last)

    # ---- the last turn came back as it was delivered

    def _exact(self, last: int) -> _Found | None:
        """Return the last turn's exchange by the chain; `None` = no such, or an id contradicts."""
        candidates = self._index.turns_at(self._chain[last + 1])
        if not candidates:
            return None
        chosen, tie = self._decide(candidates, last)
        if chosen is None:
            if tie == "id":
                return None
            abandoned = candidates[-1]
            return self._found(PlacementKind.FORK, abandoned, last, reason="parent_abandoned")
        shown, answer = chosen.shown, chosen.answer
        if shown is answer or [a.digest for a in shown] == [a.digest for a in answer]:
            return self._found(PlacementKind.CHILD, chosen, last, tie=tie)
        return self._found(
            PlacementKind.PARTIAL, chosen, last, reason=Drift.PARTIAL.value, drift=Drift.PARTIAL
        )

    def _decide(
        self, candidates: Sequence[Indexed], last: int
    ) -> tuple[Indexed | None, str | None]:
        """Return one of several exchanges with one visible form, and what decided.

        (`None`, "id") = the turn's id belongs to none of them; (`None`, `None`) = all abandoned.
        """
        first = last + 1 - max([len(exchange.shown) for exchange in candidates])
        owner = self._owner(max(first, 0), last)
        if owner is not None:
            known = owner in candidates
            return (owner if known else None), ("id" if len(candidates) > 1 or not known else None)
        left = [exchange for exchange in candidates if exchange.usable]
        if len(left) <= 1:
            return (left[0] if left else None), None
        thoughts = {h.reasoning for h in self._hints if first <= h.position <= last and h.reasoning}
        best = min(_RANK[exchange.state] for exchange in left)
        tie = None
        for name, kept in (
            ("reasoning", [e for e in left if e.reasoning & thoughts]),
            ("delivery", [e for e in left if _RANK[e.state] == best]),
            ("childless", [e for e in left if not e.children]),
            ("newest", [max(left, key=lambda exchange: exchange.order)]),
        ):
            if len(left) == 1:
                break
            narrowed = [exchange for exchange in left if exchange in kept]
            if narrowed and len(narrowed) < len(left):
                left, tie = narrowed, name
        return left[0], tie

    def _silent_turn(self, last: int) -> _Found | None:
        """Return a turn without atoms after the last visible one, by its ids, reasoning, or
        place.
        """
        start = self._message_of[last] + 1 if last >= 0 else 0
        for message in range(len(self._messages) - 1, start - 1, -1):
            if self._messages[message].role is not Role.ASSISTANT:
                continue
            position = bisect_left(self._message_of, message)
            hints = [hint for hint in self._hints if hint.position == position]
            owner = self._index.silent_at(self._chain[position], hints)
            if owner is None or owner.answer or owner.prompt_key != self._chain[position]:
                return None
            return _Found(PlacementKind.CHILD, owner, new_from=self._after(message))
        return None

    # ---- it did not

    def _changed(self, last: int) -> _Found:
        """Place a turn that was not sampled like that, or not under this history."""
        start = self._run_start(last)
        before, end, tie = self._before(last)
        owner = self._owner(start, last)
        if owner is not None and (before is not owner or end < start):
            if self._same_prompt(owner, start, last):
                return self._rewritten(owner, owner.prompt_atoms, last)
            return self._found(PlacementKind.FORK, owner, last, reason="history_changed")
        if owner is None:
            found = self._by_text(start, last)
            if found is not None:
                return found
        if before is not None:
            return self._found(PlacementKind.FORK, before, end, reason="unknown_turn", tie=tie)
        owner = self._owner(0, start - 1)
        if owner is not None:  # the harness spoke last for the model, but not in all turns
            return self._found(PlacementKind.FORK, owner, last, reason="history_changed")
        return self._by_content() or _Found(PlacementKind.ROOT, reason="foreign")

    def _by_content(self) -> _Found | None:
        """Return the last turn of ours that stands under another history.

        `None` = no turn is ours.
        """
        turns = turns_of(self._index, self._messages, self._canonical)
        owners = [turn.owner for turn in turns if turn.owner is not None]
        if not owners:
            return None
        reason = "history_changed"
        return _Found(PlacementKind.FORK, owners[-1], reason, new_from=len(self._messages))

    def _before(self, last: int) -> tuple[Indexed | None, int, str | None]:
        """Return the latest earlier turn that the chain knows, the index of its last atom,
        its tie.
        """
        index = self._last_assistant(last)
        while index >= 0:
            candidates = self._index.turns_at(self._chain[index + 1])
            if candidates:
                chosen, tie = self._decide(candidates, index)
                if chosen is not None and len(chosen.shown) == len(chosen.answer):
                    return chosen, index, tie
            index = self._last_assistant(index)
        return None, -1, None

    def _same_prompt(self, owner: Indexed, start: int, last: int) -> bool:
        """Return whether the turn begins within the run, under exactly the prompt of `owner`."""
        begins = owner.prompt_atoms
        return start <= begins <= last and self._chain[begins] == owner.prompt_key

    def _rewritten(self, owner: Indexed, begins: int, last: int) -> _Found:
        """Return a turn that is `owner`'s under an equal prompt, and how it was changed."""
        echo = self._atoms[begins : last + 1]
        if [atom.digest for atom in echo] == [atom.digest for atom in owner.answer]:
            return self._found(PlacementKind.CHILD, owner, last)
        drift = self._drift(echo, owner)
        kind = PlacementKind.PARTIAL if drift is Drift.PARTIAL else PlacementKind.REWRITTEN
        reason = None if drift in EXTENDABLE else drift.value
        return self._found(kind, owner, last, reason=reason, drift=drift)

    def _by_text(self, start: int, last: int) -> _Found | None:
        """Find the turn by an id inside the text, a cut turn's beginning, or the text itself."""
        echo = self._atoms[start : last + 1]
        texts = [atom.text or "" for atom in echo if atom.kind is AtomKind.TEXT]
        for value in (found for text in texts for found in _ID_IN_TEXT.findall(text)):
            owner = self._index.owner_of(value)
            if owner is not None and self._same_prompt(owner, start, last):
                return self._rewritten(owner, owner.prompt_atoms, last)
        candidates = [e for e in self._index.prompts_at(self._chain[start]) if e.usable]
        candidates.sort(key=lambda e: (_RANK[e.state], e.children > 0, -e.order))
        for exchange in candidates:
            if exchange.state in {DeliveryState.CUT, None} and is_beginning(echo, exchange.answer):
                return self._rewritten(exchange, start, last)
        drifts = [
            self._drift(echo, e) if has_text(e.answer) or not e.answer else None for e in candidates
        ]
        for weak in WEAK:
            if weak in drifts:
                return self._rewritten(candidates[drifts.index(weak)], start, last)
        return None

    def _drift(self, echo: Sequence[Atom], exchange: Indexed) -> Drift:
        return drift_of(echo, exchange.answer, tools=self._tools, reasoning=exchange.reasoning)

    # ---- along the atoms

    def _last_assistant(self, end: int) -> int:
        """Return the index of the last assistant atom before `end`; -1 = none."""
        for index in range(end - 1, -1, -1):
            if self._atoms[index].kind in ASSISTANT:
                return index
        return -1

    def _run_start(self, last: int) -> int:
        while last and self._atoms[last - 1].kind in ASSISTANT:
            last -= 1
        return last

    def _owner(self, first: int, last: int) -> Indexed | None:
        """Return the exchange of the last id of ours among these atoms and the evidence beside
        them.
        """
        for value in self._ids_backwards(first, last):
            owner = self._index.owner_of(value)
            if owner is not None:
                return owner
        return None

    def _ids_backwards(self, first: int, last: int) -> Iterator[str]:
        hints: list[Hint] = [h for h in self._hints if first <= h.position <= last]
        for index in range(last, first - 1, -1):
            yield from reversed(self._atoms[index].ids)
            while hints and hints[-1].position == index:
                yield from reversed(hints.pop().ids)

    def _after(self, message: int) -> int:
        """Return the first message after this one that is not a silent rest of the same turn."""
        index = message + 1
        while (
            index < len(self._messages)
            and self._messages[index].role is Role.ASSISTANT
            and index not in self._message_of
        ):
            index += 1
        return index

    def _found(
        self,
        kind: PlacementKind,
        exchange: Indexed,
        last: int,
        *,
        reason: str | None = None,
        drift: Drift | None = None,
        tie: str | None = None,
    ) -> _Found:
        new_from = self._after(self._message_of[last])
        return _Found(kind, exchange, reason, drift, new_from, tie)


class Habit(StrEnum):
    """A way to change a history."""

    SYSTEM = "system_changed"
    """The system prompt is another one: a clock, a counter, a list of files."""
    WINDOW = "window"
    """Messages that stood there are gone; what follows them is kept."""
    MASKED = "masked"
    """Results or user messages were replaced where they stand."""
    SUMMARY = "summary"
    """Fewer messages, the first of a user, stand in place of older ones."""
    OTHER = "other"
    """Anything else: an edit."""


_MASKABLE = frozenset({AtomKind.RESULT, AtomKind.USER})


def habit_of(before: Canonical, after: Canonical) -> Habit:
    """Return how the harness changed the request `before` to `after`, which does not begin
    with it.
    """
    old_head, old = _parted(before.atoms)
    new_head, new = _parted(after.atoms)
    if old_head != new_head:
        return Habit.SYSTEM
    same = 0
    while same < min(len(old), len(new)) and old[same].digest == new[same].digest:
        same += 1
    left, right = old[same:], new[same:]
    first = right[0].digest if right else None
    for at in range(1, len(left)):
        if left[at].digest != first:
            continue
        pairs = [*zip(left[at:], right, strict=False)]
        if len(pairs) == len(left) - at and all(one.digest == two.digest for one, two in pairs):
            return Habit.WINDOW
    pairs = [*zip(left, right, strict=False)]
    changed = [(one, two) for one, two in pairs if one.digest != two.digest]
    in_place = all(one.kind is two.kind and one.kind in _MASKABLE for one, two in changed)
    if changed and in_place and len(right) >= len(left):
        return Habit.MASKED
    if right and right[0].kind is AtomKind.USER and len(right) < len(left):
        return Habit.SUMMARY
    return Habit.OTHER


def _parted(atoms: Sequence[Atom]) -> tuple[list[bytes], Sequence[Atom]]:
    """Return the system's texts at the beginning, and the rest."""
    head = [atom.digest for atom in takewhile(lambda one: one.kind is AtomKind.SYSTEM, atoms)]
    return head, atoms[len(head) :]
