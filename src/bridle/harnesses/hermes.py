"""Hermes Agent, unmodified, from PyPI: Chat Completions, Responses or Messages, streams.

Facts: version 0.19.0, its `--help`, its default configuration and its requests as they came. It
exits 0 after API errors and prints them as its answer, so its usage report, which says `failed`,
goes to stdout ahead of the answer and is read. The call that makes a title, the memory and the
skills that are written after a turn, and the look at the machine's Python that goes into the prompt
are off.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from bridle.config import Settings, merged
from bridle.errors import ConfigError
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext, as_json, crash, output_budget
from bridle.harnesses.packaged import PackagedHarness, PyPI
from bridle.types import JSON, Cause, Dialect

PROVIDER = "gw"
LEAST_CONTEXT = 64_000
"""Tokens; it starts with no model that takes fewer."""
START = (
    "import sys; sys.argv[1:] = ['--oneshot=' + sys.stdin.read(), *sys.argv[1:]]; "
    "from hermes_cli.main import main; sys.exit(main())"
)
"""Its own `main`, with the instruction from stdin: an argument has a size limit, and is seen."""
MODES = {
    Dialect.OPENAI_CHAT: ("chat_completions", "openai"),
    Dialect.OPENAI_RESPONSES: ("codex_responses", "openai"),
    Dialect.ANTHROPIC: ("anthropic_messages", "anthropic"),
}
"""Wire format -> (its name for it, base URL)."""


class HermesSettings(Settings):
    """Settings of harness `hermes`."""

    api: Literal[Dialect.OPENAI_CHAT, Dialect.OPENAI_RESPONSES, Dialect.ANTHROPIC] = (
        Dialect.OPENAI_CHAT
    )
    """Wire format that it speaks."""
    toolsets: tuple[str, ...] = ("terminal", "file", "skills", "todo", "delegation")
    """Names of its sets of tools; MCP servers come on top."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `config.yaml`, e.g. `{"agent": {"max_turns": 20}}`."""


class Hermes(PackagedHarness[HermesSettings]):
    """Hermes Agent; implements `base.Harness`."""

    name = "hermes"
    pinned = "0.19.0"
    settings_class = HermesSettings
    submittable = "api toolsets config"
    package = PyPI(size_mb=250, module="hermes_cli.main")
    """A Python with 240 MB of packages."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process that runs `hermes --oneshot=<instruction> --toolsets <names>
        --usage-file /dev/stdout`, the instruction on stdin.

        Raises `ConfigError` where the model's context is shorter than Hermes requires.
        """
        if context.context_length < LEAST_CONTEXT:
            raise ConfigError(
                f"agent.harness: 'hermes' starts only with a model of at least {LEAST_CONTEXT} "
                f"tokens, and this one takes {context.context_length}"
            )
        folder = f"{context.home}/.hermes"
        toolsets = (*self._settings.toolsets, *(s.name for s in self._agent.mcp_servers))
        command = (
            *(*self._program(context), "-c", START),
            *("--toolsets", ",".join(toolsets), "--usage-file", "/dev/stdout"),
        )
        env = {
            "HERMES_HOME": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            # With Responses it gives a stream up after 12 s without an event.
            "HERMES_CODEX_TTFB_TIMEOUT_SECONDS": "0",
            "HERMES_CODEX_EVENT_STALE_TIMEOUT_SECONDS": "0",
        }
        files = {f"{folder}/config.yaml": as_json(self._config(context))}
        return self._with_stdin(context, folder, command, env, files, logs=(f"{folder}/logs",))

    def _config(self, context: LaunchContext) -> JSON:
        mode, url = MODES[self.dialect]
        ours: JSON = {
            "agent": {"environment_probe": False},
            "auxiliary": {"title_generation": {"enabled": False}},
            "memory": {"memory_enabled": False, "user_profile_enabled": False},
            "curator": {"enabled": False},
            # After ten calls it would look back and write skills, which a next session reads.
            "skills": {"creation_nudge_interval": 0},
            # Their tools are there from the first call on.
            "mcp_discovery_timeout": 30,
            "mcp_servers": self._mcp(),
        }
        gateway: JSON = {
            "model": {
                "default": context.model_name,
                "provider": PROVIDER,
                "context_length": context.context_length,
                "max_tokens": output_budget(context.context_length),
            },
            "providers": {
                PROVIDER: {
                    "name": PROVIDER,
                    "base_url": context.base_urls[url],
                    "api_key": context.key,
                    "api_mode": mode,
                    "default_model": context.model_name,
                    "request_timeout_seconds": PATIENCE_S,
                    "stale_timeout_seconds": PATIENCE_S,
                    "models": {context.model_name: {"context_length": context.context_length}},
                }
            },
        }
        return merged(merged(ours, self._settings.config), gateway)

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return the cause of a failure: a crash, or a failed model call that the usage report
        tells of although the exit code is 0.
        """
        if (cause := crash(exit_code, signal)) is not None:
            return cause
        return Cause.HARNESS_MODEL_ERROR if _report(stdout).get("failed") else None


def _report(stdout: bytes) -> JSON:
    """Return the usage report that precedes its answer; empty if there is none."""
    try:
        report, _ = json.JSONDecoder().raw_decode(stdout.decode(errors="replace"))
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
