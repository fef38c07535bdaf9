"""Qwen Code, unmodified, from npm: Chat Completions, or Messages or generateContent; streams.

Facts: recorded requests of version 0.24.4, its settings schema. It needs node 22, which its bundle
carries. Telemetry, updates and the memory agents that would run after a turn are off, and so is its
own ripgrep (npm leaves it without its execute bit; the fallback is used on every machine alike).
Known flaw of the program: of two quick parallel shell calls one may come back with empty output.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext, as_json, output_budget
from bridle.harnesses.claude_code import claude_cause
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.types import JSON, Cause, Dialect

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


class QwenCode(PackagedHarness[QwenCodeSettings]):
    """Qwen Code; implements `base.Harness`."""

    name = "qwen_code"
    pinned = "0.24.4"
    settings_class = QwenCodeSettings
    package = Npm(
        size_mb=340,
        path="node_modules/@qwen-code/qwen-code/cli-entry.js",
        command="qwen",
        whole_lock=False,
    )
    """330 MB: the program and its own node 22."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `qwen --auth-type <api> --yolo --output-format stream-json`, the task on stdin."""
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

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Read the last event, which has the same form as Claude Code's."""
        return claude_cause(exit_code, signal, stdout)
