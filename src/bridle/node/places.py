"""The runtimes of an evaluator: fresh ones, or the agent's own if the task trusts it.

The agent's files come as a copy that `bridle.runtimes.files` makes. Files that programs obey
unasked (hooks, configuration) are never copied, and no file replaces one of the checker's own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final

from bridle.errors import RuntimeFailure
from bridle.evaluators.base import OBEYED, CheckerFailure, Unscorable
from bridle.runtimes.base import Runtime
from bridle.runtimes.files import Keep, TooMuch, remove_folders
from bridle.types import JSON

GIT_OBEYS: Final = frozenset({"config", "config.worktree", "hooks", "info", "commondir"})
"""Entries of a `.git` folder that make git run programs, or look for these entries elsewhere."""

NAMED: Final = 50
"""Number of uncopied paths that a result names."""

Make = Callable[[AsyncExitStack], Awaitable[Runtime]]


@dataclass(slots=True)
class SessionPlaces:
    """Implements `evaluators.base.Places` for one session; `resources` own what it opens."""

    agents: Runtime
    """The agent's runtime."""
    make: Make
    """Starts a fresh runtime, with the task's prepare steps done."""
    prepare: Callable[[Runtime], Awaitable[None]]
    """Does the steps of `eval_prepare`."""
    stop: Callable[[Runtime], Awaitable[None]]
    folder: Path
    """Host folder for the copy of the agent's files."""
    resources: AsyncExitStack
    targets: Sequence[str] = ()
    """Targets of `eval_prepare`, relative to the work folder."""
    trusted: bool = False
    """True to score in `agents` itself."""
    shared: bool = False
    """True if processes of the agent may live there."""
    prewarmed: Callable[[], Awaitable[Runtime]] | None = None
    """Returns a fresh runtime that was made ready in advance."""
    stayed: list[str] = field(default_factory=list)
    """Paths of the agent that were not copied, each with its reason."""
    used: set[str] = field(default_factory=set)
    """Those of `apart`, `trusted` and `shared` that were used."""
    _left: Path | None = None

    async def left(self) -> Path:
        if self._left is None:
            work = self.folder / "work"
            self.resources.push_async_callback(asyncio.to_thread, remove_folders, [self.folder])
            await self.agents.kill()
            try:
                self.stayed += await self.agents.snapshot(work)
            except TooMuch as error:
                raise Unscorable(f"the work folder cannot be copied: {error}") from error
            except RuntimeFailure as error:
                raise CheckerFailure("the work folder cannot be copied", str(error)) from error
            self._left = work
        return self._left

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Runtime]:
        async with self._opened() as runtime:
            await self.prepare(runtime)
            with _checking():
                yield runtime

    @asynccontextmanager
    async def with_work(
        self, ours: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> AsyncIterator[Runtime]:
        if self.trusted:
            self.used.add(self._own)
            with _checking():
                await self.prepare(self.agents)
                yield self.agents
            return
        work = await self.left()
        async with self._opened() as runtime:
            with _checking():
                self._note(await runtime.put_work(work, keep_filter((*self.targets, *ours), only)))
                await self.prepare(runtime)
                yield runtime

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[Runtime]:
        self.used.add(self._own if self.trusted else "apart")
        async with AsyncExitStack() as stack:
            runtime = self.agents
            if not self.trusted:
                self.folder.mkdir(parents=True, exist_ok=True)
                scratch = Path(tempfile.mkdtemp(dir=self.folder))
                self.resources.push_async_callback(asyncio.to_thread, remove_folders, [self.folder])
                try:
                    runtime = await self.agents.copied(scratch)
                except TooMuch as error:
                    raise Unscorable(f"the session cannot be copied: {error}") from error
                except RuntimeFailure as error:
                    raise CheckerFailure("the session cannot be copied", str(error)) from error
                stack.push_async_callback(self.stop, runtime)
            with _checking():
                await self.prepare(runtime)
                yield runtime

    @asynccontextmanager
    async def untouched(self) -> AsyncIterator[SessionPlaces]:
        async with AsyncExitStack() as stack:
            yield replace(
                self,
                agents=await self.make(stack),
                resources=stack,
                folder=self.folder / "untouched",
                stayed=[],
                used=set(),
                _left=None,
            )

    def facts(self) -> JSON:
        """Return the result's entries: `place`, and `stayed`, the paths that were not copied."""
        facts: JSON = {"place": max(self.used)} if self.used else {}
        if self.stayed:
            facts["stayed"] = self.stayed[:NAMED]
        return facts

    @property
    def _own(self) -> str:
        return "shared" if self.shared else "trusted"

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Runtime]:
        self.used.add("apart")
        async with AsyncExitStack() as stack:
            ready, self.prewarmed = self.prewarmed, None
            yield await (self.make(stack) if ready is None else ready())

    def _note(self, stayed: Sequence[str]) -> None:
        """Record the paths that were not copied, except for git's own files."""
        self.stayed += [path for path in stayed if "/.git/" not in f"/{path}"]


@contextmanager
def _checking() -> Iterator[None]:
    """Attribute a runtime's failure to the checker, once it holds files of the agent."""
    try:
        yield
    except RuntimeFailure as error:
        raise CheckerFailure("the checker's runtime failed", str(error)) from error


def keep_filter(ours: Sequence[str], only: Sequence[str] | None = None) -> Keep:
    """Return the filter for a fresh work folder's own files.

    These are `ours`, files that programs obey unasked, and all that is not below one of `only`.
    """
    own, wanted = _inside(ours), _inside(only or ())
    above = {parent for path in (*own, *wanted) for parent in path.parents if parent.parts}

    def keep(path: PurePosixPath, *, is_folder: bool) -> bool:
        if ".git" in path.parts and _git_obeys(path, is_folder=is_folder):
            return True
        if path.name in OBEYED or (path in above and not is_folder):
            return True
        if only is not None and path not in above and not _below(path, wanted):
            return True
        return _below(path, own)

    return keep


def _inside(paths: Sequence[str]) -> list[PurePosixPath]:
    found = [PurePosixPath(path) for path in paths]
    return [path for path in found if path.parts and not path.is_absolute()]


def _below(path: PurePosixPath, tops: Sequence[PurePosixPath]) -> bool:
    return any(path == one or one in path.parents for one in tops)


def _git_obeys(path: PurePosixPath, *, is_folder: bool) -> bool:
    """Return whether git obeys an entry at or below `.git`; a module's counts as its own."""
    *_, last = (at for at, part in enumerate(path.parts) if part == ".git")
    below = path.parts[last + 1 :]
    if not below:
        return not is_folder
    return below[0] in GIT_OBEYS or (below[0] == "modules" and bool(GIT_OBEYS & set(below)))
