"""Cost of a runtime: its start, one command, its end; Docker beside plain `docker run`.

Everything is done in turns, one of each kind after another, so that what else the machine does
falls on all alike. Medians of wall-clock milliseconds; the processor time is this process's own and
that of what it started and collected.

    python -m benchmarks.runtimes [--rounds 30] [--backends local,bubblewrap,docker] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.sandbox.images import put_image

from bridle.config import RuntimeSpec
from bridle.runtimes import make_runtime
from bridle.runtimes.docker import docker

Spans = dict[str, float]
"""Part -> seconds."""


def _cpu_s() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(each)[:2]) for each in who)


async def one_life(spec: RuntimeSpec) -> Spans:
    """Start a runtime, run `true` in it, stop it."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as scratch:
        runtime = make_runtime(spec, f"bench-{secrets.token_hex(4)}", Path(scratch))
        began, cpu = time.perf_counter(), _cpu_s()
        try:
            await runtime.start()
            started = time.perf_counter()
            result = await runtime.exec("true")
            assert result.ok, result
            done = time.perf_counter()
        finally:
            await runtime.stop()
        ended = time.perf_counter()
    return {
        "start": started - began,
        "exec": done - started,
        "stop": ended - done,
        "start+stop": started - began + ended - done,
        "whole": ended - began,
        "cpu": _cpu_s() - cpu,
    }


async def plain_docker(image: str) -> Spans:
    """`docker run --rm IMAGE true`."""
    began = time.perf_counter()
    await docker(["run", "--rm", "--network", "none", image, "true"])
    return {"whole": time.perf_counter() - began}


async def measure(backends: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Kind -> part -> median milliseconds."""
    kinds: dict[str, Callable[[], Awaitable[Spans]]] = {}
    for backend in backends:
        spec = RuntimeSpec(backend=backend)
        if backend == "docker":
            image = await asyncio.to_thread(put_image)
            spec = RuntimeSpec(backend=backend, image=image)
            kinds["docker run"] = lambda image=image: plain_docker(image)
        kinds[backend] = lambda spec=spec: one_life(spec)
    seen: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
    for number in range(rounds + 1):
        for kind, live in kinds.items():
            for part, seconds in (await live()).items():
                if number:  # the first of each finds nothing in memory
                    seen[kind][part].append(seconds * 1000)
    return {
        kind: {part: round(statistics.median(each), 1) for part, each in parts.items()}
        for kind, parts in seen.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backends", default="local,bubblewrap,docker")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    medians = asyncio.run(measure(asked.backends.split(","), asked.rounds))
    if asked.json:
        print(json.dumps(medians, indent=2))
        return
    parts = ("start", "exec", "stop", "start+stop", "whole", "cpu")
    print(f"medians of {asked.rounds}, ms  " + "".join(f"{part:>12}" for part in parts))
    for kind, found in medians.items():
        print(f"{kind:22}" + "".join(f"{found.get(part, '-')!s:>12}" for part in parts))


if __name__ == "__main__":
    main()
