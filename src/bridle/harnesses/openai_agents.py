"""openai-agents, unmodified, from PyPI: Responses or Chat Completions, streaming or not.

Facts: HARNESSES notes of version 0.24.0. Tracing, which would go to its maker, is off. In Chat
Completions it does not send reasoning back; a call of a tool that does not exist ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from bridle.config import AgentSpec, Settings
from bridle.harnesses.base import Launch, LaunchContext
from bridle.harnesses.bundles import ensure
from bridle.harnesses.configuration import PATIENCE_S, accepted
from bridle.harnesses.installers import PYTHON, python_recipe
from bridle.harnesses.sdk_agents import INSTRUCTIONS, plain_servers, script_cause, script_launch
from bridle.types import Cause, Dialect

VERSION = "0.24.0"
SCRIPT = "openai_agents_agent.py"
SAY_VERSION = "from importlib.metadata import version; print(version('openai-agents'))"


class OpenaiAgentsSettings(Settings):
    """Settings of harness `openai_agents`."""

    api: Literal[Dialect.OPENAI_RESPONSES, Dialect.OPENAI_CHAT] = Dialect.OPENAI_RESPONSES
    """Wire format that it speaks."""
    stream: bool = False
    """Whether it asks for streams."""
    instructions: str = INSTRUCTIONS
    """System prompt."""
    max_turns: int = Field(default=50, ge=1)
    """Model calls after which it gives up."""


class OpenaiAgents:
    """An agent on openai-agents; implements `base.Harness`."""

    name = "openai_agents"
    version = VERSION

    def __init__(self, agent: AgentSpec) -> None:
        self._agent = agent
        self._settings = accepted(agent, VERSION, OpenaiAgentsSettings, skills=False)
        self.dialect: Dialect = self._settings.api

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        """A Python with 120 MB of packages."""
        recipe = python_recipe(self.name, VERSION, size_mb=130, probe=(PYTHON, "-c", SAY_VERSION))
        return await ensure(recipe, bundles, report)

    def launch(self, context: LaunchContext) -> Launch:
        """`python openai_agents_agent.py <config>`, the instruction on stdin."""
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

    def exit_cause(
        self,
        exit_code: int | None,
        signal: int | None,
        stdout: bytes,  # noqa: ARG002 - the script's exit codes tell all
    ) -> Cause | None:
        """The script's exit codes are true."""
        return script_cause(exit_code, signal)
