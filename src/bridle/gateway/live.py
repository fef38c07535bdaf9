"""A reply on its way: what of it may be shown already, and how far each client has got.

Pieces are kept until the reply is delivered, so a client that joins late gets all of them, and one
that reads slowly gets many as one: what waits for it is never more than the reply itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace

from bridle.dialects.base import StreamEncoder
from bridle.engines.base import GenerateChunk, Prompt, TextDelta
from bridle.prompting.reply import LiveReader, ReplyDelta
from bridle.types import FinishReason, Reply, ToolCall


@dataclass(frozen=True, slots=True)
class Mark:
    """Position in a reply: characters of reasoning, characters of text, calls."""

    reasoning: int = 0
    text: int = 0
    calls: int = 0

    def within(self, reply: Reply) -> Reply:
        """Return the beginning of `reply` up to this mark."""
        return Reply(
            content=reply.content[: self.text],
            reasoning=(reply.reasoning or "")[: self.reasoning] or None,
            tool_calls=reply.tool_calls[: self.calls],
            finish_reason=FinishReason.ABORT,
        )

    def __str__(self) -> str:
        return f"{self.reasoning} of reasoning, {self.text} of text, {self.calls} calls"

    @classmethod
    def read(cls, text: str) -> Mark | None:
        """Return a mark from its text; `None` = the text is no mark."""
        numbers = [int(word) for word in text.split() if word.isdigit()]
        mark = cls(*numbers) if len(numbers) == 3 else None
        return mark if mark is not None and str(mark) == text else None


class LiveReply:
    """One reply while it is sampled.

    `reader` reads the ids; `None` = only an engine that parses by itself can say what they mean.
    Without `reasoning`, no reasoning leaves.
    """

    def __init__(
        self, reader: LiveReader | None, prompt: Prompt, *, reasoning: bool = True
    ) -> None:
        self._reader = reader
        self._shows_reasoning = reasoning
        self._prompt = prompt
        self._by_engine = False
        self._held = False
        """True if nothing more is known before the end."""
        self._reasoning, self._text = io.StringIO(), io.StringIO()
        self._calls: list[ToolCall] = []
        self._end = Mark()
        self.sent = Mark()
        """The most that was written to one client."""
        self.partly_sent = False
        """True if any client was written a part of the reply."""
        self.followers: set[Callable[[], None]] = set()
        """Called when there is more, or the call has ended; they only schedule what they do."""

    @property
    def is_live(self) -> bool:
        """Return whether pieces of the reply can be sent before its end."""
        return self._reader is not None or self._by_engine

    @property
    def call_ids(self) -> list[str]:
        """Ids of the tool calls of which a part may have been sent."""
        return [call.id or "" for call in self._calls]

    def feed(self, chunk: GenerateChunk) -> None:
        """Take a chunk of sampled tokens."""
        reported = chunk.prompt_ids_json
        if reported is not None and reported != self._prompt.json():
            self._held = True  # sampled under another prompt, which may read otherwise
        if chunk.delta is not None and (self._by_engine or self._end == Mark()):
            self._by_engine = True
            self._add(self._parsed(chunk.delta))
        elif self._by_engine or self._reader is None:
            self._held |= bool(len(chunk.output_ids))
        elif not self._held:
            self._add(self._reader.feed(chunk.output_ids.tolist()))

    def _parsed(self, delta: TextDelta) -> ReplyDelta:
        """Return the engine's own parse; reasoning after text would be out of order."""
        self._held |= bool(delta.reasoning and self._end.text)
        return ReplyDelta() if self._held else ReplyDelta(delta.reasoning, delta.text)

    def _add(self, piece: ReplyDelta) -> None:
        if not self._shows_reasoning:
            piece = replace(piece, reasoning="")
        if not piece:
            return
        reasoning, text, calls = self._end.reasoning, self._end.text, self._end.calls
        if piece.reasoning:
            reasoning += self._reasoning.write(piece.reasoning)
        if piece.text:
            text += self._text.write(piece.text)
        if piece.calls:
            self._calls += piece.calls
            calls += len(piece.calls)
        self._end = Mark(reasoning, text, calls)
        for follower in self.followers:
            follower()

    def wake(self) -> None:
        """Wake all connections that stream this reply."""
        for follower in self.followers:
            follower()

    def after(self, mark: Mark, encoder: StreamEncoder) -> tuple[bytes, Mark]:
        """Return the stream events of the part of the reply behind `mark`, and the mark at
        its end.
        """
        end, events = self._end, b""
        if encoder.calls_at_end and end.calls != mark.calls:
            end = Mark(end.reasoning, end.text, mark.calls)
        if end.reasoning > mark.reasoning:
            events = encoder.reasoning(_from(self._reasoning, mark.reasoning))
        if end.text > mark.text:
            events += encoder.text(_from(self._text, mark.text))
        for index, call in enumerate(self._calls[mark.calls : end.calls], mark.calls):
            events += encoder.tool_call(index, call.id or "", call.name, call.arguments)
        return events, end

    def note(self, mark: Mark) -> None:
        """Record that the reply up to `mark` was written to a client."""
        self.partly_sent = True
        if (mark.calls, mark.text, mark.reasoning) > (
            self.sent.calls,
            self.sent.text,
            self.sent.reasoning,
        ):
            self.sent = mark

    def delivered(self) -> Reply:
        """Return the part of the reply that was written to the client that received most."""
        whole = Reply(
            self._text.getvalue(),
            self._reasoning.getvalue(),
            tuple(self._calls),
            FinishReason.ABORT,
        )
        return self.sent.within(whole)


def _from(text: io.StringIO, start: int) -> str:
    text.seek(start)
    return text.read()  # and it stands at the end again, where the next piece is written
