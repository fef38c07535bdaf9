"""The lineage of the assistant turns that a request shows: are they ours, and as which ids? Pure.

A turn is a run of assistant messages, divided where the replies of several exchanges meet. It is
recognised by the ids that we issued, else by its content: the digest of its atoms without the
history before them, so a window, a clock in the system prompt or a masked result hides nothing.
A turn without atoms is recognised by its reasoning, else by its place.

`Lineage` finds the origin of a conversation without a delivered turn by the texts that it quotes:
some harnesses mark neither their sub-agents nor a compaction, but a sub-agent's task is an argument
of a call that the policy sampled, and a compacted conversation begins with a sampled summary. Only
whole texts count, so a quotation by chance is no lineage.

An echoed assistant turn that differs from the delivered one is classified by the difference. That
is asked only when the chain has already said that they are not equal, and only under an equal
prompt (or with an id of ours in the turn), so a wrong answer here can merge nothing across prompts.
Harnesses validate arguments before they run a tool, and echo the validated ones: defaults filled
in, unknown keys dropped, `"5"` as 5, `null` for a missing key. `explains` recognises these by the
tool's schema: the call means the same.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final

from bridle.prompting.calls import argument_texts, canonical_json, parsed_object, text_bytes
from bridle.prompting.canonical import Atom, AtomKind, Canonical, Hint, digest
from bridle.prompting.index import Index, Indexed, content_key
from bridle.types import JSON, Message, Role, TextPart, ToolSpec, record


class Drift(StrEnum):
    """Change that a harness made to a delivered turn."""

    WHITESPACE = "whitespace"
    """White space in the text."""
    REWRITTEN_ARGS = "rewritten_args"
    """Malformed arguments of a call were repaired or replaced; same text, same names."""
    NORMALISED_ARGS = "normalised_args"
    """Valid arguments differ by what their schema explains: defaults, types, unknown keys, null."""
    EDITED_ARGS = "edited_args"
    """Valid arguments mean something else."""
    TEXT_DROPPED = "text_dropped"
    """Text beside calls is gone; ids prove every call of the reply."""
    THOUGHT_INLINED = "thought_inlined"
    """Reasoning came back as text between `<think>` tags."""
    REWRITTEN_CALL = "rewritten_call"
    """A call was renamed (an unknown or malformed one turned into an "invalid" tool)."""
    TEXT_APPENDED = "text_appended"
    """It wrote something into the text beside ours."""
    CALLS_AS_TEXT = "calls_as_text"
    """Calls were turned into text."""
    PARTIAL = "partial"
    """Only the beginning of the turn was kept."""
    CHANGED = "changed"
    """Anything else, of a turn that an id proves to be ours."""


EXTENDABLE = frozenset(
    {
        Drift.WHITESPACE,
        Drift.REWRITTEN_ARGS,
        Drift.NORMALISED_ARGS,
        Drift.REWRITTEN_CALL,
        Drift.TEXT_DROPPED,
        Drift.THOUGHT_INLINED,
    }
)
"""Rewritten turns over which extending is right: the policy said its own tokens, the harness's own
words follow. The others show the model something else than it said."""

WEAK = (
    Drift.WHITESPACE,
    Drift.THOUGHT_INLINED,
    Drift.TEXT_APPENDED,
    Drift.CALLS_AS_TEXT,
)
"""Relations that text alone may prove, where no id came back; tried in this order."""


_THOUGHT = re.compile(r"<(think|thinking)>(.*?)</\1>", re.DOTALL)


def drift_of(
    echo: Sequence[Atom],
    answer: Sequence[Atom],
    *,
    tools: Sequence[ToolSpec] = (),
    reasoning: Collection[bytes] = (),
) -> Drift:
    """Return how a turn that the harness sent back differs from the reply that was delivered.

    Args:
        echo: The turn's atoms as they came back (TEXT, CALL).
        answer: The atoms that were delivered; not equal to `echo`.
        tools: The request's tools, whose schemas explain normalised arguments.
        reasoning: Digests of the reply's reasoning.
    """
    if is_beginning(echo, answer):
        return Drift.PARTIAL
    said, shown = _squeezed(answer), _squeezed(echo)
    called, recalled = _calls(answer), _calls(echo)
    same_calls = [call.digest for call in called] == [call.digest for call in recalled]
    if len(called) == len(recalled):
        if said == shown:
            return Drift.WHITESPACE if same_calls else _calls_drift(called, recalled, tools)
        if not shown and all(
            o.ids and o.ids == e.ids for o, e in zip(called, recalled, strict=True)
        ):
            changed = None if same_calls else _calls_drift(called, recalled, tools)
            return Drift.TEXT_DROPPED if changed in {None, *EXTENDABLE} else Drift.EDITED_ARGS
        if same_calls and _is_inlined(echo, said, reasoning):
            return Drift.THOUGHT_INLINED
    if said in shown and called and not recalled:
        return Drift.CALLS_AS_TEXT
    return Drift.TEXT_APPENDED if said and said in shown and same_calls else Drift.CHANGED


def _calls_drift(
    called: Sequence[Atom], recalled: Sequence[Atom], tools: Sequence[ToolSpec]
) -> Drift:
    """Classify the difference of equally many calls; the first difference in meaning decides."""
    if [call.text for call in called] != [call.text for call in recalled]:
        return Drift.REWRITTEN_CALL
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    found = Drift.NORMALISED_ARGS
    for ours, theirs in zip(called, recalled, strict=True):
        if ours.digest == theirs.digest:
            continue
        if ours.arguments is None or theirs.arguments is None:
            return Drift.EDITED_ARGS
        if (sampled := parsed_object(ours.arguments)) is None:
            found = Drift.REWRITTEN_ARGS
            continue
        echoed = parsed_object(theirs.arguments)
        schema = schemas.get(ours.text or "", {})
        if echoed is None or not explains(schema, sampled, echoed):
            return Drift.EDITED_ARGS
    return found


def _is_inlined(echo: Sequence[Atom], said: str, reasoning: Collection[bytes]) -> bool:
    """Return whether the echo's text is the answer's with its own reasoning between tags."""
    text = "".join(atom.text or "" for atom in echo if atom.kind is AtomKind.TEXT)
    thoughts = [found[2].strip() for found in _THOUGHT.finditer(text)]
    if not thoughts or "".join(_THOUGHT.sub("", text).split()) != said:
        return False
    return all(
        digest("reasoning", text_bytes(thought.strip())) in reasoning for thought in thoughts
    )


def is_beginning(echo: Sequence[Atom], answer: Sequence[Atom]) -> bool:
    """Return whether the returned turn `echo` is a part of the reply `answer` from its beginning.

    Its last text may be cut.
    """
    if not echo or len(echo) > len(answer):
        return False
    *whole, last = echo
    if [atom.digest for atom in whole] != [atom.digest for atom in answer[: len(whole)]]:
        return False
    other = answer[len(whole)]
    if last.digest == other.digest:
        return len(echo) < len(answer)
    texts = last.kind is AtomKind.TEXT and other.kind is AtomKind.TEXT
    return texts and (other.text or "").startswith(last.text or "")


def has_text(answer: Sequence[Atom]) -> bool:
    """Return whether a reply has text by which it can be recognised when it comes back."""
    return any(atom.kind is AtomKind.TEXT for atom in answer)


def _calls(atoms: Sequence[Atom]) -> list[Atom]:
    return [atom for atom in atoms if atom.kind is AtomKind.CALL]


def _squeezed(atoms: Sequence[Atom]) -> str:
    """Return all text without white space."""
    texts = (atom.text or "" for atom in atoms if atom.kind is AtomKind.TEXT)
    return "".join("".join(texts).split())


MAX_DEPTH: Final = 50
"""Deeper values are compared as they are."""


def explains(schema: JSON, sampled: Any, echoed: Any) -> bool:  # noqa: ANN401 - any JSON values
    """Return whether a client that validates `sampled` arguments by `schema` may send back
    `echoed`.
    """
    return _Comparison(schema).explains(schema, sampled, echoed, 0)


class _Comparison:
    """One comparison; each pair of values is compared once, and tried once by each schema.

    Values and schemas are known by their `id`: all of them live as long as the comparison.
    """

    def __init__(self, root: JSON) -> None:
        self._root = root
        self._equal: dict[tuple[int, int], bool] = {}
        self._explained: dict[tuple[int, int, int], bool] = {}

    def explains(self, schema: object, sampled: Any, echoed: Any, depth: int) -> bool:  # noqa: ANN401 - any JSON values
        pair = id(sampled), id(echoed)
        if pair not in self._equal:
            self._equal[pair] = canonical_json(sampled) == canonical_json(echoed)
        if self._equal[pair]:
            return True
        found = _resolved(self._root, schema)
        if found is None or depth > MAX_DEPTH:
            return False
        key = id(found), *pair
        if key not in self._explained:
            self._explained[key] = False  # while a schema that refers to itself is tried
            self._explained[key] = self._tried(found, sampled, echoed, depth)
        return self._explained[key]

    def _tried(self, schema: JSON, sampled: Any, echoed: Any, depth: int) -> bool:  # noqa: ANN401 - any JSON values
        choices = [one for key in ("anyOf", "oneOf") for one in _listed(schema, key)]
        if any(self.explains(one, sampled, echoed, depth + 1) for one in choices):
            return True
        if isinstance(sampled, dict) and isinstance(echoed, dict):
            return self._same_object(schema, sampled, echoed, depth)
        if isinstance(sampled, list) and isinstance(echoed, list):
            pairs = zip(sampled, echoed, strict=False)
            items = schema.get("items")
            same = (self.explains(items, one, other, depth + 1) for one, other in pairs)
            return len(sampled) == len(echoed) and all(same)
        return _is_scalar(sampled) and _is_scalar(echoed) and _coerced(sampled) == _coerced(echoed)

    def _same_object(self, schema: JSON, sampled: JSON, echoed: JSON, depth: int) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return False
        required = _listed(schema, "required")
        for key in sampled.keys() | echoed.keys():
            declared = _resolved(self._root, properties.get(key))
            if key not in echoed:  # dropped
                if declared is not None and not _is_missing(declared, sampled[key]):
                    return False
            elif key not in sampled:  # filled
                if declared is None or (key in required and not _is_missing(declared, echoed[key])):
                    return False
            elif not self.explains(declared, sampled[key], echoed[key], depth + 1):
                return False
        return True


def _listed(schema: JSON, key: str) -> list[Any]:
    """Return the list under a key; empty where something else stands there."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _is_missing(declared: JSON, value: object) -> bool:
    """Return whether a key with this value has the meaning of its absence."""
    if value is None:
        return True
    return "default" in declared and canonical_json(declared["default"]) == canonical_json(value)


def _resolved(root: JSON, schema: object) -> JSON | None:
    """Return the schema behind a reference within `root`; `None` = there is none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").strip("/").split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return None


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def _coerced(value: str | float | bool) -> object:  # noqa: FBT001 - a JSON value
    """Return a scalar as a validator may read it."""
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, bool) or text in ("true", "false"):
        return ("flag", text in (True, "true"))
    try:
        return ("number", float(text))
    except (OverflowError, ValueError):
        return ("value", value)


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

    def with_one_more(self) -> TurnCounts:
        """Return the counts of assistant turns with one more verbatim turn."""
        return TurnCounts(
            *(self.verbatim + 1, self.rerendered, self.foreign, self.given, self.tokens_rerendered)
        )

    def as_json(self) -> JSON:
        return {
            "verbatim": self.verbatim,
            "rerendered": self.rerendered,
            "foreign": self.foreign,
            "given": self.given,
            "tokens_rerendered": self.tokens_rerendered,
        }

    @classmethod
    def of_json(cls, kept: JSON | None) -> TurnCounts | None:
        """Return the counts of assistant turns from a captured exchange's JSON; `None` where it has
        none.
        """
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
    """Return how many assistant turns of a request are verbatim, re-rendered, foreign or given.

    A request that extends another gives its parent's counts as `before` and the index of its
    `first` message after the parent's reply: only turns from there on are looked at, and the
    parent's own is verbatim. Turns that no ids of an ancestor hold are rendered from text.
    `rewritten` is the exchange whose reply the placement found in the last turn, though it was
    changed.
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
    """Record the assistant turns of a stored root that the policy did not sample as given by the
    harness.
    """
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


_POSITION = attrgetter("position")


class _Run:
    """A run of assistant messages."""

    def __init__(self, index: Index, canonical: Canonical, start: int, end: int) -> None:
        self._index = index
        self._canonical = canonical
        self._first = bisect_left(canonical.message_of, start)
        self._end = bisect_left(canonical.message_of, end)
        low = bisect_left(canonical.hints, start, key=attrgetter("message"))
        high = bisect_left(canonical.hints, end, key=attrgetter("message"))
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
        low = bisect_left(self._hints, start, key=_POSITION)
        beside = self._hints[low : bisect_left(self._hints, stop, key=_POSITION)]
        atoms: Sequence[Atom | Hint] = (*beside, *self._canonical.atoms[start:stop])
        for one in reversed(atoms):
            for value in reversed(one.ids):
                if (owner := self._index.owner_of(value)) is not None:
                    return owner
        return None


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
        """Record a reply, given as its assistant messages; `summary` says whether it is a
        summary.
        """
        for message in messages:
            for call in message.tool_calls:
                self._asked.update(map(_key, argument_texts(call.arguments)))
        if summary and (text := "".join(message.text for message in messages).strip()):
            parts = tuple(found[1] for found in _INSIDE.findall(text))
            self._summaries.append((exchange_id, (text, *parts)))

    def is_spawned(self, messages: Sequence[Message]) -> bool:
        """Return whether a user's text is an argument of an earlier tool call: a sub-agent's
        instruction.
        """
        if not self._asked:
            return False
        return any(
            part.text.strip() and _key(part.text) in self._asked
            for message in messages
            if message.role is Role.USER
            for part in message.content
            if isinstance(part, TextPart)
        )

    def summarised_by(self, messages: Sequence[Message]) -> str | None:
        """Return the newest exchange whose summary is contained in a message; `None` = there is
        none.

        Harnesses put the summary into a user's or an assistant's message.
        """
        texts = [message.text for message in messages] if self._summaries else []
        for exchange_id, parts in reversed(self._summaries):
            if any(part in text for part in parts for text in texts):
                return exchange_id
        return None


def _key(text: str) -> bytes:
    return sha256(text_bytes(text.strip())).digest()[:16]
