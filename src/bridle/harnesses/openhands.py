"""OpenHands, unmodified, from PyPI: its SDK's default agent; Chat Completions or Messages.

Facts: recorded requests of SDK 1.58.0. It needs Python 3.12 or newer, which need not be Bridle's
own. The SDK is run instead of the command line on top of it: the same agent, prompt and tools, in a
third of the time, without a look-up of skills on the network. It never streams.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext, output_budget
from bridle.harnesses.packaged import PyPI, SdkAgent, script_launch
from bridle.types import JSON, Dialect

OLDEST, BELOW = (3, 12), (3, 15)
"""Pythons that it installs on."""
SCRIPT = "openhands_agent.py"
PROVIDERS = {Dialect.OPENAI_CHAT: "openai", Dialect.ANTHROPIC: "anthropic"}


class OpenhandsSettings(Settings):
    """Settings of harness `openhands`."""

    api: Literal[Dialect.OPENAI_CHAT, Dialect.ANTHROPIC] = Dialect.OPENAI_CHAT
    """Wire format that it speaks."""
    native_tool_calling: bool = True
    """False = its text protocol: calls are written as text, ended by a stop string."""
    max_turns: int = Field(default=100, ge=1)
    """Steps after which it ends."""
    llm: JSON = Field(default_factory=dict)
    """More fields of its `LLM`, e.g. `{"reasoning_effort": "low"}`."""


class Openhands(SdkAgent[OpenhandsSettings]):
    """OpenHands; implements `base.Harness`."""

    name = "openhands"
    pinned = "1.58.0"
    settings_class = OpenhandsSettings
    package = PyPI(size_mb=710, distribution="openhands-sdk", pythons=(OLDEST, BELOW))
    """A Python with 700 MB of packages, made with a Python of 3.12 or newer."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `python openhands_agent.py <config>`, the instruction on stdin."""
        settings = self._settings
        provider = PROVIDERS[self.dialect]
        config = {
            "model": f"{provider}/{context.model_name}",
            "base_url": context.base_urls[provider],
            "timeout_s": PATIENCE_S,
            "max_input_tokens": context.context_length,
            "max_output_tokens": output_budget(context.context_length),
            "native_tool_calling": settings.native_tool_calling,
            "max_turns": settings.max_turns,
            "llm": settings.llm,
            "mcp_servers": self._mcp(type_field="transport"),
        }
        env = {
            "LLM_API_KEY": context.key,
            "OPENHANDS_SUPPRESS_BANNER": "1",
            # Whether the context suffices is for the task to decide.
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            "DO_NOT_TRACK": "1",
        }
        skills = self._skills(f"{context.home}/.openhands/skills")
        return script_launch(context, SCRIPT, config, env, skills)
