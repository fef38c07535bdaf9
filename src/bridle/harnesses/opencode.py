"""opencode, unmodified, from npm: any of the four wire formats, streams.

Facts: recorded requests of version 1.18.33, its configuration schema and its own variables. All of
its configuration is one file of the private home. The call that makes a title, the look-ups of
models, the pruning of old tool outputs (it would change history) and its git snapshots are off.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import McpServer, Settings, merged
from bridle.harnesses.base import (
    PATIENCE_S,
    Launch,
    LaunchContext,
    as_json,
    events_backwards,
    output_budget,
)
from bridle.harnesses.packaged import Npm, PackagedHarness, node_script
from bridle.types import JSON, Dialect

PACKAGE = "node_modules/opencode-ai"
PROVIDER = "gw"
ADAPTERS = {
    Dialect.OPENAI_CHAT: ("@ai-sdk/openai-compatible", "openai", ""),
    Dialect.OPENAI_RESPONSES: ("@ai-sdk/openai", "openai", ""),
    Dialect.ANTHROPIC: ("@ai-sdk/anthropic", "anthropic", "/v1"),
    Dialect.GOOGLE: ("@ai-sdk/google", "google", "/v1beta"),
}
"""Wire format -> (adapter, all of which the program has in itself; base URL; what it adds)."""


class OpencodeSettings(Settings):
    """Settings of harness `opencode`."""

    api: Dialect = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `opencode.json`, e.g. `{"permission": {"webfetch": "deny"}}`."""
    args: tuple[str, ...] = ()
    """More arguments for `opencode run`."""


class Opencode(PackagedHarness[OpencodeSettings]):
    """opencode; implements `base.Harness`."""

    name = "opencode"
    pinned = "1.18.33"
    settings_class = OpencodeSettings
    submittable = "api config args"
    package = Npm(
        size_mb=550,
        path=f"{PACKAGE}/bin/opencode.exe",
        command="opencode",
        setup=node_script(f"{PACKAGE}/postinstall.mjs"),
        whole_lock=False,
    )
    """540 MB: the program for two kinds of processor, and the node that installs it."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `opencode run --format json --model gw/<model>`, the instruction on
        stdin.
        """
        folder = f"{context.home}/.config/opencode"
        command = (
            *self._program(context),
            *("run", "--format", "json", "--model", f"{PROVIDER}/{context.model_name}"),
            *self._settings.args,
        )
        env = {
            "XDG_CONFIG_HOME": f"{context.home}/.config",
            "XDG_DATA_HOME": f"{context.home}/.local/share",
            "XDG_STATE_HOME": f"{context.home}/.local/state",
            "XDG_CACHE_HOME": f"{context.home}/.cache",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_PRUNE": "1",
            "OPENCODE_DISABLE_TERMINAL_TITLE": "1",
        }
        files = {f"{folder}/opencode.json": as_json(self._config(context))}
        return self._with_stdin(
            context,
            folder,
            command,
            env,
            files,
            logs=(f"{context.home}/.local/share/opencode/log",),
        )

    def _config(self, context: LaunchContext) -> JSON:
        adapter, url, path = ADAPTERS[self.dialect]
        options = {
            "baseURL": context.base_urls[url] + path,
            "apiKey": context.key,
            "timeout": False,
            "headerTimeout": PATIENCE_S * 1000,
            "chunkTimeout": PATIENCE_S * 1000,
        }
        limit = {
            "context": context.context_length,
            "output": output_budget(context.context_length),
        }
        model = {"reasoning": True, "tool_call": True, "limit": limit}
        provider = {"npm": adapter, "options": options, "models": {context.model_name: model}}
        ours: JSON = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "lsp": False,
            "formatter": False,
            "permission": {"*": "allow"},
            "agent": {"title": {"disable": True}},
            "small_model": f"{PROVIDER}/{context.model_name}",
            "mcp": {server.name: _mcp_entry(server) for server in self._agent.mcp_servers},
        }
        return merged(merged(ours, self._settings.config), {"provider": {PROVIDER: provider}})

    def model_failed(self, stdout: bytes) -> bool:
        """Return whether opencode's last event is an `error`, which only the model's API causes."""
        last = next((event for event in events_backwards(stdout) if "type" in event), {})
        return last.get("type") == "error"


def _mcp_entry(server: McpServer) -> JSON:
    if server.transport == "stdio":
        command = [server.command, *server.args]
        return {"type": "local", "command": command, "environment": server.env, "enabled": True}
    return {"type": "remote", "url": server.url, "headers": server.headers, "enabled": True}
