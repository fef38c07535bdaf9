"""Makes a runtime ready: the task's prepare steps, the harness's files, a fresh one to score in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bridle.aio import retry
from bridle.config import Action
from bridle.errors import BridleError, RuntimeFailure, boundary
from bridle.harnesses.base import Launch
from bridle.lifecycle import scrub
from bridle.runtimes.base import Runtime

TAIL_CHARS = 500


async def prepare(
    runtime: Runtime, actions: Sequence[Action], *, stage: str, base: Path, log: Path
) -> None:
    """Do `actions` in order, each up to its attempts with its back-off.

    `base` is what relative sources are relative to; `log` gets the commands' output. Raises
    `RuntimeFailure` naming the step that failed (`stage` and its index).
    """
    for index, action in enumerate(actions):

        async def attempt(index: int = index, action: Action = action) -> None:
            try:
                await _perform(runtime, action, base, log)
            except RuntimeFailure as error:
                raise RuntimeFailure(f"{stage} step {index} ({action.type}): {error}") from error

        await retry(
            attempt,
            attempts=action.max_attempts,
            backoff_s=action.retry_backoff_seconds,
            retry_on=(RuntimeFailure,),
        )


async def _perform(runtime: Runtime, action: Action, base: Path, log: Path) -> None:
    match action.type:
        case "exec" | "scrub_git":
            scrubs = action.type == "scrub_git"
            command = scrub.COMMAND if scrubs else action.command or ""
            cwd = action.target if scrubs else action.cwd
            result = await runtime.exec(command, env=action.env, cwd=cwd, log=log)
            if not result.ok:
                said = (result.stderr or result.stdout).decode(errors="replace").strip()
                how = (
                    f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
                )
                what = action.target or "." if scrubs else repr(action.command)
                raise RuntimeFailure(f"{what}: {how}: {said[-TAIL_CHARS:]}")
        case "upload_file" | "upload_dir":
            await runtime.upload(base / (action.source or ""), action.target or ".")


async def place(runtime: Runtime, launch: Launch) -> None:
    """Put the harness's own files and folders into the runtime; files only it can read."""
    for path, content in launch.files.items():
        await runtime.write(path, content, mode=0o600)
    for path, folder in launch.folders.items():
        await runtime.upload(folder, path)


class Prewarmed:
    """A runtime that is made ready in the background, and waited for when it is needed.

    `make` pushes what it opens on the stack that it is given; the stack is unwound by `aclose`.
    """

    def __init__(
        self, group: asyncio.TaskGroup, make: Callable[[AsyncExitStack], Awaitable[Runtime]]
    ) -> None:
        self._stack = AsyncExitStack()
        self._making = group.create_task(self._made(make), name="prewarm")

    async def _made(
        self, make: Callable[[AsyncExitStack], Awaitable[Runtime]]
    ) -> Runtime | BridleError:
        try:
            with boundary(RuntimeFailure, "the fresh runtime"):
                return await make(self._stack)
        except BridleError as error:
            return error

    async def get(self) -> Runtime:
        """The runtime, when it is ready. Raises what went wrong with it."""
        await asyncio.wait({self._making})
        made = self._making.result()
        if isinstance(made, BridleError):
            raise made
        return made

    async def aclose(self) -> None:
        """Stop it, ready or not; idempotent."""
        self._making.cancel()
        await asyncio.wait({self._making})
        await self._stack.aclose()
