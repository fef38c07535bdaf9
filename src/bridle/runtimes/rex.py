"""A host behind SWE-ReX (package `swe-rex`): Modal, Fargate, Daytona, Docker, any of its servers.

Only what SWE-ReX does well is asked of it: short commands, small texts, one archive. Its calls may
block the loop that they run on and leave nothing open, so each has a thread and a loop of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from bridle.config import explain
from bridle.errors import ConfigError, RuntimeFailure, install_extra
from bridle.types import JSON

if TYPE_CHECKING:
    from swerex.deployment.abstract import AbstractDeployment
    from swerex.runtime.abstract import AbstractRuntime

T = TypeVar("T")

KINDS = ("local", "remote", "docker", "modal", "fargate", "daytona")
"""SWE-ReX's deployments, by the `type` of their configuration."""
SAID_CHARS = 500


class RexHost:
    """One deployment of SWE-ReX, started and stopped with its session."""

    def __init__(self, deployment: JSON) -> None:
        """`deployment` has a `type` of `KINDS` and that deployment's fields. `ConfigError`."""
        self._deployment: AbstractDeployment = _open(deployment)

    async def start(self) -> None:
        """Start it; its own errors escape."""
        await _aside(self._deployment.start)

    async def stop(self) -> None:
        """Give it back; idempotent."""
        await _aside(self._deployment.stop)

    async def execute(self, argv: Sequence[str]) -> str:
        """Run a short command and return its stdout. `RuntimeFailure` carries its output if it
        fails.
        """
        from swerex.runtime.abstract import Command

        command = Command(command=list(argv))
        answer = await _aside(lambda: self._runtime.execute(command))
        if answer.exit_code != 0:
            said = (answer.stderr or answer.stdout).strip()[-SAID_CHARS:]
            raise RuntimeFailure(f"{argv[0]}: exit code {answer.exit_code}: {said}")
        return str(answer.stdout)

    async def read(self, path: str) -> str:
        """A file of text that is there."""
        from swerex.runtime.abstract import ReadFileRequest

        request = ReadFileRequest(path=path, encoding="utf-8")
        answer = await _aside(lambda: self._runtime.read_file(request))
        return str(answer.content)

    async def write(self, path: str, text: str) -> None:
        """Make or overwrite a file of text; parents are made."""
        from swerex.runtime.abstract import WriteFileRequest

        request = WriteFileRequest(path=path, content=text)
        await _aside(lambda: self._runtime.write_file(request))

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file of ours there."""
        from swerex.runtime.abstract import UploadRequest

        request = UploadRequest(source_path=str(source), target_path=path)
        await _aside(lambda: self._runtime.upload(request))

    @property
    def _runtime(self) -> AbstractRuntime:
        return self._deployment.runtime


def _open(deployment: JSON) -> AbstractDeployment:
    kind, fields = deployment.get("type"), {k: v for k, v in deployment.items() if k != "type"}
    if kind not in KINDS:
        message = f"runtime 'remote': kwargs.deployment.type: one of {KINDS}, not {kind!r}"
        raise ConfigError(message)
    # Its loggers would print every call.
    os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "100")
    try:
        from swerex.deployment import config
    except ImportError as error:
        message = (
            f"runtime 'remote' needs the package swe-rex ({error}): run {install_extra('remote')}"
        )
        raise ConfigError(message) from None
    try:
        made = getattr(config, f"{kind.capitalize()}DeploymentConfig")(**fields)
    except ValidationError as error:
        raise explain(error, f"runtime 'remote': kwargs.deployment of type {kind!r}") from None
    try:
        opened: AbstractDeployment = made.get_deployment()
    except ImportError as error:
        message = f"runtime 'remote': {kind!r} needs pip install 'swe-rex[{kind}]' ({error})"
        raise ConfigError(message) from None
    return opened


async def _aside(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await asyncio.to_thread(lambda: asyncio.run(work()))
