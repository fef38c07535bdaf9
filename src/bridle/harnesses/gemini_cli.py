"""Gemini CLI and Qwen Code, which began as a copy of it; both unmodified, from npm; they stream.

Facts about Gemini CLI, which speaks Google generateContent: recorded requests of version 0.61.0 and
its configuration reference. Its settings file is a must: without a chosen auth type it does not
start. Exit codes tell much: 53 is its turn limit, and an API's refusal comes out as the HTTP status
modulo 256. It replaces old tool outputs by stubs once there are more than 50k tokens of them; that
forks the conversation and cannot be switched off. It believes in a context of a million tokens, so
where it compresses is set as a part of that.

Facts about Qwen Code, which speaks Chat Completions, Messages or generateContent: recorded requests
of version 0.24.4, its settings schema. It needs node 22, which its bundle carries. Telemetry,
updates and the memory agents that would run after a turn are off, and so is its own ripgrep (npm
leaves it without its execute bit; the fallback is used on every machine alike). Known flaw of the
program: of two quick parallel shell calls one may come back with empty output.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import (
    PATIENCE_S,
    Launch,
    LaunchContext,
    as_json,
    crash,
    events_backwards,
    output_budget,
)
from bridle.harnesses.claude_code import WritesEvents
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.types import JSON, Cause, Dialect

TURN_LIMIT = 53
BELIEVED_CONTEXT = 1_048_576
"""Tokens that it thinks a model takes whose name it does not know."""
COMPRESS_AT = 0.8
"""Part of the real context after which it compresses its history."""
STATUSES = frozenset(status % 256 for status in (400, 401, 403, 404, 429, 500, 502, 503, 504))


class GeminiCliSettings(Settings):
    """Settings of harness `gemini_cli`."""

    max_turns: int | None = Field(default=None, ge=1)
    """It stops after so many of its turns, with exit code 53; `None` = no limit of its own."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `settings.json`, e.g. `{"tools": {"exclude": ["google_web_search"]}}`."""
    args: tuple[str, ...] = ()
    """More arguments for its command line."""


class GeminiCli(PackagedHarness[GeminiCliSettings]):
    """Gemini CLI; implements `base.Harness`."""

    name = "gemini_cli"
    pinned = "0.61.0"
    dialect = Dialect.GOOGLE
    settings_class = GeminiCliSettings
    submittable = "max_turns config args"
    package = Npm(
        size_mb=300, path="node_modules/@google/gemini-cli/bundle/gemini.js", command="gemini"
    )
    """290 MB: the program and its own node 22."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `gemini --yolo --model <model> --output-format stream-json`, the task
        on stdin.
        """
        folder = f"{context.home}/.gemini"
        command = (
            *self._program(context),
            *("--yolo", "--model", context.model_name),
            *("--output-format", "stream-json", *self._settings.args),
        )
        env = {
            "GOOGLE_GEMINI_BASE_URL": context.base_urls["google"],
            "GEMINI_API_KEY": context.key,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        files = {f"{folder}/settings.json": as_json(self._config(context))}
        return self._with_stdin(context, folder, command, env, files)

    def _config(self, context: LaunchContext) -> JSON:
        ours: JSON = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {
                "enableAutoUpdate": False,
                "enableAutoUpdateNotification": False,
                "checkpointing": {"enabled": False},
            },
            "tools": {"useRipgrep": False},
            "model": {
                "maxSessionTurns": self._settings.max_turns or -1,
                "compressionThreshold": context.context_length * COMPRESS_AT / BELIEVED_CONTEXT,
            },
            "mcpServers": self._mcp(http_url="httpUrl", trust=True),
        }
        endpoint = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
        return merged(merged(ours, self._settings.config), endpoint)

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return the cause of the program's failure: its turn limit, a failed model call or a
        crash.

        Exit codes say which, and the last event where the exit code is 0.
        """
        if signal is None and exit_code == TURN_LIMIT:
            return Cause.LIMIT
        if signal is None and exit_code in STATUSES:
            return Cause.HARNESS_MODEL_ERROR
        cause = crash(exit_code, signal)
        last = next((e for e in events_backwards(stdout, '"result"') if "status" in e), {})
        if cause is None and last.get("status") == "error":
            return Cause.HARNESS_MODEL_ERROR
        return cause


CLI = "node_modules/@qwen-code/qwen-code/cli-entry.js"
PROVIDERS = {
    Dialect.OPENAI_CHAT: ("openai", "openai", "OPENAI_BASE_URL", "OPENAI"),
    Dialect.ANTHROPIC: ("anthropic", "anthropic", "ANTHROPIC_BASE_URL", "ANTHROPIC"),
    Dialect.GOOGLE: ("gemini", "google", "GOOGLE_GEMINI_BASE_URL", "GEMINI"),
}
"""Wire format -> (auth type; base URL; its variable; beginning of the other variables)."""


class QwenCodeSettings(Settings):
    """Settings of harness `qwen_code`."""

    api: Literal[Dialect.OPENAI_CHAT, Dialect.ANTHROPIC, Dialect.GOOGLE] = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    tool_search: bool = False
    """True if it hides the rarer half of its tools behind a search: a prompt shorter by a quarter,
    and a tool list that may change in the middle of a conversation, which forks it."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `settings.json`, e.g. `{"tools": {"exclude": ["web_fetch"]}}`."""
    args: tuple[str, ...] = ()
    """More arguments for its command line."""


class QwenCode(WritesEvents[QwenCodeSettings]):
    """Qwen Code; implements `base.Harness`."""

    name = "qwen_code"
    pinned = "0.24.4"
    settings_class = QwenCodeSettings
    submittable = "api tool_search config args"
    package = Npm(
        size_mb=340,
        path=CLI,
        command="qwen",
        whole_lock=False,
    )
    """330 MB: the program and its own node 22."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `qwen --auth-type <api> --yolo --output-format stream-json`, the task
        on stdin.
        """
        folder = f"{context.home}/.qwen"
        auth, url, url_name, name = PROVIDERS[self.dialect]
        command = (
            *self._program(context),
            *("--auth-type", auth, "--model", context.model_name),
            *("--yolo", "--output-format", "stream-json", *self._settings.args),
        )
        env = {
            url_name: context.base_urls[url],
            f"{name}_API_KEY": context.key,
            f"{name}_MODEL": context.model_name,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "true",
            # Their tools are there from the first call on.
            "QWEN_CODE_LEGACY_MCP_BLOCKING": "1",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(output_budget(context.context_length)),
        }
        files = {f"{folder}/settings.json": as_json(self._config(context))}
        return self._with_stdin(context, folder, command, env, files)

    def _config(self, context: LaunchContext) -> JSON:
        generation = {
            "contextWindowSize": context.context_length,
            "timeout": PATIENCE_S * 1000,
            "streamIdleTimeoutMs": PATIENCE_S * 1000,
        }
        ours: JSON = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "checkpointing": {"enabled": False}},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "tools": {
                "useRipgrep": False,
                "toolSearch": {"enabled": self._settings.tool_search},
            },
            "security": {"auth": {"selectedType": PROVIDERS[self.dialect][0]}},
            "model": {"name": context.model_name, "generationConfig": generation},
            "mcpServers": self._mcp(http_url="httpUrl", trust=True),
        }
        return merged(ours, self._settings.config)
