"""Gemini CLI, unmodified, from npm: Google generateContent, streams.

Facts: recorded requests of version 0.61.0 and its configuration reference. Its settings file is a
must: without a chosen auth type it does not start. Exit codes tell much: 53 is its turn limit, and
an API's refusal comes out as the HTTP status modulo 256. It replaces old tool outputs by stubs once
there are more than 50k tokens of them; that forks the conversation and cannot be switched off. It
believes in a context of a million tokens, so where it compresses is set as a part of that.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import Launch, LaunchContext, as_json, crash, events_backwards
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
    package = Npm(
        size_mb=300, path="node_modules/@google/gemini-cli/bundle/gemini.js", command="gemini"
    )
    """290 MB: the program and its own node 22."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `gemini --yolo --model <model> --output-format stream-json`, the task on stdin."""
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
        """Read an API status from the exit code, and an error of the model from the last event."""
        if signal is None and exit_code == TURN_LIMIT:
            return Cause.LIMIT
        if signal is None and exit_code in STATUSES:
            return Cause.HARNESS_MODEL_ERROR
        cause = crash(exit_code, signal)
        last = next((e for e in events_backwards(stdout, '"result"') if "status" in e), {})
        if cause is None and last.get("status") == "error":
            return Cause.HARNESS_MODEL_ERROR
        return cause
