"""The time of a copy that a session is scored in, beside `cp -a` of the same files.

    python benchmarks/snapshots.py [--backend docker --image NAME] [--files 500] [--mib 16]

`left` copies the work folder out of a session, `with_work` makes a fresh runtime hold it, `whole`
copies the runtime. None of it happens in a run slot.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bridle.config import RuntimeSpec
from bridle.lifecycle.places import kept
from bridle.runtimes import make_runtime
from bridle.runtimes.base import Runtime

FILL = "for ((i = 0; i < {files}; i++)); do printf %{size}s >x$i; done"


async def p50(work: Callable[[Path], Awaitable[object]], folder: Path, times: int) -> float:
    """Median of the milliseconds of `times` calls, each with a folder of its own."""
    took = []
    for _ in range(times):
        place = folder / secrets.token_hex(4)
        began = time.perf_counter()
        await work(place)
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds by name."""
    spec = RuntimeSpec(backend=options.backend, image=options.image)

    async def started() -> Runtime:
        scratch = folder / secrets.token_hex(4)
        await asyncio.to_thread(scratch.mkdir)
        runtime = make_runtime(spec, f"bench-{secrets.token_hex(4)}", scratch)
        await runtime.start()
        return runtime

    async def whole(place: Path) -> None:
        await asyncio.to_thread(place.mkdir)
        await (await agents.copied(place)).stop()

    agents, fresh = await started(), await started()
    try:
        size = (options.mib << 20) // options.files
        filled = await agents.exec(FILL.format(files=options.files, size=size))
        assert filled.ok, filled.stderr
        await agents.kill()
        left = folder / "left"
        await agents.snapshot(left)

        async def copied(place: Path) -> None:
            await asyncio.to_thread(subprocess.run, ["cp", "-a", left, place], check=True)

        return {
            "cp -a": await p50(copied, folder, options.times),
            "left": await p50(agents.snapshot, folder, options.times),
            "with_work": await p50(
                lambda _place: fresh.put_work(left, kept([])), folder, options.times
            ),
            "whole, with start and stop": await p50(whole, folder, options.times),
        }
    finally:
        await agents.stop()
        await fresh.stop()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument("--image")
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--times", type=int, default=11)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    print(f"{options.backend}, {options.files} files, {options.mib} MiB: p50 in ms")
    for name, milliseconds in found.items():
        print(f"{name:28} {milliseconds:8.1f}")


if __name__ == "__main__":
    main()
