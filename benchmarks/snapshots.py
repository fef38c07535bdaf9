"""The time of the copies that a session is scored in, beside plain programs on the same files.

    python benchmarks/snapshots.py [--backend docker --image NAME] [--files 500] [--mib 16]

`left` copies the work folder out of a session; `with_work` makes a fresh runtime hold it, which is
empty at first and then has as many files of its own; `whole` copies the runtime and starts the
copy. Beside them, in turns: `cp -a`, for Docker `docker cp` both ways and `docker commit` with
`docker run`. None of it happens in a run slot.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

from bridle.config import RuntimeSpec
from bridle.node.workspace import keep_filter
from bridle.runtimes import make_runtime
from bridle.runtimes.base import Runtime
from bridle.runtimes.docker import SESSION_LABEL, docker
from bridle.runtimes.process import Command, run_process

FILL: Final = "for ((i = 0; i < {files}; i++)); do printf %{size}s >x$i; done"
BESIDE: Final = {
    "bubblewrap": dict.fromkeys(("left", "with_work, empty", "with_work, full", "whole"), "cp -a"),
    "docker": {
        "left": "docker cp out",
        "with_work, empty": "docker cp in",
        "with_work, full": "docker cp in",
        "whole": "docker commit, run",
    },
}
"""The plain program that each copy is compared with."""


class Bench:
    """An agent's runtime with files in it, and the milliseconds of every copy by its name."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.spec = RuntimeSpec(backend=options.backend, image=options.image)
        self.folder = folder
        self.took: dict[str, list[float]] = defaultdict(list)

    def place(self) -> Path:
        """A path that is free."""
        return self.folder / secrets.token_hex(4)

    async def started(self, name: str) -> Runtime:
        """A fresh runtime of the session `name`."""
        scratch = self.place()
        await asyncio.to_thread(scratch.mkdir)
        runtime = make_runtime(self.spec, name, scratch)
        await runtime.start()
        return runtime

    async def time(self, name: str, work: Awaitable[object]) -> None:
        """Take the time of `work`."""
        began = time.perf_counter()
        await work
        self.took[name].append((time.perf_counter() - began) * 1000)

    async def ours(self, agents: Runtime, left: Path) -> None:
        """One round of our copies."""
        await self.time("left", agents.snapshot(self.place()))
        fresh = await self.started(f"bench-{secrets.token_hex(4)}")
        await self.time("with_work, empty", fresh.put_work(left, keep_filter([])))
        await self.time("with_work, full", fresh.put_work(left, keep_filter([])))
        await fresh.stop()
        scratch, copies = self.place(), []
        await asyncio.to_thread(scratch.mkdir)

        async def copy() -> None:
            copies.append(await agents.copied(scratch))

        await self.time("whole", copy())
        await copies[0].stop()

    async def plain(self, name: str, left: Path) -> None:
        """One round of the plain programs; `name` is the agent's session."""
        await self.time("cp -a", run(["cp", "-a", str(left), str(self.place())]))
        if self.spec.backend != "docker":
            return
        words = ["ps", "--all", "--quiet", "--filter", f"label={SESSION_LABEL}={name}"]
        agents = (await docker(words)).split()[0]
        await self.time("docker cp out", docker(["cp", f"{agents}:/work", str(self.place())]))
        image, fresh = f"bench-{secrets.token_hex(4)}", f"bench-{secrets.token_hex(4)}"

        async def commit_and_run() -> None:
            await docker(["commit", agents, image])
            await docker(["run", "--detach", "--name", fresh, image, "sleep", "600"])

        await self.time("docker commit, run", commit_and_run())
        await docker(["exec", fresh, "mkdir", "/new"])
        await self.time("docker cp in", docker(["cp", f"{left}/.", f"{fresh}:/new"]))
        await docker(["rm", "--force", fresh])
        await docker(["image", "rm", image])


async def run(argv: list[str]) -> None:
    """Run a program of this machine, as `docker` is run."""
    done = await run_process(Command(argv=argv, cwd="/", env={"PATH": os.environ["PATH"]}))
    assert done.ok, done.stderr


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each round, by name."""
    bench, name = Bench(options, folder), f"bench-{secrets.token_hex(4)}"
    agents = await bench.started(name)
    try:
        size = (options.mib << 20) // options.files
        filled = await agents.exec(FILL.format(files=options.files, size=size))
        assert filled.ok, filled.stderr
        await agents.kill()
        left = folder / "left"
        await agents.snapshot(left)
        for _ in range(options.times):
            await bench.plain(name, left)
            await bench.ours(agents, left)
    finally:
        await agents.stop()
    return bench.took


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="bubblewrap", choices=sorted(BESIDE))
    parser.add_argument("--image")
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--times", type=int, default=11)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        took = asyncio.run(measure(options, Path(folder)))
    print(f"{options.backend}, {options.files} files, {options.mib} MiB, {options.times} rounds")
    print(f"{'':20} p50, ms   most   beside, ratio of each round's p50   load {os.getloadavg()[0]}")
    for name, times in took.items():
        line = f"{name:20} {statistics.median(times):7.0f} {max(times):6.0f}"
        if plain := BESIDE[options.backend].get(name):
            ratios = [one / other for one, other in zip(times, took[plain], strict=True)]
            line += f"   {plain}, {statistics.median(ratios):.2f}"
        print(line)


if __name__ == "__main__":
    main()
