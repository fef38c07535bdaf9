"""A reply read while it is sampled: what may be shown already, because no later token can undo it.

The whole reply is parsed at its end, by `parse_reply`; what is given out here is always a beginning
of what that will say. So whatever may still change its meaning waits: bytes of a character that is
not complete, white space at the end of a part, the beginning of a stop string or of a spelled-out
marker, and everything behind a token that stands where this reader does not expect it. Calls are
given out one by one, when the token that closes them has been sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from bridle.prompting.family import ReplyMarks
from bridle.prompting.tokenizer import PromptTokenizer
from bridle.types import ToolCall

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

CHARACTER_MOST = 4
"""Most tokens of one character: one for each byte."""

INCOMPLETE_MOST = 64
"""Number of tokens that may wait for a character; then the rest of the reply waits for its end."""


@dataclass(slots=True)
class ReplyDelta:
    """Part of a reply that became certain: reasoning, then text, then calls. May be empty."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class _Part(Enum):
    START = auto()
    """Nothing but white space so far."""
    REASONING = auto()
    TEXT = auto()
    CALLS = auto()
    HELD = auto()
    """The rest is known at the end."""


class LiveReader:
    """Feed the ids of one reply in any pieces, get what may be shown.

    Args:
        marks: The family's tokens.
        tokenizer: Decodes.
        thinking: Whether the prompt left reasoning open.
        stop_ids: Ids that end a turn.
        stops: Stop strings; they and what follows is not shown.
        read_calls: The calls of ids that begin with an opener, the later with all earlier ones.
    """

    def __init__(
        self,
        marks: ReplyMarks,
        tokenizer: PromptTokenizer,
        *,
        thinking: bool,
        stop_ids: frozenset[int],
        stops: Sequence[str],
        read_calls: Callable[[list[int]], list[ToolCall]],
    ) -> None:
        self._marks = marks
        self._part = _Part.REASONING if thinking else _Part.START
        self._stop_ids = stop_ids
        self._held = (*stops, *marks.held)
        self._held_starts = frozenset(held[:1] for held in self._held)
        self._read_calls = read_calls
        self._marks_part = frozenset(tokenizer.control_ids) | stop_ids
        self._text = _Decoder(tokenizer)
        self._buffer = ""
        """Decoded, but not certain yet."""
        self._fresh = True
        """True if nothing of this part was given out."""
        self._region: list[int] = []
        """Ids from the first opener on."""
        self.calls: list[ToolCall] = []
        """The calls that were given out."""

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Return the part of the reply that becomes certain with `ids`."""
        piece = ReplyDelta()
        if self._part is not _Part.CALLS and self._marks_part.isdisjoint(ids):
            self._plain([*ids], piece)
            return piece
        run: list[int] = []
        for id_ in ids:
            if self._part is _Part.HELD:
                break
            if self._part is _Part.CALLS:
                self._call(id_, piece)
            elif id_ in self._marks_part:
                self._plain(run, piece)
                run = []
                self._marker(id_, piece)
            else:
                run.append(id_)
        self._plain(run, piece)
        return piece

    def _plain(self, run: list[int], piece: ReplyDelta) -> None:
        """Ordinary ids of the present part."""
        if not run or self._part is _Part.HELD:
            return
        self._take(self._text.push(run), piece)
        if self._text.stuck:
            self._part = _Part.HELD

    def _take(self, text: str, piece: ReplyDelta) -> None:
        self._buffer += text
        if self._fresh:
            self._buffer = self._buffer.lstrip()
        if self._part is _Part.START and self._buffer:
            self._part = _Part.TEXT
        if "" not in self._held_starts and self._held_starts.isdisjoint(self._buffer):
            self._give(len(self._buffer), piece)
            return
        found = [at for held in self._held if (at := self._buffer.find(held)) >= 0]
        if found:
            self._give(min(found), piece)
            self._part = _Part.HELD
        else:
            self._give(len(self._buffer) - marker_prefix_length(self._buffer, self._held), piece)

    def _give(self, most: int, piece: ReplyDelta) -> None:
        """Give out at most so many characters, and no white space at the end."""
        shown = self._buffer[:most].rstrip()
        if not shown:
            return
        self._buffer = self._buffer[len(shown) :]
        self._fresh = False
        if self._part is _Part.REASONING:
            piece.reasoning += shown
        else:
            piece.text += shown

    def _end_part(self, piece: ReplyDelta) -> None:
        """End the part: all of it is certain but white space at its end."""
        self._take(self._text.rest(), piece)
        if not self._is_held():
            self._give(len(self._buffer), piece)
            self._buffer, self._fresh = "", True

    def _is_held(self) -> bool:
        return self._part is _Part.HELD

    def _marker(self, id_: int, piece: ReplyDelta) -> None:
        """Handle a control token outside of calls."""
        if self._is_held():
            return
        marks = self._marks
        if id_ in marks.openers and self._part is not _Part.REASONING:
            self._end_part(piece)
            if not self._is_held():
                self._part = _Part.CALLS
                self._call(id_, piece)
        elif id_ == marks.think_end and self._part is _Part.REASONING:
            self._end_part(piece)
            if not self._is_held():
                self._part = _Part.START
                self._marks = ReplyMarks(None, None, marks.openers, marks.closers, marks.held)
        elif id_ == marks.think and self._part is _Part.START and marks.think_end is not None:
            before = self._buffer + self._text.rest()
            self._buffer = ""
            self._part = _Part.HELD if before.strip() else _Part.REASONING
        else:
            self._part = _Part.HELD

    def _call(self, id_: int, piece: ReplyDelta) -> None:
        """Handle one more id behind an opener."""
        if id_ in self._stop_ids:
            self._part = _Part.HELD
            return
        self._region.append(id_)
        if id_ in self._marks.closers:
            new = self._read_calls(self._region)[len(self.calls) :]
            self.calls += new
            piece.calls += new


class _Decoder:
    """Text of ids that come in pieces, such that all pieces together are the text of all ids."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """The ids of the last piece, as left context, and those whose text is not given out."""
        self._context = 0
        """Number of them that are context."""
        self._shown = ""
        """Text of the context."""

    @property
    def stuck(self) -> bool:
        """Return whether it waits for a character that does not end."""
        return len(self._ids) - self._context > INCOMPLETE_MOST

    def push(self, ids: list[int]) -> str:
        """Return the text that became certain."""
        self._ids += ids
        for waiting in range(min(CHARACTER_MOST, len(self._ids) - self._context)):
            text = self._tokenizer.decode(self._ids[: len(self._ids) - waiting])
            if not text.endswith(REPLACEMENT):
                return self._advance(text, waiting)
        return ""

    def rest(self) -> str:
        """Return the rest, with an incomplete character replaced, and drop the context."""
        text = self._tokenizer.decode(self._ids)[len(self._shown) :]
        self._ids, self._context, self._shown = [], 0, ""
        return text

    def _advance(self, text: str, waiting: int) -> str:
        """Give out `text` of all ids but the last `waiting`."""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._context :]
        self._context = len(self._ids) - waiting
        self._shown = self._tokenizer.decode(self._ids[: self._context])
        return piece


def marker_prefix_length(text: str, markers: Sequence[str]) -> int:
    """Return how many last characters may be the beginning of a marker."""
    size = first = len(text)
    for marker in markers:
        at = text.find(marker[:1], max(size - len(marker) + 1, 0), first)
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[:1], at + 1, first)
        first = first if at < 0 else at
    return size - first
