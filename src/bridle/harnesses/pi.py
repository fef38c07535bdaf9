"""pi, unmodified, from npm: four tools, any of the four wire formats, streams.

Facts: recorded requests of version 0.87.1 and its own documentation (models, environment variables,
JSON event stream). It exits 0 after API errors, so its event stream is read. It looks nothing up on
the network in offline mode.
"""

from __future__ import annotations

from typing import Literal

from bridle.config import Settings
from bridle.harnesses.base import Launch, LaunchContext, as_json, crash, events_backwards
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
    pinned = "0.87.1"
    settings_class = PiSettings
    transports = ()
    package = Npm(size_mb=350, path=CLI, command="pi")
    """345 MB: the program and its own node 22."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `pi -p --mode json --provider gw --model <model>`, the instruction on stdin."""
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
        """Exit code 0 counts only if its last assistant message is not an error."""
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
