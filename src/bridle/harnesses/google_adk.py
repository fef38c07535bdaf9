"""google-adk, unmodified, from PyPI: Google generateContent, streaming or not.

Facts: recorded requests of version 2.13.0. It repeats no failed call: one error of the model's API
ends the run.
"""

from __future__ import annotations

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import Launch, LaunchContext
from bridle.harnesses.packaged import INSTRUCTIONS, PyPI, SdkAgent, plain_servers, script_launch
from bridle.types import Dialect

SCRIPT = "google_adk_agent.py"


class GoogleAdkSettings(Settings):
    """Settings of harness `google_adk`."""

    stream: bool = False
    """True if it asks for streams."""
    instructions: str = INSTRUCTIONS
    """System prompt."""
    max_turns: int = Field(default=50, ge=1)
    """Model calls after which it ends."""


class GoogleAdk(SdkAgent[GoogleAdkSettings]):
    """An agent on google-adk; implements `base.Harness`."""

    name = "google_adk"
    pinned = "2.13.0"
    dialect = Dialect.GOOGLE
    settings_class = GoogleAdkSettings
    package = PyPI(size_mb=160, distribution="google-adk")
    """A Python with 155 MB of packages."""

    def launch(self, context: LaunchContext) -> Launch:
        """Run `python google_adk_agent.py <config>`, the instruction on stdin."""
        settings = self._settings
        skills = self._skills(f"{context.home}/.agent/skills")
        config = {
            "model": context.model_name,
            "instructions": settings.instructions,
            "max_turns": settings.max_turns,
            "stream": settings.stream,
            "mcp_servers": plain_servers(self._agent),
            "skills": list(skills),
        }
        env = {
            "GOOGLE_GEMINI_BASE_URL": context.base_urls["google"],
            "GOOGLE_API_KEY": context.key,
            "GOOGLE_GENAI_USE_VERTEXAI": "false",
            "ADK_DISABLE_TELEMETRY": "1",
        }
        return script_launch(context, SCRIPT, config, env, skills)
