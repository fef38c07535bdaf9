"""The ChatML family as Qwen3 writes it: spells turns, reads prompts and replies back.

The scripted engine writes turns with it and finds out from bare ids what a prompt holds; the HTTP
server reads replies with it. Nothing here shapes what the gateway samples under.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bridle.scripted.tokenizer import ChatTokenizer, text_of
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids

START, END = "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT = "<tool_response>"
_TOOLS_HEAD = "# Tools\n\nYou may call one or more functions"
_ROLE_IDS = 24
"""How many ids after a start marker are decoded to see the role and whether a result follows."""


def spell_call(name: str, arguments: JSON | str) -> str:
    """One tool call. A string of arguments stands as it is, so it may be malformed."""
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    quoted = json.dumps(name, ensure_ascii=False)
    return f'{CALL}\n{{"name": {quoted}, "arguments": {given}}}\n{CALL_END}'


def spell_turn(reasoning: str | None, content: str, calls: Sequence[str]) -> str:
    """Text of one assistant turn as the model samples it, without its end token."""
    thought = "" if reasoning is None else f"{THINK}\n{reasoning}\n{THINK_END}\n\n"
    visible = ([content] if content else []) + list(calls)
    return thought + "\n".join(visible)


class RequestView(Protocol):
    """View of a request for a script, whatever its wire format."""

    @property
    def system(self) -> str:
        """All system text, without the list of tools."""

    @property
    def users(self) -> Sequence[str]:
        """Text of each user message, tool results left out."""

    @property
    def results(self) -> Sequence[str]:
        """Text of the tool results; several of one turn may be one text."""

    @property
    def assistants(self) -> int:
        """Number of finished assistant messages."""

    @property
    def tools(self) -> Sequence[JSON]:
        """The tools offered, as OpenAI Chat has them."""


@dataclass(frozen=True, slots=True)
class MessagesView:
    """A view of OpenAI Chat messages; see `RequestView`."""

    system: str
    users: Sequence[str]
    results: Sequence[str]
    assistants: int
    tools: Sequence[JSON]


def view_messages(messages: Sequence[JSON], tools: Sequence[JSON] | None) -> MessagesView:
    """Build the view of OpenAI Chat messages and tools."""

    def texts(*roles: str) -> list[str]:
        return [text_of(m.get("content")) for m in messages if m.get("role") in roles]

    return MessagesView(
        system="\n".join(texts("system", "developer")),
        users=texts("user"),
        results=texts("tool"),
        assistants=len(texts("assistant")),
        tools=tools or (),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    role: str
    line: str
    """The role's line as it stands at the block's start; empty for a prompt without markers."""
    start: int
    """Position of the first id after the start marker."""
    end: int
    """Position of the end marker, or the end of the prompt."""
    closed: bool


class PromptView:
    """A view of bare prompt ids; see `RequestView`. Only what a script asks for is decoded.

    Block borders are found in id space (10 us for 16,384 ids), so a message that spells a marker as
    ordinary text cannot forge one.
    """

    def __init__(self, ids: Ids, tokenizer: ChatTokenizer) -> None:
        self._ids = ids
        self._tokenizer = tokenizer

    @functools.cached_property
    def _blocks(self) -> list[_Block]:
        start, end = self._tokenizer.id_of(START), self._tokenizer.id_of(END)
        starts = np.flatnonzero(self._ids == (-1 if start is None else start)).tolist()
        if not starts:
            return [_Block("user", "", 0, len(self._ids), closed=True)]
        ends = np.flatnonzero(self._ids == (-1 if end is None else end))
        blocks = []
        for first, border in zip(starts, [*starts[1:], len(self._ids)], strict=True):
            found = int(np.searchsorted(ends, first))
            closed = found < len(ends) and int(ends[found]) < border
            stop = int(ends[found]) if closed else border
            blocks.append(self._block(first + 1, stop, closed=closed))
        return blocks

    def _block(self, start: int, end: int, *, closed: bool) -> _Block:
        head = self._tokenizer.decode(self._ids[start : min(end, start + _ROLE_IDS)])
        role, _, rest = head.partition("\n")
        result = role == "user" and rest.lstrip("\n").startswith(RESULT)
        return _Block("tool" if result else role, role + "\n", start, end, closed)

    def _text(self, block: _Block) -> str:
        text = self._tokenizer.decode(self._ids[block.start : block.end])
        return text.removeprefix(block.line)

    def _texts(self, role: str) -> tuple[str, ...]:
        return tuple(self._text(block) for block in self._blocks if block.role == role)

    @functools.cached_property
    def _systems(self) -> tuple[str, ...]:
        return self._texts("system")

    @functools.cached_property
    def system(self) -> str:
        """All system text, without the list of tools."""
        return "\n".join(_before_tools(text) for text in self._systems)

    @functools.cached_property
    def users(self) -> Sequence[str]:
        """Text of each user message, tool results left out."""
        return self._texts("user")

    @functools.cached_property
    def results(self) -> Sequence[str]:
        """Text of the tool results; several of one turn are one text, with their markup."""
        return self._texts("tool")

    @functools.cached_property
    def assistants(self) -> int:
        """Number of finished assistant messages."""
        return sum(block.role == "assistant" and block.closed for block in self._blocks)

    @functools.cached_property
    def tools(self) -> Sequence[JSON]:
        """The tools that the system messages list."""
        return tuple(tool for text in self._systems for tool in _tools_in(text))


def opening_of(ids: Ids, tokenizer: ChatTokenizer) -> Ids:
    """Return the ids of the prompt after the open assistant header, the start of the turn to
    sample.

    Empty where the header ends the prompt, where no header is open, or where there is none.
    """
    start, end = tokenizer.id_of(START), tokenizer.id_of(END)
    starts = np.flatnonzero(ids == (-1 if start is None else start))
    tail = ids[int(starts[-1]) + 1 :] if len(starts) else ids[:0]
    if end is not None and bool((tail == end).any()):
        return ids[:0]
    for count in range(1, min(len(tail), _ROLE_IDS) + 1):
        if tokenizer.decode(tail[:count]) == "assistant\n":
            return tail[count:]
    return ids[:0]


def _before_tools(system: str) -> str:
    return system.rpartition(_TOOLS_HEAD)[0].rstrip("\n") if _TOOLS_HEAD in system else system


def _tools_in(system: str) -> list[JSON]:
    """Tools of a system message in Qwen's form: one JSON object per line inside `<tools>`."""
    after = system.rpartition(_TOOLS_HEAD)[2].partition("<tools>\n")[2].rpartition("\n</tools>")[0]
    tools = []
    for line in after.splitlines():
        try:
            tool = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(tool, dict):
            tools.append(tool)
    return tools


@dataclass(slots=True)
class Delta:
    """Parsed text of a chunk. Empty strings add nothing."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and argument JSON of each call that was closed."""


class ReplyReader:
    """Reads reasoning, content and tool calls from the text of a reply that comes in pieces.

    It removes exactly the line breaks that `spell_turn` adds, so the text of a script comes back
    letter for letter. Text that only looks like a tool call stays content.

    `tools` says whether tool calls are looked for (an engine parses none where none are offered);
    `thinking` whether the prompt left a thinking block open.
    """

    def __init__(self, *, tools: bool, thinking: bool = False) -> None:
        self._tools = tools
        self._thinking = thinking
        self._text = ""
        self._given = Delta()

    def feed(self, text: str, *, last: bool = False) -> Delta:
        """Return the text that became certain; with `last`, all of the rest."""
        self._text += text
        read, given = self._read(last=last), self._given
        self._given = read
        return Delta(
            read.reasoning[len(given.reasoning) :],
            read.content[len(given.content) :],
            read.calls[len(given.calls) :],
        )

    def _read(self, *, last: bool) -> Delta:
        """Parse all text so far; more text only appends to what this returns."""
        lead = self._text.lstrip("\n")
        if not self._thinking and not lead.startswith(THINK):
            if not last and THINK.startswith(lead):
                return Delta()
            return self._read_content(Delta(), self._text, last=last)
        inside = self._text if self._thinking else lead.removeprefix(THINK)
        reasoning, marker, after = inside.partition(THINK_END)
        reasoning = reasoning.removeprefix("\n")
        if not marker:
            return Delta(reasoning if last else _certain(reasoning, THINK_END))
        content = after.removeprefix("\n").removeprefix("\n")
        return self._read_content(Delta(reasoning.removesuffix("\n")), content, last=last)

    def _read_content(self, delta: Delta, text: str, *, last: bool) -> Delta:
        while self._tools and CALL in text:
            before, _, after = text.partition(CALL)
            inside, closed, text = after.partition(CALL_END)
            call = _read_call(inside) if closed else None
            if call is None and (closed or last):
                delta.content += f"{before}{CALL}{inside}{closed}"
                continue
            delta.content += before.removesuffix("\n")
            if call is None:
                return delta
            delta.calls.append(call)
        delta.content += text if last or not self._tools else _certain(text, CALL)
        return delta


def _certain(text: str, marker: str) -> str:
    """Return `text` without an end that may be the start of a line break and `marker`."""
    for start in range(max(len(text) - len(marker), 0), len(text)):
        if f"\n{marker}".startswith(text[start:]) or marker.startswith(text[start:]):
            return text[:start]
    return text


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
