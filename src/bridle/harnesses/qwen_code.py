"""Qwen Code, unmodified, from npm: Chat Completions, or Messages or generateContent; streams.

Facts: HARNESSES notes of version 0.24.4 and its settings schema. It needs node 22, which its bundle
carries. Telemetry, updates and the memory agents that would run after a turn are off, and so is its
own ripgrep (npm leaves it without its execute bit; the fallback is used on every machine alike).
Known flaw of the program: of two quick parallel shell calls one may come back with empty output.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import McpServer, Settings
from bridle.harnesses.base import Launch, LaunchContext
from bridle.harnesses.claude_code import claude_cause
from bridle.harnesses.configuration import (
    PATIENCE_S,
    as_json,
    mcp_entries,
    merged,
    output_budget,
    skill_folders,
)
from bridle.harnesses.installers import NODE
from bridle.harnesses.packaged import Npm, Packaged
from bridle.types import JSON, Cause, Dialect

CLI = "node_modules/@qwen-code/qwen-code/cli-entry.js"
AUTH = {Dialect.OPENAI_CHAT: "openai", Dialect.ANTHROPIC: "anthropic", Dialect.GOOGLE: "gemini"}


class QwenCodeSettings(Settings):
    """Settings of harness `qwen_code`."""

    api: Literal[Dialect.OPENAI_CHAT, Dialect.ANTHROPIC, Dialect.GOOGLE] = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    tool_search: bool = False
    """Whether it hides the rarer half of its tools behind a search: a prompt shorter by a quarter,
    and a tool list that may change in the middle of a conversation, which forks it."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `settings.json`, e.g. `{"tools": {"exclude": ["web_fetch"]}}`."""
    args: tuple[str, ...] = ()
    """More arguments for its command line."""


class QwenCode(Packaged[QwenCodeSettings]):
    """Qwen Code; implements `base.Harness`."""

    name = "qwen_code"
    pinned = "0.24.4"
    settings_class = QwenCodeSettings
    package = Npm(size_mb=340, probe=(NODE, f"../{CLI}", "--version"), whole_lock=False)
    """330 MB: the program and its own node 22."""

    def launch(self, context: LaunchContext) -> Launch:
        """`qwen --auth-type <api> --yolo --output-format stream-json`, the task on stdin."""
        folder = f"{context.home}/.qwen"
        command = (
            *(f"{context.bundle}/{NODE}", f"{context.bundle}/{CLI}"),
            *("--auth-type", AUTH[self.dialect], "--model", context.model_name),
            *("--yolo", "--output-format", "stream-json", *self._settings.args),
        )
        env = {
            **self._endpoint(context),
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "true",
            # Their tools are there from the first call on.
            "QWEN_CODE_LEGACY_MCP_BLOCKING": "1",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(output_budget(context.context_length)),
        }
        return Launch(
            command,
            env,
            files={f"{folder}/settings.json": as_json(self._config(context))},
            folders=skill_folders(self._agent, f"{folder}/skills"),
            stdin=context.instruction.encode(),
        )

    def _endpoint(self, context: LaunchContext) -> dict[str, str]:
        match self.dialect:
            case Dialect.ANTHROPIC:
                return {
                    "ANTHROPIC_BASE_URL": context.base_urls["anthropic"],
                    "ANTHROPIC_API_KEY": context.key,
                    "ANTHROPIC_MODEL": context.model_name,
                }
            case Dialect.GOOGLE:
                return {
                    "GOOGLE_GEMINI_BASE_URL": context.base_urls["google"],
                    "GEMINI_API_KEY": context.key,
                    "GEMINI_MODEL": context.model_name,
                }
            case _:
                return {
                    "OPENAI_BASE_URL": context.base_urls["openai"],
                    "OPENAI_API_KEY": context.key,
                    "OPENAI_MODEL": context.model_name,
                }

    def _config(self, context: LaunchContext) -> JSON:
        def remote(server: McpServer) -> JSON:
            where = "url" if server.transport == "sse" else "httpUrl"
            return {where: server.url, "headers": server.headers}

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
            "security": {"auth": {"selectedType": AUTH[self.dialect]}},
            "model": {"name": context.model_name, "generationConfig": generation},
            "mcpServers": {
                name: {**entry, "trust": True}
                for name, entry in mcp_entries(self._agent, remote).items()
            },
        }
        return merged(ours, self._settings.config)

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Its last event has the same form as Claude Code's."""
        return claude_cause(exit_code, signal, stdout)
