"""What is removed, and when, so that a server which runs for months does not fill its disk.

A group is kept whole until it was acknowledged. Then `keep_days` and `keep_gb` remove its files
(trajectories, capture, logs and artifacts of every run; oldest groups first), and `keep_rows_days`
its rows, all but its name with what became of it, so that a second submit of it is still the same
task. Groups that nobody ever acknowledges count as acknowledged after `keep_unacked_days`. Nothing
of a group is removed while a callback of it is to be tried.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

import structlog

from bridle.errors import BridleError
from bridle.server.files import TrajectoryFiles
from bridle.server.rows import run_id
from bridle.server.schemas import ServiceSettings
from bridle.server.state import State
from bridle.server.states import Kept
from bridle.server.views import Views
from bridle.server.wire import Row
from bridle.server.workers import Workers

EVERY_S: Final = 300.0
"""How often there is a look."""

PAGE: Final = 100
"""Groups that are removed between two looks at how many there are."""

DAY_S: Final = 86_400.0

log = structlog.get_logger(__name__)


class Retention:
    """Removes what need not be kept. `run` is its whole life."""

    def __init__(
        self,
        state: State,
        views: Views,
        files: TrajectoryFiles,
        workers: Workers,
        settings: ServiceSettings,
    ) -> None:
        self._state = state
        self._views = views
        self._files = files
        self._workers = workers
        self._settings = settings

    async def run(self) -> None:
        while True:
            try:
                await self.remove_old()
            except BridleError as error:
                log.warning("what is old was not removed", error=str(error))
            await asyncio.sleep(EVERY_S)

    async def remove_old(self) -> int:
        """Remove what is too old, and the oldest of what is too much; how many groups' files."""
        settings, now, removed = self._settings, time.time(), 0
        if settings.keep_unacked_days is not None:
            await self._state.give_up_groups(
                before=now - settings.keep_unacked_days * DAY_S, now=now
            )
        if settings.keep_days is not None:
            removed += await self._files_before(now - settings.keep_days * DAY_S)
        if settings.keep_rows_days is not None:
            before = now - settings.keep_rows_days * DAY_S
            removed += await self._files_before(before)
            while groups := await self._views.removable(Kept.ROWS, before=before, limit=PAGE):
                for group in groups:
                    await self._state.forget_rows(group["seq"])
        if settings.keep_gb is not None:
            removed += await self._files_beyond(settings.keep_gb * 1e9)
        return removed

    async def _files_before(self, before: float) -> int:
        removed = 0
        while groups := await self._views.removable(Kept.ALL, before=before, limit=PAGE):
            for group in groups:
                await self._remove_files(group)
            removed += len(groups)
        return removed

    async def _files_beyond(self, limit: float) -> int:
        """Remove the oldest groups' files until all of them take at most `limit` bytes."""
        removed = 0
        while (size := await self.size()) > limit:
            # As many as would do if all were of one size; then there is another look.
            share = (size - limit) / size * await self._views.kept_groups()
            count = min(PAGE, max(1, math.floor(share)))
            groups = await self._views.removable(Kept.ALL, before=None, limit=count)
            for group in groups:
                await self._remove_files(group)
            removed += len(groups)
            if not groups:
                break
        return removed

    async def size(self) -> int:
        """Bytes of all files that are kept."""
        return await self._views.file_bytes() + await self._workers.kept_bytes()

    async def _remove_files(self, group: Row) -> None:
        for session in await self._views.sessions(group["seq"]):
            if session["file"] is not None:
                await self._files.remove(session["file"])
            for attempt in range(1, session["attempt"] + 1):
                await self._workers.remove(run_id(session["session_id"], attempt))
        await self._state.forget_files(group["seq"])
