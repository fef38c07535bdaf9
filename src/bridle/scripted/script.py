"""Scripts: their JSON form, the requests they match, and the text of their turns.

The form is documented in `docs/guides/engines.md`. The first conversation whose `when` holds plays;
its turn is the number of assistant messages in the request less `skip`, so the engine keeps no
state: the same request gets the same turn, and past the end the last turn repeats.

A request is matched by its messages or, where it has none, by its bare prompt ids. Turns are
written and prompts are read in ChatML as Qwen3 has it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from bridle.config import Settings, read_text, validated
from bridle.errors import ConfigError, EngineError
from bridle.scripted.tokenizer import ChatTokenizer, text_of
from bridle.types import JSON, Ids

START, END = "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT = "<tool_response>"
_TOOLS_HEAD = "# Tools\n\nYou may call one or more functions"
_ROLE_IDS = 24
"""Ids decoded after a start marker, to find the role and whether a tool result follows."""


def spell_call(name: str, arguments: JSON | str) -> str:
    """Return the text of one tool call as the model samples it.

    Arguments that are a string are inserted unchanged, so they may be malformed.
    """
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    quoted = json.dumps(name, ensure_ascii=False)
    return f'{CALL}\n{{"name": {quoted}, "arguments": {given}}}\n{CALL_END}'


def spell_turn(reasoning: str | None, content: str, calls: Sequence[str]) -> str:
    """Return the text of one assistant turn as the model samples it, without its end token."""
    thought = "" if reasoning is None else f"{THINK}\n{reasoning}\n{THINK_END}\n\n"
    visible = ([content] if content else []) + list(calls)
    return thought + "\n".join(visible)


@dataclass(frozen=True, slots=True)
class MessagesView:
    """View of OpenAI Chat messages for a script."""

    system: str
    """All system text, without the list of tools."""
    users: Sequence[str]
    """Text of each user message, tool results left out."""
    results: Sequence[str]
    """Text of the tool results; several of one turn may be one text."""
    assistants: int
    """Number of finished assistant messages."""
    tools: Sequence[JSON]
    """The tools offered, as OpenAI Chat has them."""


def view_messages(messages: Sequence[JSON], tools: Sequence[JSON] | None) -> MessagesView:
    """Return the parts of a chat request (system, users, results, tools) that a script's conditions
    read.
    """

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
    """View of bare prompt ids, with the fields of `MessagesView`.

    Decodes only the parts that a script asks for.

    Block borders are found among the ids (10 us for 16,384), so a message that contains a marker's
    text cannot forge one.
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
        """System text of the prompt, without the list of tools."""
        return "\n".join(_before_tools(text) for text in self._systems)

    @functools.cached_property
    def users(self) -> Sequence[str]:
        """Texts of the user's messages in the prompt."""
        return self._texts("user")

    @functools.cached_property
    def results(self) -> Sequence[str]:
        """Texts of the tool results in the prompt."""
        return self._texts("tool")

    @functools.cached_property
    def assistants(self) -> int:
        """Number of complete assistant turns in the prompt."""
        return sum(block.role == "assistant" and block.closed for block in self._blocks)

    @functools.cached_property
    def tools(self) -> Sequence[JSON]:
        return tuple(tool for text in self._systems for tool in _tools_in(text))


RequestView: TypeAlias = MessagesView | PromptView
"""View of a request for a script, whatever its wire format."""


def opening_of(ids: Ids, tokenizer: ChatTokenizer) -> Ids:
    """Return the prompt's ids after its open assistant header: the beginning of the reply that the
    client gave.

    Empty if there is no open header or nothing after it.
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
    """Parse the tools of a system message in Qwen's form: one JSON object per line."""
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


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""One text or a list of texts, all of which must be found."""


class When(Settings):
    """Condition on a request; every given field must hold. Texts are compared exactly."""

    system_contains: Texts = ()
    """In the system text."""
    user_contains: Texts = ()
    """Somewhere in the user messages."""
    last_contains: Texts = ()
    """In the last user message."""
    results_contain: Texts = ()
    """Somewhere in the tool results."""
    tools_include: Texts = ()
    """Names of tools that are offered."""
    model: str | None = None
    """The model that was asked for."""

    def holds(self, view: RequestView, model: str | None) -> bool:
        """Return whether a request meets the script's condition; reads only what the condition
        needs.
        """
        if self.model is not None and self.model != model:
            return False
        if not all(text in view.system for text in self.system_contains):
            return False
        if self.last_contains and not (
            view.users and all(text in view.users[-1] for text in self.last_contains)
        ):
            return False
        if not all(any(text in user for user in view.users) for text in self.user_contains):
            return False
        if not all(any(text in result for result in view.results) for text in self.results_contain):
            return False
        return not self.tools_include or set(self.tools_include) <= set(tool_names(view.tools))


class ScriptedCall(Settings):
    """One tool call."""

    name: str
    arguments: JSON | str = Field(default_factory=dict)
    """An object, or the exact text, which need not be JSON."""


class ScriptedTurn(Settings):
    """One reply. Its text is made of reasoning, content and calls, or given as it is."""

    reasoning: str | None = None
    """Text of the thinking block; `None` = no block."""
    content: str | None = None
    tool_calls: tuple[ScriptedCall, ...] = ()
    shell: tuple[str, ...] = ()
    """Commands, each one call of the harness's own shell tool, after `tool_calls`."""
    raw: str | None = None
    """Exact text of the whole turn, for malformed output."""
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Exact ids to sample, whatever the text; the end token is added if it is not their last."""
    finish: Literal["stop", "length"] = "stop"
    """`length`: no end token follows."""
    delay_s: float = Field(default=0.0, ge=0)
    """Wait before the first token, or before the fault."""
    pace_s: float = Field(default=0.0, ge=0)
    """Seconds per token after the first; those of a streamed reply come one by one. 0 = at once."""
    fault: Annotated[int, Field(ge=400, le=599)] | Literal["cut"] | None = None
    """An HTTP status to fail with, or `cut`: half of the reply, then a broken connection."""
    fault_after: int | None = Field(default=None, ge=1)
    """Tokens sent before the fault; `None` = none before a status, half before a cut."""
    fault_times: int | None = Field(default=None, ge=1)
    """Faults per prompt, after which the turn plays; `None` = it always fails."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.raw is not None and (
            self.reasoning is not None or self.content is not None or self.tool_calls or self.shell
        ):
            raise ValueError(
                "a turn's `raw` is its whole text: remove `raw`, or reasoning, content, "
                "tool_calls and shell"
            )
        for name in ("fault_times", "fault_after"):
            if getattr(self, name) is not None and self.fault is None:
                raise ValueError(f"{name} says how a fault happens: give `fault` too")
        return self


class ScriptedConversation(Settings):
    """The turns of one kind of request."""

    when: When = When()
    turns: tuple[ScriptedTurn, ...] = Field(min_length=1)
    skip: int = 0
    """Assistant messages that stand before this conversation's first turn."""

    def position(self, view: RequestView) -> int:
        """Return the index of the turn that answers the request."""
        return min(max(view.assistants - self.skip, 0), len(self.turns) - 1)


class Script(Settings):
    """A whole script."""

    conversations: tuple[ScriptedConversation, ...] = Field(min_length=1)
    model: str = "scripted"
    """The name that the engine gives itself."""
    context_length: int = Field(default=131_072, ge=16)
    """Tokens of prompt and reply together; beyond it the engine refuses as a real one does."""


def load_script(path: Path) -> Script:
    """Return the script in a file. Raises `ConfigError` naming the file and the wrong line or
    field.
    """
    try:
        read = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from None
    return make_script(read, str(path))


def make_script(read: object, where: str) -> Script:
    """Return a script from decoded JSON. Raises `ConfigError`, whose text starts with `where`."""
    return validated(Script, read, where)


def tool_names(tools: Sequence[JSON]) -> list[str]:
    """Return the names of OpenAI Chat tools; other entries are ignored."""
    functions = [tool.get("function", tool) for tool in tools]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def choose(script: Script, view: RequestView, model: str | None) -> tuple[int, int]:
    """Return the indices of the script's conversation and turn that answer a request.

    Raises `EngineError` (400, not retryable), showing what the request looks like, if none fits.
    """
    for index, conversation in enumerate(script.conversations):
        if conversation.when.holds(view, model):
            return index, conversation.position(view)
    raise EngineError(
        f"no conversation of the script fits this request: system {_short(view.system)}, "
        f"last user message {_short(view.users[-1] if view.users else '')}, "
        f"tools {tool_names(view.tools)}, model {model!r}",
        status=400,
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
