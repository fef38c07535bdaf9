"""claude-agent-sdk, unmodified, from PyPI: Claude Code's tools and loop; Messages, streams.

Facts: recorded requests of version 0.2.184, which contains Claude Code 2.1.327. Everything that
makes runs of Claude Code reproducible holds for it too (`claude_code.claude_env`). It asks for a
title of the conversation in a side call of its own.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import Launch, LaunchContext, as_json
from bridle.harnesses.claude_code import claude_env
from bridle.harnesses.packaged import PyPI, SdkAgent, script_launch
from bridle.types import JSON, Dialect

SCRIPT = "claude_agent_sdk_agent.py"


class ClaudeAgentSdkSettings(Settings):
    """Settings of harness `claude_agent_sdk`."""

    instructions: str | None = None
    """System prompt; `None` = Claude Code's own."""
    max_turns: int | None = Field(default=None, ge=1)
    """It stops after so many of its turns; `None` = no limit of its own."""
    config: JSON = Field(default_factory=dict)
    """Claude Code's own `settings.json`."""


class ClaudeAgentSdk(SdkAgent[ClaudeAgentSdkSettings]):
    """An agent on claude-agent-sdk; implements `base.Harness`."""

    name = "claude_agent_sdk"
    pinned = "0.2.184"
    dialect = Dialect.ANTHROPIC
    settings_class = ClaudeAgentSdkSettings
    package = PyPI(size_mb=440, distribution="claude-agent-sdk")
    """A Python with 430 MB of packages, most of it the Claude Code in it."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `python claude_agent_sdk_agent.py <config>`, the instruction on stdin."""
        folder = f"{context.home}/.claude"
        config = {
            "model": context.model_name,
            "instructions": self._settings.instructions,
            "max_turns": self._settings.max_turns,
            "mcp_servers": self._mcp(type_field="type"),
        }
        launch = script_launch(
            context,
            SCRIPT,
            config,
            {**claude_env(context), "CLAUDE_CONFIG_DIR": folder},
            self._skills(f"{folder}/skills"),
        )
        settings = {f"{folder}/settings.json": as_json(self._settings.config)}
        return Launch(
            launch.command,
            launch.env,
            {**launch.files, **settings},
            folders=launch.folders,
            stdin=launch.stdin,
        )
