"""Harnesses that run a line and install nothing: `command`, `oracle` and `empty`.

`command` runs any command line, for agents of your own and for trying things. `AgentSpec.command`
is a bash line. These are filled in it: `{instruction}`, `{instruction_file}`, `{base_url}`
(OpenAI's), `{openai_base_url}`, `{anthropic_base_url}`, `{google_base_url}`, `{model}`, `{key}`,
`{workdir}`, `{session_id}`, `{task_id}`. Each becomes a reference to an environment variable, so no
value is ever read as shell code, whatever its content and the quotes around it. The provider SDKs'
own variables are set too, so many agents need none of these.

`oracle` runs the task's own solution, and `empty` does nothing. They show that a task set is sound:
every reward is 1.0 with the first and 0.0 with the second. Neither calls a model (`needs_model`),
so a true exit completes a session of theirs without a turn; there is nothing in it to train on.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path

from bridle.config import AgentSpec, Settings
from bridle.errors import ConfigError
from bridle.harnesses.base import (
    Launch,
    LaunchContext,
    Unpackaged,
    check_argument,
    parse_settings,
    refuse_commands,
    refuse_extras,
)
from bridle.types import Dialect

VARIABLES = {
    "instruction": "INSTRUCTION",
    "instruction_file": "INSTRUCTION_FILE",
    "base_url": "OPENAI_BASE_URL",
    "openai_base_url": "OPENAI_BASE_URL",
    "anthropic_base_url": "ANTHROPIC_BASE_URL",
    "google_base_url": "GOOGLE_GEMINI_BASE_URL",
    "model": "MODEL",
    "key": "OPENAI_API_KEY",
    "workdir": "WORKDIR",
    "session_id": "SESSION_ID",
    "task_id": "TASK_ID",
}
"""Placeholder -> environment variable."""

PLACEHOLDER = re.compile(r"(?<!\$)\{(" + "|".join(VARIABLES) + r")\}")


class CommandHarness(Unpackaged):
    """One command line; implements `base.Harness`."""

    name = "command"
    dialect = Dialect.OPENAI_CHAT

    def __init__(self, agent: AgentSpec) -> None:
        parse_settings(agent, Settings)
        refuse_extras(agent, transports=(), skills=False)
        if not agent.command or not agent.command.strip():
            raise ConfigError("agent.command: harness 'command' needs a command line")
        self._line = fill(agent.command)
        self._wants_instruction = "{instruction}" in agent.command
        self.version = agent.version or hashlib.sha256(agent.command.encode()).hexdigest()[:12]
        """The given one, else a digest of the command line."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the task's command line with its placeholders filled, as the process to run.

        The instruction is also in the file that `$INSTRUCTION_FILE` names.
        """
        file = f"{context.home}/instruction.txt"
        env = {**sdk_environment(context), "INSTRUCTION_FILE": file}
        if self._wants_instruction:
            check_argument(context.instruction, "agent.command", "; use {instruction_file}")
            env["INSTRUCTION"] = context.instruction
        return Launch(self._line, env, files={file: context.instruction.encode()})


def sdk_environment(context: LaunchContext) -> dict[str, str]:
    """Return the variables that the provider SDKs read (base URLs, keys), and the task's
    own ones.
    """
    return {
        "OPENAI_BASE_URL": context.base_urls["openai"],
        "OPENAI_API_KEY": context.key,
        "ANTHROPIC_BASE_URL": context.base_urls["anthropic"],
        "ANTHROPIC_API_KEY": context.key,
        "GOOGLE_GEMINI_BASE_URL": context.base_urls["google"],
        "GOOGLE_API_URL": context.base_urls["google"],
        "GEMINI_API_KEY": context.key,
        "MODEL": context.model_name,
        "WORKDIR": context.workdir,
        "SESSION_ID": context.session_id,
        "TASK_ID": context.task_id,
        "SAMPLE_INDEX": str(context.sample_index),
    }


def fill(line: str) -> str:
    """Return a command line whose placeholders (`{model}`) are references to environment variables.

    Each reference is quoted so that its value stays one word.
    """
    parts: list[str] = []
    end = 0
    for found in PLACEHOLDER.finditer(line):
        reference = f"${{{VARIABLES[found[1]]}}}"
        match _quote_at(line, found.start()):
            case "'":
                reference = f"'\"{reference}\"'"
            case "":
                reference = f'"{reference}"'
        parts += line[end : found.start()], reference
        end = found.end()
    return "".join((*parts, line[end:]))


def _quote_at(line: str, position: int) -> str:
    """Inside which quotes `position` is: `'`, `"`, or `` for none."""
    quote = ""
    i = 0
    while i < position:
        char = line[i]
        if char == "\\" and quote != "'":
            i += 1
        elif quote == "" and char in "'\"":
            quote = char
        elif char == quote:
            quote = ""
        i += 1
    return quote


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
        """Return the process `true`, which does nothing and succeeds."""
        return Launch("true", {})


class Oracle(Empty):
    """Runs the task's solution; implements `base.Harness`."""

    name = "oracle"
    submittable = "solution:host_path script target patch reverse"

    def __init__(self, agent: AgentSpec) -> None:
        refuse_commands(agent)
        self._settings = parse_settings(agent, OracleSettings)

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process that applies the task's reference patch or runs its solution's
        script.
        """
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
