"""Scripts: what the scripted engine says, as a JSON file, and which turn a request gets.

The form is a promise (`DESIGN.md` §10). A conversation is chosen by what a request shows, the first
that fits; its turn is the number of assistant messages in the request less `skip`, so a script
needs no memory: the same request gets the same turn, and past the end the last turn repeats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from bridle.config import Settings, explain
from bridle.errors import ConfigError, EngineError
from bridle.scripted.chatml import RequestView
from bridle.types import JSON


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
        """Return whether the request meets the condition. Reads only what the given fields need."""
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
    """Exact text to tokenise instead, for malformed output."""
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
    """So many tokens are given out before the fault; `None` = none before a status, half before a
    cut."""
    fault_times: int | None = Field(default=None, ge=1)
    """After so many faults for one and the same prompt the turn plays; `None` = it fails always."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.raw is not None and (
            self.reasoning is not None or self.content is not None or self.tool_calls or self.shell
        ):
            raise ValueError("raw is the whole text; reasoning, content and calls cannot join it")
        for name in ("fault_times", "fault_after"):
            if getattr(self, name) is not None and self.fault is None:
                raise ValueError(f"{name} needs a fault")
        return self


class ScriptedConversation(Settings):
    """The turns of one kind of request."""

    when: When = When()
    turns: tuple[ScriptedTurn, ...] = Field(min_length=1)
    skip: int = 0
    """Assistant messages that stand before this conversation's first turn."""

    def position(self, view: RequestView) -> int:
        """Index of the turn that the request gets."""
        return min(max(view.assistants - self.skip, 0), len(self.turns) - 1)


class Script(Settings):
    """A whole script."""

    conversations: tuple[ScriptedConversation, ...] = Field(min_length=1)
    model: str = "scripted"
    """The name that the engine gives itself."""
    context_length: int = Field(default=131_072, ge=16)
    """Tokens of prompt and reply together; beyond it the engine refuses as a real one does."""


def load_script(path: Path) -> Script:
    """Read a script. `ConfigError` names the file and the line or field of the first mistake."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from None
    return make_script(read, str(path))


def make_script(read: object, where: str) -> Script:
    """Check a script that was read already. `ConfigError` starts with `where`."""
    try:
        return Script.model_validate(read)
    except ValidationError as error:
        raise explain(error, where) from None


def tool_names(tools: Sequence[JSON]) -> list[str]:
    """Names of OpenAI Chat tools; other entries are passed over."""
    functions = [tool.get("function", tool) for tool in tools]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def choose(script: Script, view: RequestView, model: str | None) -> tuple[int, int]:
    """Return the indices of the conversation and turn for a request.

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
