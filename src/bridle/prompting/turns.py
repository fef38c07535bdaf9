"""The lineage of the assistant turns that a request shows: are they ours, and as which ids? Pure.

A turn is a run of assistant messages, divided where the replies of several exchanges meet. It is
recognised by the ids that we issued, else by its content: the digest of its atoms without the
history before them, so a window, a clock in the system prompt or a masked result hides nothing.
A turn without atoms is recognised by its reasoning, else by its place.

`Lineage` finds the origin of a conversation without a delivered turn by the texts that it quotes:
some harnesses mark neither their sub-agents nor a compaction, but a sub-agent's task is an argument
of a call that the policy sampled, and a compacted conversation begins with a sampled summary. Only
whole texts count, so a quotation by chance is no lineage.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from bridle.prompting.arguments import argument_texts, text_bytes
from bridle.prompting.canonical import Atom, Canonical, Hint
from bridle.prompting.index import Index, Indexed, content_key
from bridle.types import JSON, Message, Role, TextPart, record

LONGEST_MATCH = 256
"""Atoms of one reply beyond which a turn is recognised by ids only."""


@record()
class TurnCounts:
    """The counts of the assistant turns that one request shows."""

    verbatim: int = 0
    """Turns whose sampled ids stand in the prompt."""
    rerendered: int = 0
    """Turns of ours that stand there as other ids."""
    foreign: int = 0
    """Turns that nobody sampled here."""
    given: int = 0
    """Turns that stood in a request before the session had any reply; not among `foreign`."""
    tokens_rerendered: int = 0
    """Sampled tokens of the re-rendered turns."""

    @property
    def ours(self) -> int:
        """Turns that we sampled."""
        return self.verbatim + self.rerendered

    def as_json(self) -> JSON:
        """Return the counts as capture keeps them."""
        return {
            "verbatim": self.verbatim,
            "rerendered": self.rerendered,
            "foreign": self.foreign,
            "given": self.given,
            "tokens_rerendered": self.tokens_rerendered,
        }

    @classmethod
    def of_json(cls, kept: JSON | None) -> TurnCounts | None:
        """Return the counts of a captured exchange; `None` where it has none."""
        return None if kept is None else cls(**kept)


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One assistant turn of a request."""

    owner: Indexed | None
    """The exchange that sampled it; `None` = none of the session."""
    content: bytes
    """Digest of its atoms."""


def count_turns(
    index: Index,
    messages: Sequence[Message],
    canonical: Canonical,
    *,
    first: int = 0,
    before: TurnCounts | None = None,
    rewritten: str | None = None,
) -> TurnCounts:
    """Return the counts of a request.

    An extension gives its parent's counts as `before` and the index of its `first` message
    after the parent's reply: only turns from there on are looked at, and the parent's own is
    verbatim. Turns that no ids of an ancestor hold are rendered from text. `rewritten` is the
    exchange whose reply the placement found in the last turn, though it was changed.
    """
    if before is None:
        first, before, verbatim = 0, TurnCounts(), 0
    else:
        verbatim = before.verbatim + 1
    rerendered = foreign = given = tokens = 0
    turns: list[ShownTurn] = []
    for message in messages[first:]:
        if message.role is Role.ASSISTANT:
            turns += turns_of(index, messages, canonical, first)
            break
    if turns and turns[-1].owner is None and rewritten is not None:
        turns[-1] = replace(turns[-1], owner=index.known(rewritten))
    for turn in turns:
        if turn.owner is not None:
            rerendered += 1
            tokens += turn.owner.tokens
        elif _is_given(index, turn.content):
            given += 1
        else:
            foreign += 1
    return TurnCounts(
        verbatim=verbatim,
        rerendered=before.rerendered + rerendered,
        foreign=before.foreign + foreign,
        given=before.given + given,
        tokens_rerendered=before.tokens_rerendered + tokens,
    )


def note_given(index: Index, messages: Sequence[Message], canonical: Canonical) -> None:
    """Have the turns of a stored root that nobody sampled count as given."""
    turns = turns_of(index, messages, canonical)
    index.given.update(turn.content for turn in turns if turn.owner is None)


def _is_given(index: Index, content: bytes) -> bool:
    if not index.replied:
        index.given.add(content)
    return content in index.given


def turns_of(
    index: Index, messages: Sequence[Message], canonical: Canonical, first: int = 0
) -> Iterator[ShownTurn]:
    """Yield the assistant turns from message `first` on, in order."""
    at = first
    while at < len(messages):
        if messages[at].role is not Role.ASSISTANT:
            at += 1
            continue
        start = at
        while at < len(messages) and messages[at].role is Role.ASSISTANT:
            at += 1
        yield from _Run(index, canonical, start, at).turns()


class _Run:
    """A run of assistant messages."""

    def __init__(self, index: Index, canonical: Canonical, start: int, end: int) -> None:
        self._index = index
        self._canonical = canonical
        self._first = bisect_left(canonical.message_of, start)
        self._end = bisect_left(canonical.message_of, end)
        low = bisect_left(canonical.hints, start, key=_message)
        high = bisect_left(canonical.hints, end, key=_message)
        self._hints = canonical.hints[low:high]

    def turns(self) -> Iterator[ShownTurn]:
        if self._first == self._end:
            key = self._canonical.chain[self._first]
            yield ShownTurn(self._index.silent_at(key, self._hints), content_key(()))
            return
        at = self._first
        while at < self._end:
            owner, stop = self._said(at)
            if owner is None:
                owner, stop = self._proved(at)
            yield ShownTurn(owner, content_key(self._canonical.atoms[at:stop]))
            at = stop

    def _said(self, at: int) -> tuple[Indexed | None, int]:
        """Return the exchange whose whole answer stands at `at`, and where it ends; the longest
        one.
        """
        atoms = self._canonical.atoms[at : min(self._end, at + LONGEST_MATCH)]
        length, owner = self._index.longest_said(atoms)
        if owner is None:
            return None, at
        proved = self._owner(at, at + length)
        return proved or owner, at + length

    def _proved(self, at: int) -> tuple[Indexed | None, int]:
        """Return the exchange whose ids stand from `at` on, and where another turn begins."""
        owner = self._owner(at, at + 1)
        stop = at + 1
        while stop < self._end and self._said(stop)[0] is None:
            found = self._owner(stop, stop + 1)
            if found is not None and owner is not None and found is not owner:
                break
            owner = owner or found
            stop += 1
        return owner, stop

    def _owner(self, start: int, stop: int) -> Indexed | None:
        """Return the exchange of the last id of ours at these atoms and beside them."""
        low = bisect_left(self._hints, start, key=_position)
        beside = self._hints[low : bisect_left(self._hints, stop, key=_position)]
        atoms: Sequence[Atom | Hint] = (*beside, *self._canonical.atoms[start:stop])
        for one in reversed(atoms):
            for value in reversed(one.ids):
                if (owner := self._index.owner_of(value)) is not None:
                    return owner
        return None


def _message(hint: Hint) -> int:
    return hint.message


def _position(hint: Hint) -> int:
    return hint.position


_INSIDE = re.compile(r"<(summary|state_snapshot)>\s*(.+?)\s*</\1>", re.DOTALL)
"""Parts that harnesses extract from a summary."""


class Lineage:
    """Instructions and summaries in one session's replies."""

    def __init__(self) -> None:
        self._asked: set[bytes] = set()
        """Digests of the texts among the arguments of calls."""
        self._summaries: list[tuple[str, tuple[str, ...]]] = []
        """Exchange -> the texts by which its summary is known; oldest first."""

    def note(self, exchange_id: str, messages: Sequence[Message], *, summary: bool) -> None:
        """Remember a reply, given as its assistant messages; `summary` = it is one."""
        for message in messages:
            for call in message.tool_calls:
                self._asked.update(map(_key, argument_texts(call.arguments)))
        if summary and (text := "".join(message.text for message in messages).strip()):
            parts = tuple(found[1] for found in _INSIDE.findall(text))
            self._summaries.append((exchange_id, (text, *parts)))

    def is_spawned(self, messages: Sequence[Message]) -> bool:
        """Return whether a user's text is a sampled call's argument: a sub-agent's instruction."""
        if not self._asked:
            return False
        texts = (text for text in _user_texts(messages) if text.strip())
        return any(_key(text) in self._asked for text in texts)

    def summarised_by(self, messages: Sequence[Message]) -> str | None:
        """Return the newest exchange whose summary some text holds; `None` = there is none.

        Harnesses let the user tell it, or the model.
        """
        texts = [message.text for message in messages] if self._summaries else []
        for exchange_id, parts in reversed(self._summaries):
            if any(part in text for part in parts for text in texts):
                return exchange_id
        return None


def _user_texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if message.role is Role.USER:
            yield from (part.text for part in message.content if isinstance(part, TextPart))


def _key(text: str) -> bytes:
    return sha256(text_bytes(text.strip())).digest()[:16]
