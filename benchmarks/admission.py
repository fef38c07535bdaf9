"""Attacks on a gateway by one session's key: does `/health` answer, and what memory do they take?

Starts `bridle gateway` with the scripted engine as a process, asks `/health` every 20 ms, sends one
attack after the other with a bystander's calls beside it, and prints for each attack the status of
its requests, `/health` p50, p99 and the longest, the bystander's calls, and the process's memory
before and at its highest. `--times` sends an attack so often to one process and judges all answers
together. Last it sends SIGTERM in the middle of an attack and times the end.

    python benchmarks/admission.py [--folder DIR] [--times N] [ATTACK ...]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import io
import json
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import aiohttp

from bridle.aio import Nursery

MIB = 1 << 20
SPAWN = get_context("spawn")
TURNS = {"conversations": [{"turns": [{"content": "done"}]}]}
Attack = Callable[["Attacked"], Awaitable[list[int]]]


@dataclass
class Attacked:
    """A gateway process, an attacker's session and a bystander's."""

    url: str
    pid: int
    client: aiohttp.ClientSession
    attacker: str
    bystander: str
    calls: int = 0
    """The bystander's answered calls."""

    async def post(self, key: str, body: bytes, **headers: str) -> int:
        """The status of one call; 0 = the connection broke."""
        url = f"{self.url}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}", **headers}
        try:
            data = io.BytesIO(body)  # sent in pieces
            async with self.client.post(url, data=data, headers=headers) as response:
                await response.read()
                return response.status
        except aiohttp.ClientError:
            return 0

    def memory(self, name: str) -> float:
        """`VmRSS` or `VmHWM` of the process in MiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else 0.0

    async def stand_by(self) -> None:
        """Call as a harness does."""
        while True:
            self.calls += await self.post(self.bystander, body_of("go on")) == 200
            await asyncio.sleep(0.05)


def watch(url: str, over: Event, found: Queue[tuple[list[float], int]]) -> None:
    """Ask `/health` every 20 ms, in a process of its own, which the attack does not hold up."""
    took, failed = [], 0
    while not over.wait(0.02):
        begun = time.perf_counter()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60):  # noqa: S310 - our own address
                pass
        except OSError:
            failed += 1
        took.append(1000 * (time.perf_counter() - begun))
    found.put((took, failed))


def body_of(text: str) -> bytes:
    """A call with one user message."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


async def bomb(on: Attacked) -> list[int]:
    """47 KiB of gzip that hold 47 MiB of one letter."""
    raw = gzip.compress(body_of("a" * (47 * MIB)))
    return [await on.post(on.attacker, raw, **{"Content-Encoding": "gzip"}) for _ in range(3)]


async def one_letter(on: Attacked) -> list[int]:
    """200 MiB of one letter."""
    raw = body_of("a" * (200 * MIB))
    return [await on.post(on.attacker, raw)]


async def largest(on: Attacked) -> list[int]:
    """The largest body that is taken, of one letter, and one of words."""
    letters, words = body_of("a" * (31 * MIB)), body_of("some words in a row, " * (31 * MIB // 21))
    return [await on.post(on.attacker, raw) for raw in (letters, words)]


async def within_bounds(on: Attacked) -> list[int]:
    """Send texts as long as the context allows, of one word and of many, four at a time."""
    texts = ["a" * (2 * MIB), "some words in a row, " * (2 * MIB // 21)]
    async with asyncio.TaskGroup() as group:
        calls = [on.post(on.attacker, body_of(text)) for text in texts * 2]
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def messages(on: Attacked) -> list[int]:
    """A million empty messages, and 10,000."""
    found = []
    for count in (1_000_000, 10_000):
        one = {"role": "user", "content": ""}
        raw = json.dumps({"model": "m", "messages": [one] * count}).encode()
        found.append(await on.post(on.attacker, raw))
    return found


async def values(on: Attacked) -> list[int]:
    """Two million fields, a million parts of one message, and as many fields as are taken."""
    go = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    parts = [{"role": "user", "content": [{"type": "text", "text": ""}] * 1_000_000}]
    bodies = [
        {**go, **{f"field{number}": 0 for number in range(2_000_000)}},
        {"model": "m", "messages": parts},
        {**go, **{f"field{number}": 0 for number in range(240_000)}},
    ]
    return [await on.post(on.attacker, json.dumps(body).encode()) for body in bodies]


async def half_requests(on: Attacked) -> list[int]:
    """900 half requests, held for five seconds."""
    host, _, port = on.url.removeprefix("http://").partition(":")
    held = []
    for _ in range(900):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            held.append(writer)
    await asyncio.sleep(5)
    for writer in held:
        writer.close()
    return [len(held)]


ATTACKS: tuple[Attack, ...] = (
    bomb,
    one_letter,
    largest,
    within_bounds,
    messages,
    values,
    half_requests,
)


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[tuple[Attacked, asyncio.subprocess.Process]]:
    """Start a gateway process with two open sessions."""
    script = folder / "script.json"
    script.write_text(json.dumps(TURNS))
    command = ("-m", "bridle.cli", "gateway", "--engine", f"scripted:{script}", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            *command,
            "--tokenizer",
            "builtin",
            "--data",
            str(folder / "data"),
            "--json",
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    said = json.loads(await process.stdout.readline())
    token = (await asyncio.to_thread(Path(said["control_token"]).read_text)).strip()
    timeout = aiohttp.ClientTimeout(total=600)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client:
            keys = []
            for _ in range(2):
                headers = {"Authorization": f"Bearer {token}"}
                url = f"{said['control_url']}/sessions"
                async with client.post(url, json={}, headers=headers) as response:
                    keys.append((await response.json())["key"])
            yield Attacked(said["url"], process.pid, client, *keys), process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def latency_text(took: list[float], failed: int) -> str:
    """The numbers of `/health`."""
    took = sorted(took)
    p50, p99 = took[len(took) // 2], took[int(0.99 * (len(took) - 1))]
    return f"{len(took):5} {p50:7.1f} {p99:8.1f} {took[-1]:8.1f} {failed:6}"


async def measure(attack: Attack, folder: Path, times: int) -> None:
    """Print the line of one attack that is sent `times` times."""
    async with attacked(folder) as (on, _):
        await on.post(on.bystander, body_of("go"))
        before, begun = on.memory("VmRSS"), time.perf_counter()
        over, answers = SPAWN.Event(), SPAWN.Queue()
        watching = SPAWN.Process(target=watch, args=(on.url, over, answers))
        watching.start()
        async with Nursery(print) as nursery:
            nursery.start(on.stand_by(), name="bystander")
            for _ in range(times):
                found = await attack(on)
                await asyncio.sleep(1)
        seconds = time.perf_counter() - begun
        over.set()
        health = latency_text(*await asyncio.to_thread(answers.get))
        line = f"{attack.__name__:14} {','.join(map(str, found)):16} {seconds:6.1f} {health}"
        print(f"{line} {on.calls:6} {before:7.0f} {on.memory('VmHWM'):7.0f}", flush=True)


async def end(folder: Path) -> None:
    """Print how long a gateway takes to end in the middle of an attack."""
    async with attacked(folder) as (on, process):
        async with Nursery(print) as nursery:
            nursery.start(within_bounds(on), name="attack")
            await asyncio.sleep(0.5)
            begun = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            code = await process.wait()
        print(f"SIGTERM in an attack: ended with {code} after {time.perf_counter() - begun:.1f} s")


async def main(folder: Path, names: list[str], times: int) -> None:
    """Run all attacks."""
    print(
        "attack         statuses         seconds health  p50 ms   p99 ms  most ms failed  calls "
        " before highest MiB"
    )
    for attack in ATTACKS:
        if not names or attack.__name__ in names:
            (folder / attack.__name__).mkdir(parents=True)
            await measure(attack, folder / attack.__name__, times)
    (folder / "end").mkdir()
    await end(folder / "end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", choices=[[], *(one.__name__ for one in ATTACKS)])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--times", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        asyncio.run(main(Path(made), given.attacks, given.times))
