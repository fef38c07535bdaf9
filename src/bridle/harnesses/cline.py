"""Cline CLI, unmodified, from npm: any of the four wire formats, streams.

Facts: recorded requests of version 3.0.65 and the schemas in the program. The provider is written
into its settings (its own `auth` command refuses base URLs for some), with the context window and a
patient timeout. With the local session backend it starts no daemon that would outlive the run.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings, merged
from bridle.errors import ConfigError
from bridle.harnesses.base import (
    PATIENCE_S,
    Launch,
    LaunchContext,
    as_json,
    check_argument,
    events_backwards,
    output_budget,
)
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.types import JSON, Dialect

PROVIDERS = {
    Dialect.OPENAI_CHAT: ("openai-compatible", "openai", ""),
    Dialect.OPENAI_RESPONSES: ("openai-native", "openai", ""),
    Dialect.ANTHROPIC: ("anthropic", "anthropic", "/v1"),
    Dialect.GOOGLE: ("gemini", "google", ""),
}
"""Wire format -> (provider id, base URL, what it adds)."""

TOOL_MODELS = "gemini-3"


class ClineSettings(Settings):
    """Settings of harness `cline`."""

    api: Dialect = Dialect.OPENAI_CHAT
    """Wire format that it speaks. With `google` the model's name must begin with `gemini-3`, or the
    program sends no tools."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `global-settings.json`."""
    args: tuple[str, ...] = ()
    """More arguments for its command line, e.g. `["--compaction", "off"]`."""


class Cline(PackagedHarness[ClineSettings]):
    """Cline CLI; implements `base.Harness`."""

    name = "cline"
    pinned = "3.0.65"
    settings_class = ClineSettings
    submittable = "api config args"
    package = Npm(size_mb=640, path="node_modules/.bin/cline", whole_lock=False, command="cline")
    """630 MB: the program, the packages that it names, and the node that installs it."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `cline --json --auto-approve true -P <provider> -m <model> --
        <instruction>`.
        """
        check_argument(context.instruction, "'cline'")
        if self.dialect is Dialect.GOOGLE and not context.model_name.startswith(TOOL_MODELS):
            message = (
                f"agent.model_name: with api 'google', 'cline' gives tools only to a model whose "
                f"name begins with {TOOL_MODELS!r}, not to {context.model_name!r}"
            )
            raise ConfigError(message)
        folder = f"{context.home}/.cline/data/settings"
        provider, url, path = PROVIDERS[self.dialect]
        command = (
            *self._program(context),
            *("--json", "--auto-approve", "true", "-P", provider, "-m", context.model_name),
            *self._settings.args,
            *("--", context.instruction),
        )
        env = {
            "CLINE_SESSION_BACKEND_MODE": "local",
            "CLINE_TELEMETRY_DISABLED": "1",
            "DO_NOT_TRACK": "1",
        }
        settings = {
            "provider": provider,
            "apiKey": context.key,
            "model": context.model_name,
            "baseUrl": context.base_urls[url] + path,
            "contextWindow": context.context_length,
            "maxTokens": output_budget(context.context_length),
            "timeout": PATIENCE_S * 1000,
            "capabilities": ["tools", "streaming", "reasoning"],
        }
        saved = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z"}
        providers = {
            "version": 1,
            "lastUsedProvider": provider,
            "modes": {},
            "providers": {provider: {**saved, "tokenSource": "manual"}},
        }
        ours: JSON = {"telemetryOptOut": True, "autoUpdateEnabled": False}
        mcp = self._mcp(type_field="type", stdio="stdio", http="streamableHttp")
        files = {
            f"{folder}/providers.json": as_json(providers),
            f"{folder}/global-settings.json": as_json(merged(ours, self._settings.config)),
            f"{folder}/cline_mcp_settings.json": as_json({"mcpServers": mcp}),
        }
        return Launch(
            command,
            env,
            files,
            folders=self._skills(f"{context.home}/.cline/skills"),
            logs=(f"{context.home}/.cline/data/logs",),
        )

    def model_failed(self, stdout: bytes) -> bool:
        """Return whether Cline's event `run_result` reports a failure of the model; its exit code
        may be 0.
        """
        result = next(events_backwards(stdout, '"run_result"'), {})
        return result.get("finishReason") == "error"
