"""Codex CLI, unmodified, from npm: OpenAI Responses, always streams.

Facts: recorded requests of version 0.171.0 and its configuration reference. It reads one
`config.toml` of the private home; only a provider of its own making takes a base URL, and the name
of a model that it does not know keeps it from special tool protocols. Needs HTTP only: WebSockets
are switched off.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext, as_toml, events_backwards
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.types import JSON, Dialect

PROVIDER = "gw"
COMPACT_AT = 0.8
"""Part of the context after which it compacts."""


class CodexSettings(Settings):
    """Settings of harness `codex`."""

    multi_agent: bool = False
    """True if it may start agents of its own."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `config.toml`, e.g. `{"model_reasoning_effort": "low"}`."""
    args: tuple[str, ...] = ()
    """More arguments for `codex exec`."""


class Codex(PackagedHarness[CodexSettings]):
    """Codex CLI; implements `base.Harness`."""

    name = "codex"
    pinned = "0.171.0"
    dialect = Dialect.OPENAI_RESPONSES
    settings_class = CodexSettings
    submittable = "multi_agent config args"
    transports = ("stdio", "streamable-http")
    package = Npm(size_mb=600, path="node_modules/@openai/codex/bin/codex.js", command="codex")
    """590 MB: the program and the node that starts it."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `codex exec --json --dangerously-bypass-approvals-and-sandbox -`, task
        on stdin.
        """
        folder = f"{context.home}/.codex"
        command = (
            *self._program(context),
            *("exec", "--json", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",
            *self._settings.args,
            "-",
        )
        files = {f"{folder}/config.toml": as_toml(self._config(context))}
        env = {"CODEX_HOME": folder, "GATEWAY_KEY": context.key}
        return self._with_stdin(context, folder, command, env, files, logs=(f"{folder}/sessions",))

    def _config(self, context: LaunchContext) -> JSON:
        ours: JSON = {
            "model_context_window": context.context_length,
            "model_auto_compact_token_limit": int(context.context_length * COMPACT_AT),
            "web_search": "disabled",
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "history": {"persistence": "none"},
            "features": {"multi_agent": self._settings.multi_agent, "goals": False},
            "mcp_servers": self._mcp(headers="http_headers"),
        }
        provider = {
            "name": PROVIDER,
            "base_url": context.base_urls["openai"],
            "env_key": "GATEWAY_KEY",
            "wire_api": "responses",
            "supports_websockets": False,
            "stream_idle_timeout_ms": PATIENCE_S * 1000,
        }
        endpoint = {
            "model": context.model_name,
            "model_provider": PROVIDER,
            "model_providers": {PROVIDER: provider},
        }
        return merged(merged(ours, self._settings.config), endpoint)

    def model_failed(self, stdout: bytes) -> bool:
        """Return whether the last turn that Codex reports failed (event `turn.failed`)."""
        last = next(events_backwards(stdout, '"turn.'), {})
        return last.get("type") == "turn.failed"
