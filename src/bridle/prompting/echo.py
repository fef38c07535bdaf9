"""How an echoed assistant turn differs from what was delivered. Pure.

Asked only when the chain has already said that they are not equal, and only under an equal prompt
(or with an id of ours in the turn), so a wrong answer here can merge nothing across prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from bridle.prompting.canonical import Atom, AtomKind


class Drift(StrEnum):
    """What a harness did to a turn of ours."""

    WHITESPACE = "whitespace"
    """White space in the text."""
    REWRITTEN_ARGS = "rewritten_args"
    """Arguments of a call; same text, same names."""
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


EXTENDABLE = frozenset({Drift.WHITESPACE, Drift.REWRITTEN_ARGS, Drift.REWRITTEN_CALL})
"""Rewritten turns over which extending is right: the policy said its own tokens, the harness's own
words follow. The others show the model something else than it said."""

WEAK = (Drift.WHITESPACE, Drift.TEXT_APPENDED, Drift.CALLS_AS_TEXT)
"""What text alone may prove, where no id came back; tried in this order."""


def drift_of(echo: Sequence[Atom], answer: Sequence[Atom]) -> Drift:
    """The kind of difference between an echoed turn and the delivered answer.

    Args:
        echo: The turn's atoms as they came back (TEXT, CALL).
        answer: The atoms that were delivered; not equal to `echo`.
    """
    if is_beginning(echo, answer):
        return Drift.PARTIAL
    said, told = _squeezed(answer), _squeezed(echo)
    called, recalled = _calls(answer), _calls(echo)
    same_calls = [call.digest for call in called] == [call.digest for call in recalled]
    if said == told and len(called) == len(recalled):
        if same_calls:
            return Drift.WHITESPACE
        same_names = [call.text for call in called] == [call.text for call in recalled]
        return Drift.REWRITTEN_ARGS if same_names else Drift.REWRITTEN_CALL
    if said in told and called and not recalled:
        return Drift.CALLS_AS_TEXT
    return Drift.TEXT_APPENDED if said and said in told and same_calls else Drift.CHANGED


def is_beginning(echo: Sequence[Atom], answer: Sequence[Atom]) -> bool:
    """Whether `echo` is a proper beginning of `answer`; its last text may end in the middle."""
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
    """Whether the answer says anything that its echo can be known by."""
    return any(atom.kind is AtomKind.TEXT for atom in answer)


def _calls(atoms: Sequence[Atom]) -> list[Atom]:
    return [atom for atom in atoms if atom.kind is AtomKind.CALL]


def _squeezed(atoms: Sequence[Atom]) -> str:
    """All text without white space."""
    texts = (atom.text or "" for atom in atoms if atom.kind is AtomKind.TEXT)
    return "".join("".join(texts).split())
