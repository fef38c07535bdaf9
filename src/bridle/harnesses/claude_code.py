"""Claude Code, unmodified, from npm: Anthropic Messages, streams.

Facts: recorded requests of version 2.1.332, its `--help`, and its own variables. All of its
configuration comes through the environment and three files of the private home, which also keep it
from looking anything up on the network. Tool search is off (it would change the tool list in the
middle of a conversation), so are the billing block and prompt-caching marks. Its program is a
native binary; node serves only to install it.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import (
    PATIENCE_S,
    Launch,
    LaunchContext,
    SettingsT,
    as_json,
    crash,
    events_backwards,
    output_budget,
)
from bridle.harnesses.packaged import Npm, PackagedHarness, node_script
from bridle.types import JSON, Cause, Dialect

PACKAGE = "node_modules/@anthropic-ai/claude-code"
LONGEST_STREAM_PAUSE_S = 1800
"""It cuts longer values down to this."""


class ClaudeCodeSettings(Settings):
    """Settings of harness `claude_code`."""

    bare: bool = False
    """Its minimal mode: three tools, a prompt of one line, no CLAUDE.md, no system message in the
    middle of the conversation."""
    max_turns: int | None = Field(default=None, ge=1)
    """It stops after so many of its turns, with exit code 1; `None` = no limit of its own."""
    config: JSON = Field(default_factory=dict)
    """Its own `settings.json`, e.g. `{"permissions": {"deny": ["WebFetch"]}}`."""
    args: tuple[str, ...] = ()
    """More arguments for its command line, e.g. `["--disallowed-tools", "WebSearch"]`."""


class WritesEvents(PackagedHarness[SettingsT]):
    """A harness that prints its run as Claude Code's stream of events."""

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return the cause of a failure that the program's last event, `result`, reports.

        Without that event the exit code decides.
        """
        result = next(
            (e for e in events_backwards(stdout, '"result"') if e.get("type") == "result"), None
        )
        if result is not None and signal is None:
            if result.get("subtype") == "error_max_turns":
                return Cause.LIMIT
            # Where the API refused, the answer is the refusal: `is_error` with subtype `success`.
            if result.get("is_error") and result.get("subtype") == "success":
                return Cause.HARNESS_MODEL_ERROR
            if result.get("is_error"):
                return Cause.HARNESS_CRASH
        return crash(exit_code, signal)


class ClaudeCode(WritesEvents[ClaudeCodeSettings]):
    """Claude Code; implements `base.Harness`."""

    name = "claude_code"
    pinned = "2.1.332"
    dialect = Dialect.ANTHROPIC
    settings_class = ClaudeCodeSettings
    submittable = "bare max_turns config args"
    package = Npm(
        size_mb=550,
        path=f"{PACKAGE}/bin/claude.exe",
        setup=node_script(f"{PACKAGE}/install.cjs"),
        command="claude",
    )
    """540 MB: the program and the node that installs it."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `claude -p --model <model> --dangerously-skip-permissions`, the task
        on stdin.
        """
        folder = f"{context.home}/.claude"
        settings = self._settings
        command = [
            *self._program(context),
            *("-p", "--model", context.model_name, "--dangerously-skip-permissions"),
            *("--output-format", "stream-json", "--verbose"),
        ]
        files = {f"{folder}/settings.json": as_json(settings.config)}
        if settings.bare:
            command.append("--bare")
        if settings.max_turns is not None:
            command += "--max-turns", str(settings.max_turns)
        if self._agent.mcp_servers:
            servers = f"{folder}/mcp.json"
            command += "--mcp-config", servers, "--strict-mcp-config"
            files[servers] = as_json({"mcpServers": self._mcp(type_field="type")})
        command += settings.args
        env = {**claude_env(context), "CLAUDE_CONFIG_DIR": folder}
        return self._with_stdin(context, folder, command, env, files)


def claude_env(context: LaunchContext) -> dict[str, str]:
    """Return the environment variables for Claude Code and its SDK: the gateway's URL and key, one
    model for all calls, and nothing (updates, telemetry) that makes runs differ.
    """
    return {
        "ANTHROPIC_BASE_URL": context.base_urls["anthropic"],
        "ANTHROPIC_API_KEY": context.key,
        # Sub-agents and side calls would ask for models of its own choice.
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": context.model_name,
        "CLAUDE_CODE_SUBAGENT_MODEL": context.model_name,
        # As root it refuses to skip permissions without this.
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_INSTALLATION_CHECKS": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_PROMPT_CACHING": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
        # For a model that it does not know it believes in a context of a million tokens.
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(context.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output_budget(context.context_length)),
        "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
        "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": str(LONGEST_STREAM_PAUSE_S * 1000),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(LONGEST_STREAM_PAUSE_S * 1000),
    }
