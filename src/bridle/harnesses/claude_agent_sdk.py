"""claude-agent-sdk, unmodified, from PyPI: Claude Code's tools and loop; Messages, streams.

Facts: HARNESSES notes of version 0.2.184, which has Claude Code 2.1.327 in itself. Everything that
makes runs of Claude Code reproducible holds for it too (`claude_code.claude_env`). It asks for a
title of the conversation in a side call of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from bridle.config import AgentSpec, Settings
from bridle.harnesses.base import Launch, LaunchContext
from bridle.harnesses.bundles import ensure
from bridle.harnesses.claude_code import claude_env, claude_mcp
from bridle.harnesses.configuration import accepted, as_json, skill_folders
from bridle.harnesses.installers import PYTHON, python_recipe
from bridle.harnesses.sdk_agents import script_cause, script_launch
from bridle.types import JSON, Cause, Dialect

VERSION = "0.2.184"
SCRIPT = "claude_agent_sdk_agent.py"
SAY_VERSION = "from importlib.metadata import version; print(version('claude-agent-sdk'))"


class ClaudeAgentSdkSettings(Settings):
    """Settings of harness `claude_agent_sdk`."""

    instructions: str | None = None
    """System prompt; `None` = Claude Code's own."""
    max_turns: int | None = Field(default=None, ge=1)
    """It stops after so many of its turns; `None` = no limit of its own."""
    config: JSON = Field(default_factory=dict)
    """Claude Code's own `settings.json`."""


class ClaudeAgentSdk:
    """An agent on claude-agent-sdk; implements `base.Harness`."""

    name = "claude_agent_sdk"
    version = VERSION
    dialect = Dialect.ANTHROPIC

    def __init__(self, agent: AgentSpec) -> None:
        self._agent = agent
        self._settings = accepted(agent, VERSION, ClaudeAgentSdkSettings)

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        """A Python with 430 MB of packages, most of it the Claude Code in it."""
        recipe = python_recipe(self.name, VERSION, size_mb=440, probe=(PYTHON, "-c", SAY_VERSION))
        return await ensure(recipe, bundles, report)

    def launch(self, context: LaunchContext) -> Launch:
        """`python claude_agent_sdk_agent.py <config>`, the instruction on stdin."""
        folder = f"{context.home}/.claude"
        config = {
            "model": context.model_name,
            "instructions": self._settings.instructions,
            "max_turns": self._settings.max_turns,
            "mcp_servers": claude_mcp(self._agent),
        }
        launch = script_launch(
            context,
            SCRIPT,
            config,
            {**claude_env(context), "CLAUDE_CONFIG_DIR": folder},
            skill_folders(self._agent, f"{folder}/skills"),
        )
        settings = {f"{folder}/settings.json": as_json(self._settings.config)}
        return Launch(
            launch.command,
            launch.env,
            {**launch.files, **settings},
            folders=launch.folders,
            stdin=launch.stdin,
        )

    def exit_cause(
        self,
        exit_code: int | None,
        signal: int | None,
        stdout: bytes,  # noqa: ARG002 - the script's exit codes tell all
    ) -> Cause | None:
        """The script's exit codes are true."""
        return script_cause(exit_code, signal)
