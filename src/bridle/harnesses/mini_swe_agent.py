"""mini-swe-agent, unmodified, from PyPI: one tool (bash), any wire format, never streams.

Facts: recorded requests of version 2.4.6. It ends on `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`.
Its configuration comes in one file of the private home (no argument limit, no instruction in the
process list), the endpoint and the key through the environment, because it writes its configuration
into its log. Three unusable replies in a row end it with exit code 0: that is the policy's failure
and not the program's, so the session completes and the evaluator says what it was worth.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import Launch, LaunchContext, as_json
from bridle.harnesses.packaged import PackagedHarness, PyPI
from bridle.types import JSON, Dialect

BASE_CONFIG = "mini.yaml"
PROVIDERS = {
    Dialect.OPENAI_CHAT: ("openai", "OPENAI", "openai", ""),
    Dialect.OPENAI_RESPONSES: ("openai", "OPENAI", "openai", ""),
    Dialect.ANTHROPIC: ("anthropic", "ANTHROPIC", "anthropic", ""),
    Dialect.GOOGLE: ("gemini", "GEMINI", "google", "/v1beta"),
}
"""Wire format -> (litellm's name; beginning of its variables; base URL; what it wants after it)."""


class MiniSettings(Settings):
    """Settings of harness `mini_swe_agent`."""

    api: Dialect = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    config: JSON = Field(default_factory=dict)
    """Merged over the program's own `mini.yaml`, e.g. `{"agent": {"step_limit": 20}}`."""
    model_attempts: int = Field(default=4, ge=1)
    """Tries of one model call, 4 to 60 s apart, before it fails (its own default is 10)."""


class MiniSweAgent(PackagedHarness[MiniSettings]):
    """mini-swe-agent; implements `base.Harness`."""

    name = "mini_swe_agent"
    pinned = "2.4.6"
    settings_class = MiniSettings
    submittable = "api config model_attempts"
    transports = ()
    has_skills = False
    package = PyPI(
        size_mb=740,
        # A bare `mini.yaml` is looked for in the work folder first.
        links=((BASE_CONFIG, "minisweagent/config/mini.yaml"),),
    )
    """A Python with 735 MB of packages, most of it what litellm brings."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `mini -c mini.yaml -c <ours> --yolo --exit-immediately`, its files in
        the home.
        """
        config = f"{context.home}/.config/mini-swe-agent/bridle.yaml"
        log = f"{context.home}/trajectory.traj.json"
        provider, name, url, path = PROVIDERS[self.dialect]
        model = {"model_name": f"{provider}/{context.model_name}"}
        if self.dialect is Dialect.OPENAI_RESPONSES:
            model["model_class"] = "litellm_response"
        own: JSON = {"run": {"task": context.instruction}, "model": model}
        command = (
            *(*self._program(context), "-m", "minisweagent.run.mini"),
            *("-c", f"{context.bundle}/{BASE_CONFIG}", "-c", config),
            *("--yolo", "--exit-immediately", "--cost-limit", "0", "-o", log),
        )
        env = {
            f"{name}_API_BASE": context.base_urls[url] + path,
            f"{name}_API_KEY": context.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.config/mini-swe-agent",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self._settings.model_attempts),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        }
        text = as_json(merged(self._settings.config, own))  # JSON is YAML
        return Launch(command, env, files={config: text}, logs=(log,))
