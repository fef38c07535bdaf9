"""openclaw, unmodified, from npm: one headless turn of its agent, in any of the four wire formats.

Facts: version 2026.9.6, its own documentation (`agent exec`, custom providers) and its requests as
they came. It needs node 24, which its bundle carries. Everything that it reads is one file of the
private home; neither its gateway nor a channel is started. Exit codes are true: 0 done, 1 a failure
of any kind, 2 its own deadline, which lies beyond every session's budget. With the tools `process`
and `sessions_spawn` it ends each request with a message about their state that is not in the next
one, so that no call would extend the one before: they are off unless asked for. So is the search
for tools, which would change their list in the middle of a conversation.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext, as_json, output_budget
from bridle.harnesses.packaged import Npm, PackagedHarness
from bridle.harnesses.pi import ADAPTERS
from bridle.types import JSON, Dialect

PROVIDER = "gw"
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
    package = Npm(
        size_mb=840, path="node_modules/openclaw/openclaw.mjs", command="openclaw", whole_lock=False
    )
    """830 MB: the program, what it can talk to, and its own node 24."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `openclaw agent exec --config <ours> --message-file - --json`, the task on stdin."""
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
