"""GitHub Copilot CLI, unmodified, from npm: Chat Completions, Responses or Messages; no login.

Facts: recorded requests of version 1.0.102, its `help environment` and `--help`. With a provider of
one's own and offline mode it needs no account and looks nothing up. The program unpacks 235 MB into
the home at its first start; the bundle holds them unpacked, so sessions start in half the time and
take no disk.
"""

from __future__ import annotations

import platform
from typing import Literal

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import Launch, LaunchContext, as_json, output_budget
from bridle.harnesses.bundles import Builder
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.types import JSON, Dialect

UNPACKED = "unpacked"
PROVIDERS = {
    Dialect.OPENAI_CHAT: ("openai", "completions"),
    Dialect.OPENAI_RESPONSES: ("openai", "responses"),
    Dialect.ANTHROPIC: ("anthropic", "completions"),
}
"""Wire format -> (`COPILOT_PROVIDER_TYPE` and base URL, `COPILOT_PROVIDER_WIRE_API`)."""


def program() -> str:
    """Return the path, inside the bundle, of the binary for this machine's processor."""
    kind = "arm64" if platform.machine() in ("aarch64", "arm64") else "x64"
    return f"node_modules/@github/copilot-linux-{kind}/copilot"


class CopilotSettings(Settings):
    """Settings of harness `copilot`."""

    api: Literal[Dialect.OPENAI_CHAT, Dialect.OPENAI_RESPONSES, Dialect.ANTHROPIC] = (
        Dialect.OPENAI_CHAT
    )
    """Wire format that it speaks."""
    config: JSON = Field(default_factory=dict)
    """Its own `config.json`."""
    args: tuple[str, ...] = ()
    """More arguments for its command line, e.g. `["--reasoning-effort", "low"]`."""


async def _unpack(builder: Builder) -> None:
    env = {
        "COPILOT_SEA_EXTRACT_ONLY": "1",
        "COPILOT_PKG_CACHE_HOME": str(builder.folder / UNPACKED),
        "COPILOT_AUTO_UPDATE": "false",
    }
    await builder.run((str(builder.folder / program()),), env=env)


class Copilot(PackagedHarness[CopilotSettings]):
    """GitHub Copilot CLI; implements `base.Harness`."""

    name = "copilot"
    pinned = "1.0.102"
    settings_class = CopilotSettings
    submittable = "api config args"
    package = Npm(size_mb=620, path=program(), setup=_unpack, command="copilot")
    """610 MB: the program, packed and unpacked, and the node that installs it."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `copilot --allow-all-tools --output-format json`, the instruction on
        stdin.
        """
        folder = f"{context.home}/.copilot"
        kind, wire = PROVIDERS[self.dialect]
        budget = output_budget(context.context_length)
        command = (
            *self._program(context),
            *("--allow-all-tools", "--allow-all-paths", "--disable-builtin-mcps"),
            *("--output-format", "json", "--log-dir", f"{folder}/logs", "--no-color"),
            *self._settings.args,
        )
        env = {
            "COPILOT_HOME": folder,
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
            # Exactly "true": it also loads the skills and servers of the work folder.
            "COPILOT_ALLOW_ALL": "true",
            "COPILOT_MODEL": context.model_name,
            "COPILOT_PROVIDER_TYPE": kind,
            "COPILOT_PROVIDER_WIRE_API": wire,
            "COPILOT_PROVIDER_TRANSPORT": "http",
            "COPILOT_PROVIDER_BASE_URL": context.base_urls[kind],
            "COPILOT_PROVIDER_API_KEY": context.key,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(context.context_length - budget),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(budget),
            "USE_TGREP": "false",
        }
        if context.bundle:
            env["COPILOT_PKG_CACHE_HOME"] = f"{context.bundle}/{UNPACKED}"
        files = {f"{folder}/config.json": as_json(self._settings.config)}
        if self._agent.mcp_servers:
            servers = self._mcp(type_field="type", stdio="local", tools=["*"])
            files[f"{folder}/mcp-config.json"] = as_json({"mcpServers": servers})
        return self._with_stdin(context, folder, command, env, files, logs=(f"{folder}/logs",))
