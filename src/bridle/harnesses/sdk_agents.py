"""Base of the harnesses that are a script of ours on a provider's SDK.

The SDK is unmodified and brings the loop; the script (in `scripts/`) is what its users write: some
twenty lines that give it a model, a shell tool and the task. It is copied into the home, reads one
configuration file and the instruction on stdin, and says by its exit code how it went.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bridle.config import AgentSpec
from bridle.harnesses.base import SCRIPTS, Launch, LaunchContext, SettingsT
from bridle.harnesses.configuration import as_json
from bridle.harnesses.installers import PYTHON
from bridle.harnesses.packaged import Packaged
from bridle.types import JSON, Cause

TOOL = "bash_tool.py"
TURN_LIMIT, API_FAILED = 3, 4
"""Exit codes of every script; 1 is anything else that went wrong."""

INSTRUCTIONS = (
    "You work in a folder of a Linux machine, with a shell tool. Do what you are asked to do by "
    "running commands, and look at what they print. When it is done, say so in one sentence and "
    "call no tool."
)


def script_launch(
    context: LaunchContext,
    script: str,
    config: JSON,
    env: Mapping[str, str],
    folders: Mapping[str, Path] | None = None,
) -> Launch:
    """`python <script> <config>` with the bundle's Python, the instruction on stdin."""
    folder = f"{context.home}/.agent"
    settings = f"{folder}/config.json"
    files = {f"{folder}/{name}": (SCRIPTS / name).read_bytes() for name in (script, TOOL)}
    return Launch(
        (f"{context.bundle}/{PYTHON}", f"{folder}/{script}", settings),
        {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", **env},
        files={**files, settings: as_json(config)},
        folders=folders or {},
        stdin=context.instruction.encode(),
    )


class SdkAgent(Packaged[SettingsT]):
    """A harness that is such a script."""

    def exit_cause(
        self,
        exit_code: int | None,
        signal: int | None,
        stdout: bytes,
    ) -> Cause | None:
        """The scripts' exit codes are true."""
        if signal is None and exit_code == TURN_LIMIT:
            return Cause.LIMIT
        if signal is None and exit_code == API_FAILED:
            return Cause.HARNESS_MODEL_ERROR
        return super().exit_cause(exit_code, signal, stdout)


def plain_servers(agent: AgentSpec) -> list[JSON]:
    """The MCP servers of a task as plain JSON, for a script to make clients of."""
    return [server.model_dump(mode="json") for server in agent.mcp_servers]
