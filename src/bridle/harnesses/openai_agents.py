"""openai-agents, unmodified, from PyPI: Responses or Chat Completions, streaming or not.

Facts: recorded requests of version 0.24.0. Tracing, which would go to its maker, is off. In Chat
Completions it does not send reasoning back; a call of a tool that does not exist ends the run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import PATIENCE_S, Launch, LaunchContext
from bridle.harnesses.packaged import INSTRUCTIONS, PyPI, SdkAgent, plain_servers, script_launch
from bridle.types import Dialect

SCRIPT = "openai_agents_agent.py"


class OpenaiAgentsSettings(Settings):
    """Settings of harness `openai_agents`."""

    api: Literal[Dialect.OPENAI_RESPONSES, Dialect.OPENAI_CHAT] = Dialect.OPENAI_RESPONSES
    """Wire format that it speaks."""
    stream: bool = False
    """True if it asks for streams."""
    instructions: str = INSTRUCTIONS
    """System prompt."""
    max_turns: int = Field(default=50, ge=1)
    """Model calls after which it ends."""


class OpenaiAgents(SdkAgent[OpenaiAgentsSettings]):
    """An agent on openai-agents; implements `base.Harness`."""

    name = "openai_agents"
    pinned = "0.24.0"
    settings_class = OpenaiAgentsSettings
    has_skills = False
    package = PyPI(size_mb=130, distribution="openai-agents")
    """A Python with 120 MB of packages."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `python openai_agents_agent.py <config>`, the instruction on stdin."""
        settings = self._settings
        config = {
            "api": str(settings.api),
            "model": context.model_name,
            "instructions": settings.instructions,
            "max_turns": settings.max_turns,
            "stream": settings.stream,
            "timeout_s": PATIENCE_S,
            "mcp_servers": plain_servers(self._agent),
        }
        env = {
            "OPENAI_BASE_URL": context.base_urls["openai"],
            "OPENAI_API_KEY": context.key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        return script_launch(context, SCRIPT, config, env)
