"""The harness contract: how an unmodified agent is installed and started.

A harness file knows one program: its pinned version, how to install it once per node into a bundle
folder, the configuration it reads, its launch line, the environment that makes its runs
reproducible, and what its exit code really means. It never touches the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridle.types import JSON, Cause, Dialect


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a session gives to its harness."""

    instruction: str
    base_urls: Mapping[str, str]
    """`anthropic`, `openai`, `google` -> base URL as seen from inside the runtime."""
    key: str
    """The session's key; the harness's only credential."""
    model_name: str
    workdir: str
    home: str
    bundle: str
    """The installed bundle as seen inside; empty for a harness without one."""
    session_id: str
    context_length: int
    settings: JSON = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start."""

    command: str | tuple[str, ...]
    """A string is a shell line."""
    env: Mapping[str, str]
    """Beside the runtime's own minimal environment; never holds a control token."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute path inside -> content, written before the start (configuration in the home)."""
    stdin: bytes | None = None
    logs: tuple[str, ...] = ()
    """Paths inside that are worth keeping after the run."""


class Harness(Protocol):
    """One agent program."""

    name: str
    version: str
    """Pinned; recorded in every result."""
    dialect: Dialect
    """The wire format that it is run with by default."""

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        """Make the bundle if it is not there yet; returns its folder, `None` = needs none.

        Idempotent, safe when two processes do it at once (built aside, renamed into place), and a
        half-built bundle is never taken for a whole one. `report` gets one line per step. Raises
        `HarnessError` naming what is missing (node, network, disk) and what to do.
        """

    def launch(self, context: LaunchContext) -> Launch:
        """The process that does the task."""

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """What an ending means for this program; `None` = a true success."""
