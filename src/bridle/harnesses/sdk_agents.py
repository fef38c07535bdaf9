"""Agents on the SDKs of PyPI, unmodified: each is a script of ours around an SDK's own loop.

Facts are those of recorded requests of the pinned versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from bridle.config import Settings
from bridle.harnesses.base import (
    PATIENCE_S,
    SCRIPTS,
    Launch,
    LaunchContext,
    SettingsT,
    as_json,
    output_budget,
)
from bridle.harnesses.claude_code import claude_env
from bridle.harnesses.packaged import PYTHON, PackagedHarness, PyPI
from bridle.types import JSON, Cause, Dialect

TOOL = "shell_agent.py"
TURN_LIMIT, API_FAILED = 3, 4
"""Exit codes of every script; 1 is anything else that went wrong."""

INSTRUCTIONS = (
    "You work in a folder of a Linux machine, with a shell tool. Do what you are asked to do by "
    "running commands, and look at what they print. When it is done, say so in one sentence and "
    "call no tool."
)


class SdkAgent(PackagedHarness[SettingsT], ABC):
    """A harness that is the script `<name>_agent.py`; its configuration is one JSON file."""

    skills_folder: ClassVar[str] = ".agent/skills"
    """In the home."""

    @abstractmethod
    def _config(self, context: LaunchContext) -> JSON:
        """Return the script's configuration, but for the model's name."""

    @abstractmethod
    def _environment(self, context: LaunchContext) -> dict[str, str]:
        """Return endpoint, key and what makes its runs the same each time."""

    def _files(self, context: LaunchContext) -> Mapping[str, bytes]:
        """Return more files of the home."""
        del context
        return {}

    def launch(self, context: LaunchContext) -> Launch:
        """Return the process `python <name>_agent.py <config>`, the instruction on stdin."""
        folder, script = f"{context.home}/.agent", f"{self.name}_agent.py"
        settings = f"{folder}/config.json"
        skills = self._skills(f"{context.home}/{self.skills_folder}")
        config = {"model": context.model_name, **self._config(context)}
        files = {f"{folder}/{name}": (SCRIPTS / name).read_bytes() for name in (script, TOOL)}
        ours = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
        return Launch(
            (f"{context.bundle}/{PYTHON}", f"{folder}/{script}", settings),
            ours | self._environment(context),
            files={**files, settings: as_json(config), **self._files(context)},
            folders=skills,
            stdin=context.instruction.encode(),
        )

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return the cause that the agent script's exit code stands for: turn limit, failed model
        call, or a crash.
        """
        if signal is None and exit_code == TURN_LIMIT:
            return Cause.LIMIT
        if signal is None and exit_code == API_FAILED:
            return Cause.HARNESS_MODEL_ERROR
        return super().exit_cause(exit_code, signal, stdout)

    def _plain_config(self) -> JSON:
        """Return settings and MCP servers as plain JSON, for a script to make clients of."""
        servers = [server.model_dump(mode="json") for server in self._agent.mcp_servers]
        return {**self._settings.model_dump(mode="json"), "mcp_servers": servers}


class ClaudeAgentSdkSettings(Settings):
    """Settings of harness `claude_agent_sdk`."""

    instructions: str | None = None
    """System prompt; `None` = Claude Code's own."""
    max_turns: int | None = Field(default=None, ge=1)
    """It stops after so many of its turns; `None` = no limit of its own."""
    config: JSON = Field(default_factory=dict)
    """Claude Code's own `settings.json`."""


class ClaudeAgentSdk(SdkAgent[ClaudeAgentSdkSettings]):
    """An agent on claude-agent-sdk: Claude Code's tools and loop; Messages, streams.

    Its version contains Claude Code 2.1.327, and what makes runs of that reproducible holds for it
    too. It asks for a title of the conversation in a side call of its own.
    """

    name = "claude_agent_sdk"
    pinned = "0.2.189"
    dialect = Dialect.ANTHROPIC
    settings_class = ClaudeAgentSdkSettings
    submittable = "instructions max_turns config"
    package = PyPI(size_mb=440, distribution="claude-agent-sdk")
    """A Python with 430 MB of packages, most of it the Claude Code in it."""
    skills_folder = ".claude/skills"

    def _config(self, context: LaunchContext) -> JSON:
        del context
        settings = self._settings.model_dump(include={"instructions", "max_turns"})
        return {**settings, "mcp_servers": self._mcp(type_field="type")}

    def _environment(self, context: LaunchContext) -> dict[str, str]:
        return {**claude_env(context), "CLAUDE_CONFIG_DIR": f"{context.home}/.claude"}

    def _files(self, context: LaunchContext) -> Mapping[str, bytes]:
        return {f"{context.home}/.claude/settings.json": as_json(self._settings.config)}


class GoogleAdkSettings(Settings):
    """Settings of harness `google_adk`."""

    stream: bool = False
    """True if it asks for streams."""
    instructions: str = INSTRUCTIONS
    """System prompt."""
    max_turns: int = Field(default=50, ge=1)
    """Model calls after which it ends."""


class GoogleAdk(SdkAgent[GoogleAdkSettings]):
    """An agent on google-adk: Google generateContent, streaming or not.

    It repeats no failed call: one error of the model's API ends the run.
    """

    name = "google_adk"
    pinned = "2.13.0"
    dialect = Dialect.GOOGLE
    settings_class = GoogleAdkSettings
    submittable = "stream instructions max_turns"
    package = PyPI(size_mb=160, distribution="google-adk")
    """A Python with 155 MB of packages."""

    def _config(self, context: LaunchContext) -> JSON:
        skills = self._skills(f"{context.home}/{self.skills_folder}")
        return {**self._plain_config(), "skills": [*skills]}

    def _environment(self, context: LaunchContext) -> dict[str, str]:
        return {
            "GOOGLE_GEMINI_BASE_URL": context.base_urls["google"],
            "GOOGLE_API_KEY": context.key,
            "GOOGLE_GENAI_USE_VERTEXAI": "false",
            "ADK_DISABLE_TELEMETRY": "1",
        }


class OpenaiAgentsSettings(GoogleAdkSettings):
    """Settings of harness `openai_agents`."""

    api: Literal[Dialect.OPENAI_RESPONSES, Dialect.OPENAI_CHAT] = Dialect.OPENAI_RESPONSES
    """Wire format that it speaks."""


class OpenaiAgents(SdkAgent[OpenaiAgentsSettings]):
    """An agent on openai-agents: Responses or Chat Completions, streaming or not.

    Tracing, which would go to its maker, is off. In Chat Completions it does not send reasoning
    back; a call of a tool that does not exist ends the run.
    """

    name = "openai_agents"
    pinned = "0.24.0"
    settings_class = OpenaiAgentsSettings
    submittable = "api stream instructions max_turns"
    has_skills = False
    package = PyPI(size_mb=130, distribution="openai-agents")
    """A Python with 120 MB of packages."""

    def _config(self, context: LaunchContext) -> JSON:
        del context
        return {**self._plain_config(), "timeout_s": PATIENCE_S}

    def _environment(self, context: LaunchContext) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": context.base_urls["openai"],
            "OPENAI_API_KEY": context.key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }


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
    """OpenHands: its SDK's default agent; Chat Completions or Messages.

    The SDK is run instead of the command line on top of it: the same agent, prompt and tools, in a
    third of the time, without a look-up of skills on the network. It never streams, and needs a
    Python that need not be Bridle's own.
    """

    name = "openhands"
    pinned = "1.58.0"
    settings_class = OpenhandsSettings
    submittable = "api native_tool_calling max_turns llm"
    package = PyPI(size_mb=710, distribution="openhands-sdk", pythons=((3, 12), (3, 15)))
    """A Python with 700 MB of packages, made with a Python of 3.12 or newer."""
    skills_folder = ".openhands/skills"

    def _config(self, context: LaunchContext) -> JSON:
        provider = "anthropic" if self.dialect is Dialect.ANTHROPIC else "openai"
        return {
            **self._settings.model_dump(exclude={"api"}),
            "model": f"{provider}/{context.model_name}",
            "base_url": context.base_urls[provider],
            "timeout_s": PATIENCE_S,
            "max_input_tokens": context.context_length,
            "max_output_tokens": output_budget(context.context_length),
            "mcp_servers": self._mcp(type_field="transport"),
        }

    def _environment(self, context: LaunchContext) -> dict[str, str]:
        return {
            "LLM_API_KEY": context.key,
            "OPENHANDS_SUPPRESS_BANNER": "1",
            # Whether the context suffices is for the task to decide.
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            "DO_NOT_TRACK": "1",
        }
