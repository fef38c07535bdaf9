"""aider, unmodified, from PyPI: a text protocol over Chat Completions, streams.

Facts: recorded requests of version 0.86.2 and its `--help`. It has no tools: the model answers with
edits in its text, and may be asked to correct them. Commits (and with them a side call for each
commit message) are off unless asked for. It exits 0 after API errors; the gateway knows better.
"""

from __future__ import annotations

import shlex

from pydantic import Field

from bridle.config import Settings, merged
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext, as_json, output_budget
from bridle.harnesses.packaged import PackagedHarness, PyPI
from bridle.types import JSON, Dialect

OLDEST, BELOW = (3, 10), (3, 13)
"""Pythons that it installs on."""


class AiderSettings(Settings):
    """Settings of harness `aider`."""

    edit_format: str | None = None
    """Format in which the model writes edits (`whole`, `diff`, `udiff`...); `None` = its own
    default."""
    files: tuple[str, ...] = ()
    """Files of the work folder that are in the chat from the start; others it adds itself."""
    auto_commits: bool = False
    """True if it commits each edit, with a message that it asks the model for."""
    config: JSON = Field(default_factory=dict)
    """Merged over our `.aider.conf.yml`: any of its options, e.g. `{"map-tokens": 2048}`."""


class Aider(PackagedHarness[AiderSettings]):
    """aider; implements `base.Harness`."""

    name = "aider"
    pinned = "0.86.2"
    dialect = Dialect.OPENAI_CHAT
    settings_class = AiderSettings
    submittable = "edit_format files auto_commits config"
    transports = ()
    has_skills = False
    package = PyPI(size_mb=700, module="aider", pythons=(OLDEST, BELOW))
    """A Python with 690 MB of packages, most of it what litellm and its parsers bring."""

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `aider --config <ours> --message-file <instruction>`, files in the
        home.
        """
        config = f"{context.home}/.aider.bridle.yml"
        message = f"{context.home}/instruction.txt"
        metadata = f"{context.home}/.aider.model.metadata.json"
        model = f"openai/{context.model_name}"
        program = (*self._program(context), "-m", "aider", "--config", config)
        command = shlex.join((*program, "--message-file", message, *self._settings.files))
        limits = {
            "max_input_tokens": context.context_length,
            "max_output_tokens": output_budget(context.context_length),
            "litellm_provider": "openai",
            "mode": "chat",
        }
        env = {
            "OPENAI_API_BASE": context.base_urls["openai"],
            "OPENAI_API_KEY": context.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }
        # JSON is YAML.
        files = {
            config: as_json(self._config(context, model, metadata)),
            metadata: as_json({model: limits}),
            message: context.instruction.encode(),
        }
        # Where there is no repository it would make one.
        line = f"git rev-parse --git-dir >/dev/null 2>&1 || no_git=--no-git; exec {command} $no_git"
        return Launch(line, env, files, logs=(f"{context.home}/chat.md",))

    def _config(self, context: LaunchContext, model: str, metadata: str) -> JSON:
        ours: JSON = {
            "yes-always": True,
            "auto-commits": self._settings.auto_commits,
            "dirty-commits": self._settings.auto_commits,
            "gitignore": False,
            "analytics": False,
            "check-update": False,
            "show-release-notes": False,
            "show-model-warnings": False,
            "detect-urls": False,
            "disable-playwright": True,
            "pretty": False,
            "fancy-input": False,
            "suggest-shell-commands": False,
            "timeout": PATIENCE_S,
            "model-metadata-file": metadata,
            "chat-history-file": f"{context.home}/chat.md",
            "input-history-file": f"{context.home}/input.history",
        }
        if self._settings.edit_format is not None:
            ours["edit-format"] = self._settings.edit_format
        return merged(merged(ours, self._settings.config), {"model": model, "weak-model": model})
