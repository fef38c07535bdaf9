"""pi and openclaw, unmodified, from npm: any of the four wire formats.

openclaw is built on pi and calls the wire formats by the same names (`ADAPTERS`).

Facts about pi: recorded requests of version 1.6.0 and its own documentation (models, environment
variables, JSON event stream). It has four tools and streams. It exits 0 after API errors, so its
event stream is read. It looks nothing up on the network in offline mode. MCP servers are `direct`,
because it hides the tools of others from the model, which then calls them from scripts.

Facts about openclaw: version 2026.9.6, its own documentation (`agent exec`, custom providers) and
its requests as they came. One run is one headless turn of its agent. It needs node 24, which its
bundle carries. Everything that it reads is one file of the private home; neither its gateway nor a
channel is started. Exit codes are true: 0 done, 1 a failure of any kind, 2 its own deadline, which
lies beyond every session's budget. With the tools `process` and `sessions_spawn` it ends each
request with a message about their state that is not in the next one, so that no call would extend
the one before: they are off unless asked for. So is the search for tools, which would change their
list in the middle of a conversation.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import AgentSpec, Settings, merged
from bridle.errors import ConfigError
from bridle.harnesses.base import (
    PATIENCE_S,
    Launch,
    LaunchContext,
    as_json,
    crash,
    events_backwards,
    output_budget,
)
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.types import JSON, Cause, Dialect

CLI = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
PROVIDER = "gw"
ADAPTERS = {
    Dialect.OPENAI_CHAT: ("openai-completions", "openai", ""),
    Dialect.OPENAI_RESPONSES: ("openai-responses", "openai", ""),
    Dialect.ANTHROPIC: ("anthropic-messages", "anthropic", ""),
    Dialect.GOOGLE: ("google-generative-ai", "google", "/v1beta"),
}
"""Wire format -> (its name for it; base URL; what it wants after that)."""


class PiSettings(Settings):
    """Settings of harness `pi`."""

    api: Dialect = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort that it asks for; `None` = its own default."""
    tools: tuple[str, ...] | None = None
    """Names of the tools it may use (`read`, `bash`, `edit`, `write`...); `None` = its default."""
    max_output_tokens: int = 16384
    """Output budget that it asks for in each call, at most half of the model's context."""


class Pi(PackagedHarness[PiSettings]):
    """pi; implements `base.Harness`."""

    name = "pi"
    pinned = "1.6.0"
    settings_class = PiSettings
    submittable = "api thinking tools max_output_tokens"
    transports = ("stdio", "streamable-http")
    package = Npm(size_mb=350, path=CLI, command="pi")
    """345 MB: the program and its own node 22."""

    def __init__(self, agent: AgentSpec) -> None:
        super().__init__(agent)
        if agent.mcp_servers and self._wanted.startswith("0.") and self._wanted < "0.99":
            raise ConfigError(
                f"agent.version: pi {self._wanted} ignores MCP servers; give version 0.99.0 or "
                "later, or remove agent.mcp_servers"
            )

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `pi -p --mode json --provider gw --model <model>`, the instruction on
        stdin.
        """
        folder = f"{context.home}/.pi/agent"
        settings = self._settings
        command = [
            *self._program(context),
            *("-p", "--mode", "json", "--provider", PROVIDER, "--model", context.model_name),
        ]
        if settings.thinking is not None:
            command += "--thinking", settings.thinking
        if settings.tools is not None:
            command += "--tools", ",".join(settings.tools)
        env = {
            "PI_CODING_AGENT_DIR": folder,
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        }
        own: JSON = {"enableInstallTelemetry": False, "quietStartup": True}
        files = {
            f"{folder}/models.json": as_json(self._models(context)),
            f"{folder}/settings.json": as_json(own),
        }
        if self._agent.mcp_servers:
            servers = self._mcp(exposure="direct")
            files[f"{folder}/mcp.json"] = as_json({"mcpServers": servers})
        # From stdin: an argument has a size limit, and one that begins with @ or - means another.
        return self._with_stdin(context, folder, command, env, files)

    def _models(self, context: LaunchContext) -> JSON:
        model = {
            "id": context.model_name,
            "reasoning": True,
            "contextWindow": context.context_length,
            "maxTokens": min(self._settings.max_output_tokens, context.context_length // 2),
        }
        api, url, path = ADAPTERS[self.dialect]
        provider = {
            "baseUrl": context.base_urls[url] + path,
            "api": api,
            "apiKey": context.key,
            "models": [model],
        }
        return {"providers": {PROVIDER: provider}}

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return the cause of a failure: a crash, or a last assistant message that is an error
        although the exit code is 0.
        """
        if (cause := crash(exit_code, signal)) is not None:
            return cause
        ends = (
            event["message"]
            for event in events_backwards(stdout, '"message_end"')
            if event.get("type") == "message_end" and isinstance(event.get("message"), dict)
        )
        last: JSON = next((each for each in ends if each.get("role") == "assistant"), {})
        failed = last.get("stopReason") in ("error", "aborted")
        return Cause.HARNESS_MODEL_ERROR if failed else None


DEADLINE_S = 86_400
"""Its own deadline for the turn; the session's budget ends it long before."""
VOLATILE = ("process", "sessions_spawn")
"""Tools whose state it tells in a message at the end of each request."""


class OpenclawSettings(Settings):
    """Settings of harness `openclaw`."""

    api: Dialect = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort that it asks for; `None` = its own default."""
    live_state: bool = False
    """True if it has its tools for background processes and sub-agents, and tells their state at
    the end of each request: every call is then a new root."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `openclaw.json`, e.g. `{"tools": {"deny": ["browser"]}}`."""
    args: tuple[str, ...] = ()
    """More arguments for `openclaw agent exec`."""


class Openclaw(PackagedHarness[OpenclawSettings]):
    """openclaw; implements `base.Harness`."""

    name = "openclaw"
    pinned = "2026.9.6"
    settings_class = OpenclawSettings
    submittable = "api thinking live_state config args"
    package = Npm(
        size_mb=840, path="node_modules/openclaw/openclaw.mjs", command="openclaw", whole_lock=False
    )
    """830 MB: the program, what it can talk to, and its own node 24."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `openclaw agent exec --config <ours> --message-file - --json`, the
        task on stdin.
        """
        folder = f"{context.home}/.openclaw"
        config = f"{folder}/openclaw.json"
        command = [
            *self._program(context),
            *("agent", "exec", "--config", config, "--cwd", context.workdir),
            *("--model", f"{PROVIDER}/{context.model_name}"),
            *("--timeout", str(DEADLINE_S), "--json", "--message-file", "-"),
        ]
        if self._settings.thinking is not None:
            command += "--thinking", self._settings.thinking
        env = {
            "OPENCLAW_HOME": context.home,
            "OPENCLAW_STATE_DIR": folder,
            "OPENCLAW_CONFIG_PATH": config,
        }
        files = {config: as_json(self._config(context))}
        return self._with_stdin(context, folder, (*command, *self._settings.args), env, files)

    def _config(self, context: LaunchContext) -> JSON:
        api, url, path = ADAPTERS[self.dialect]
        free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
        model = {
            "id": context.model_name,
            "name": context.model_name,
            "reasoning": True,
            "input": ["text", "image"],
            "cost": free,
            "contextWindow": context.context_length,
            "maxTokens": output_budget(context.context_length),
        }
        provider = {
            "baseUrl": context.base_urls[url] + path,
            "apiKey": context.key,
            "api": api,
            "timeoutSeconds": PATIENCE_S,
            "models": [model],
        }
        ours: JSON = {
            "update": {"checkOnStart": False, "auto": {"enabled": False}},
            "agents": {
                "defaults": {
                    "timeoutSeconds": DEADLINE_S,
                    "contextPruning": {"mode": "off"},
                }
            },
            "tools": {
                "toolSearch": False,
                "deny": [] if self._settings.live_state else list(VOLATILE),
            },
            "mcp": {"servers": self._mcp(type_field="transport", http="streamable-http")},
        }
        gateway: JSON = {
            "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{context.model_name}"}}},
            "models": {"mode": "replace", "providers": {PROVIDER: provider}},
        }
        return merged(merged(ours, self._settings.config), gateway)
