"""Function calls of one linear turn in the gateway's event loop: what no load of a machine moves.

Engine, client and gateway share one loop; what the benchmark itself calls is not counted, nor what
the store's thread does. A call is one of a Python function or of a builtin. `files`, `moves` (calls
that enter another file than the call before) and `functions` are Bridle's own.

    python -m benchmarks.gateway_counts [--tools 30] [--context 2000] [--paced] [--names 60]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvloop
from benchmarks.gateway_sessions import DIALECTS, TURNS, Player, Way

import bridle
from benchmarks import gateway_parts as parts
from bridle.capture import sqlite

OURS = str(Path(__file__).parent)
BRIDLE = str(Path(bridle.__file__).parent)
WARM = 5
"""Turns before the counted ones."""
COUNTED = 5


class Counts(NamedTuple):
    """Function calls of linear turns."""

    calls: int
    """Of one turn (the median)."""
    names: Counter[str]
    """Of all `COUNTED` turns, by function."""
    path: list[str]
    """Bridle's functions, in the order of their calls in these turns."""

    def text(self) -> str:
        """Return the numbers of one turn as a line."""
        files = [name.partition(":")[0] for name in self.path]
        moves = sum(one != other for one, other in itertools.pairwise(files))
        return (
            f"{self.calls} calls, {len(set(files))} files, {round(moves / COUNTED)} moves, "
            f"{len(set(self.path))} functions a turn"
        )


class Profile:
    """Calls by name, but for those of the benchmark's own functions and all that they call."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.path: list[str] = []
        """Bridle's functions in the order of their calls."""
        self._skipped: FrameType | None = None
        """The benchmark's function that runs."""

    def saw(self, frame: FrameType, event: str, called: Any) -> None:  # noqa: ANN401 - a builtin, or none
        """Take an event of `sys.setprofile`."""
        if self._skipped is not None:
            if event == "return" and frame is self._skipped:
                self._skipped = None
        elif event == "call" and frame.f_code.co_filename.startswith(OURS):
            self._skipped = frame
        elif event == "call":
            name = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
            self.names[name] += 1
            if name.startswith(BRIDLE):
                self.path.append(name)
        elif event == "c_call" and not frame.f_code.co_filename.startswith(OURS):
            self.names[f"{getattr(called, '__module__', '')}.{called.__qualname__}"] += 1


async def count_calls(
    way: Way, folder: str, *, context: int = 2_000, tools: int = 0, paced: bool = False
) -> Counts:
    """Count the calls of linear turns."""
    totals = []
    profile = Profile()
    found = profile.names
    async with (
        parts.instant_engine(paced=paced) as engine,
        parts.gateway(engine, folder, stream="live" if way.reply == "live" else "whole") as served,
        Player(way, context, tools, served.url, str(served.control_token)) as player,
    ):
        for _ in range(WARM):
            await player.turn()
        sys.setprofile(profile.saw)
        try:
            for _ in range(COUNTED):
                before = found.total()
                await player.turn()
                totals.append(found.total() - before)
        finally:
            sys.setprofile(None)
        for _ in range(TURNS - WARM - COUNTED):
            await player.turn()
        await asyncio.to_thread(parts.check_extended, served.url, str(served.control_token), TURNS)
    return Counts(round(statistics.median(totals)), found, profile.path)


def calls_a_turn(way: Way, *, context: int = 2_000, tools: int = 0, paced: bool = False) -> Counts:
    """Count the calls of linear turns.

    With `paced`, each sampled token of a stream is read from the engine by itself.
    The end of one turn may run in the next one, so a mean would miss some or have some too many.
    """
    # After a slow write the store's thread would write for some seconds, which takes other calls;
    # and a delivery is written apart where a busy machine takes its time for the next exchange.
    patience, sqlite.HELD_UP_S = sqlite.HELD_UP_S, math.inf
    later, sqlite.LATER_S = sqlite.LATER_S, 60.0
    try:
        with tempfile.TemporaryDirectory() as folder:
            return uvloop.run(count_calls(way, folder, context=context, tools=tools, paced=paced))
    finally:
        sqlite.HELD_UP_S, sqlite.LATER_S = patience, later


def main() -> None:
    """Count for all dialects and replies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=list(DIALECTS)[:1], choices=list(DIALECTS))
    parser.add_argument("--replies", nargs="+", default=["json", "whole", "live"])
    parser.add_argument("--context", type=int, default=2_000)
    parser.add_argument("--tools", type=int, default=30)
    parser.add_argument("--paced", action="store_true", help="read each sampled token by itself")
    parser.add_argument("--names", type=int, default=0, help="show so many of what was called")
    options = parser.parse_args()
    for name in options.ways:
        for reply in options.replies:
            way = Way(name, reply)
            counts = calls_a_turn(
                way, context=options.context, tools=options.tools, paced=options.paced
            )
            print(f"{way}: {counts.text()}")
            for called, count in counts.names.most_common(options.names):
                print(f"  {count / COUNTED:6.1f}  {called}")


if __name__ == "__main__":
    main()
