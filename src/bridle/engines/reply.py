"""Reads a reply of the ChatML family as it comes: reasoning, content and tool calls, in pieces.

It takes away exactly the line breaks that `bridle.engines.chatml.spell_turn` adds, so what a script
says comes back letter for letter. Text that only looks like a tool call stays content; nothing that
was sampled is dropped but those line breaks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from bridle.engines.chatml import CALL, CALL_END, THINK, THINK_END


@dataclass(slots=True)
class Delta:
    """Parsed text of a chunk. Empty strings add nothing."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and argument JSON of each call that was closed."""

    def __add__(self, other: Delta) -> Delta:
        return Delta(
            self.reasoning + other.reasoning,
            self.content + other.content,
            self.calls + other.calls,
        )


class ReplyReader:
    """Feed text, get deltas; `finish` gives what was held back.

    `tools` says whether tool calls are looked for (an engine parses none where none are offered);
    `thinking` whether the prompt left a thinking block open.
    """

    def __init__(self, *, tools: bool, thinking: bool = False) -> None:
        self._tools = tools
        self._buffer = ""
        self._state = "reasoning" if thinking else "start"
        self._lead = ""
        """The line break before a call that is being read."""
        self._fresh = True
        """Whether nothing of the present part was given out, so line breaks may still belong to
        the marker before it."""

    def feed(self, text: str) -> Delta:
        """The certain part of all text so far."""
        self._buffer += text
        delta = Delta()
        while self._step(delta, last=False):
            pass
        return delta

    def finish(self) -> Delta:
        """The rest, nothing more being expected."""
        delta = Delta()
        while self._step(delta, last=True):
            pass
        return delta

    def _step(self, delta: Delta, *, last: bool) -> bool:
        """Read one part; whether there may be more to read."""
        if self._state == "start":
            return self._start(last=last)
        if self._state == "reasoning":
            return self._reasoning(delta, last=last)
        if self._state == "call":
            return self._call(delta, last=last)
        return self._content(delta, last=last)

    def _start(self, *, last: bool) -> bool:
        lead = self._buffer.lstrip("\n")
        if lead.startswith(THINK):
            self._turn_to("reasoning", lead[len(THINK) :])
            return True
        if not last and THINK.startswith(lead):
            return False
        self._turn_to("content", self._buffer)
        self._fresh = False
        return True

    def _reasoning(self, delta: Delta, *, last: bool) -> bool:
        if self._fresh:
            if not self._buffer and not last:
                return False
            self._buffer = self._buffer.removeprefix("\n")
            self._fresh = False
        before, marker, after = self._buffer.partition(THINK_END)
        if marker:
            delta.reasoning += before.removesuffix("\n")
            self._turn_to("content", after)
            return True
        keep = 0 if last else _held(self._buffer, ("\n" + THINK_END, THINK_END))
        delta.reasoning += self._take(keep)
        return False

    def _content(self, delta: Delta, *, last: bool) -> bool:
        if self._fresh:
            if not last and len(self._buffer) < 2 and not self._buffer.strip("\n"):
                return False
            self._buffer = self._buffer.removeprefix("\n").removeprefix("\n")
            self._fresh = False
        if not self._tools:
            delta.content += self._take(0)
            return False
        before, marker, after = self._buffer.partition(CALL)
        if marker:
            shown = before.removesuffix("\n")
            self._lead = before[len(shown) :]
            delta.content += shown
            self._turn_to("call", after)
            return True
        keep = 0 if last else _held(self._buffer, ("\n" + CALL, CALL))
        delta.content += self._take(keep)
        return False

    def _call(self, delta: Delta, *, last: bool) -> bool:
        inside, marker, after = self._buffer.partition(CALL_END)
        if not marker and not last:
            return False
        call = _read_call(inside) if marker else None
        if call is None:
            delta.content += f"{self._lead}{CALL}{inside}{marker}"
        else:
            delta.calls.append(call)
        self._turn_to("content", after)
        self._fresh = False
        return bool(after)

    def _turn_to(self, state: str, rest: str) -> None:
        self._state, self._buffer, self._fresh = state, rest, True

    def _take(self, keep: int) -> str:
        cut = len(self._buffer) - keep
        given, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return given


def _held(text: str, markers: tuple[str, ...]) -> int:
    """Return how many trailing characters may be the start of a marker."""
    longest = max(len(marker) for marker in markers)
    for count in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


def _read_call(inside: str) -> tuple[str, str] | None:
    try:
        read = json.loads(inside)
    except json.JSONDecodeError:
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return None
    arguments = read.get("arguments", {})
    if isinstance(arguments, str):
        return read["name"], arguments
    return read["name"], json.dumps(arguments, ensure_ascii=False)
