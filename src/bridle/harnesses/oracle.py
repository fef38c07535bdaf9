"""The harnesses `oracle` and `empty`: the task's own solution, and nothing at all.

They show that a task set is sound: every reward is 1.0 with the first and 0.0 with the second.
Neither calls a model (`needs_model`), so a true exit completes a session of theirs without a turn;
there is nothing in it to train on.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from bridle.config import AgentSpec, Settings
from bridle.errors import ConfigError
from bridle.harnesses.base import Launch, LaunchContext, Unpackaged, parse_settings, refuse_commands
from bridle.types import Dialect


class OracleSettings(Settings):
    """Settings of harness `oracle`; the loader of a task set fills them."""

    solution: str = ""
    """The folder of the solution, on our side."""
    script: str = "solve.sh"
    """Its script to run in the work folder."""
    target: str | None = None
    """The place of the folder inside; `None` = `.solution` in the home."""
    patch: str = ""
    """A reference patch, in place of a folder; it is applied in the work folder."""
    reverse: bool = False
    """True if the patch is the fault, and is taken back."""


class Empty(Unpackaged):
    """Does nothing and ends well; implements `base.Harness`."""

    name = "empty"
    version = "1"
    dialect = Dialect.OPENAI_CHAT
    needs_model = False

    def __init__(self, agent: AgentSpec) -> None:
        refuse_commands(agent)
        parse_settings(agent, Settings)

    def launch(self, context: LaunchContext) -> Launch:  # noqa: ARG002 - the contract's
        return Launch("true", {})


class Oracle(Empty):
    """Runs the task's solution; implements `base.Harness`."""

    name = "oracle"

    def __init__(self, agent: AgentSpec) -> None:
        refuse_commands(agent)
        self._settings = parse_settings(agent, OracleSettings)

    def launch(self, context: LaunchContext) -> Launch:
        settings = self._settings
        if settings.patch:
            file = f"{context.home}/.solution.diff"
            words = "--reverse " if settings.reverse else ""
            command = f"git apply --whitespace=nowarn {words}{shlex.quote(file)}"
            return Launch(command, {}, files={file: settings.patch.encode()})
        if not settings.solution:
            message = f"task {context.task_id!r} brings no solution for harness 'oracle' to run"
            raise ConfigError(message)
        target = settings.target or f"{context.home}/.solution"
        script = shlex.quote(f"{target}/{settings.script}")
        return Launch(f"bash {script}", {}, folders={target: Path(settings.solution)})
