"""Benefit of routing: prefix-cache hits of sticky sessions, and replies that survive.

`cache`: sessions of an agent on two replicas, of the embedded engine or of a real vLLM, whose
prompts grow turn by turn, once with every session on one replica and once with every call where the
fewest run. From what was captured: the share of prompt tokens that came from a prefix cache, and
the tokens that were computed beyond each turn's new ones.

`seams`: the official SDK of each dialect reads a stream from a replica in a process of its own; in
the middle all replicas take new weights, and later that process is killed. What the clients read,
which tokens have which version, and how long no token came.

    python -m benchmarks.routing [cache|seams] [--sessions 16] [--turns 12] [--json]
    python -m benchmarks.routing cache --vllm     # after make test-vllm, which installs it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from benchmarks.embedded import make_model
from tests.gateway.test_failover import DIALECTS
from tests.vllm.serving import VllmServer
from tests.vllm.serving import make_model as make_small_model

from bridle.capture.store import MemoryStore
from bridle.config import SamplingPolicy
from bridle.embedded import EmbeddedEngine
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, RoutingSettings, make_replica
from bridle.engines.pool_routing import RoutingReason
from bridle.engines.vllm import VllmEngine
from bridle.gateway.app import GatewayServer
from bridle.gateway.registry import SessionHandle
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import PromptRenderer, load_renderer

SAMPLED = 24
"""Tokens per turn."""
RESULT = "a line of a file that somebody has read; "
"""About 11 tokens."""
LINES = 20
LONG = 600
"""Tokens of a reply that is interrupted."""


@asynccontextmanager
async def gateway(
    pool: EnginePool, folder: Path, *, stream: str
) -> AsyncIterator[tuple[GatewayServer, MemoryStore]]:
    """A gateway over `pool`."""
    store = MemoryStore()
    settings = GatewaySettings.model_validate({"stream": stream})
    renderer = load_renderer(str(folder))
    async with GatewayServer(
        engine=pool, renderer=renderer, store=store, settings=settings
    ) as served:
        yield served, store


def sampling(tokens: int) -> SamplingPolicy:
    """A policy of so many tokens a call."""
    return SamplingPolicy(max_output_tokens=tokens)


# ---- prefix cache


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One way of routing."""

    routing: str
    prompt_tokens: int
    hit_share: float
    """Prompt tokens that came from a prefix cache."""
    best_share: float
    """The same if each turn computed its new tokens only."""
    computed_again: float
    """Tokens per session that were computed though some turn had computed them before."""
    moved: int
    """Sticky sessions that changed their replica."""
    first_token_ms: float
    """Median."""
    seconds: float


async def cache_row(
    folder: Path, replicas: list[Replica], *, sticky: bool, sessions: int, turns: int
) -> CacheRow:
    """Run all sessions at once on the replicas, which remember nothing yet."""
    pool = EnginePool(replicas, settings=RoutingSettings(sticky=sticky))
    began = time.perf_counter()
    async with gateway(pool, folder, stream="whole") as (served, store):
        async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
            handles = [
                await served.open_session(sampling=sampling(SAMPLED)) for _ in range(sessions)
            ]
            for number, handle in enumerate(handles):
                group.create_task(one_session(client, handle, number, turns))
        seconds = time.perf_counter() - began
        moved = pool.routed[RoutingReason.SPILLED] + pool.routed[RoutingReason.MOVED]
    found = [store.exchanges(handle.session_id) for handle in handles]
    every = [exchange for exchanges in found for exchange in exchanges]
    prompt = sum(exchange.prompt_length for exchange in every)
    cached = sum(exchange.extra.get("cached_tokens", 0) for exchange in every)
    known = sum(exchange.kept for exchange in every)
    return CacheRow(
        routing="sticky" if sticky else "by load alone",
        prompt_tokens=prompt,
        hit_share=round(cached / prompt, 3),
        best_share=round(known / prompt, 3),
        computed_again=round((known - cached) / sessions, 1),
        moved=moved,
        first_token_ms=round(statistics.median(e.first_token_s or 0 for e in every) * 1e3, 1),
        seconds=round(seconds, 1),
    )


async def one_session(
    client: aiohttp.ClientSession, handle: SessionHandle, number: int, turns: int
) -> None:
    """An agent that reads a file a turn, and is at it about as long as the model was."""
    thinks = random.Random(number)  # noqa: S311 - no secret
    url = handle.base_urls["openai"] + "/chat/completions"
    headers = {"Authorization": f"Bearer {handle.key}"}
    messages: list[Any] = [
        {"role": "system", "content": f"Session {number}. " + RESULT * LINES},
        {"role": "user", "content": "Go."},
    ]
    for turn in range(turns):
        body = {"model": "m", "messages": messages}
        began = time.perf_counter()
        async with client.post(url, json=body, headers=headers) as answer:
            reply = (await answer.json())["choices"][0]["message"]
        await asyncio.sleep(thinks.uniform(0, 2) * (time.perf_counter() - began))
        messages += [reply, {"role": "user", "content": f"Result {turn}: " + RESULT * LINES}]


async def cache(
    folder: Path, fresh: Callable[[], list[Replica]], sessions: int, turns: int
) -> list[CacheRow]:
    """Both ways of routing, each on what `fresh` gives."""
    rows = []
    for sticky in (False, True):
        row = await cache_row(folder, fresh(), sticky=sticky, sessions=sessions, turns=turns)
        rows.append(row)
    return rows


def embedded_cache(folder: Path, sessions: int, turns: int) -> list[CacheRow]:
    """On the embedded engine, both replicas in this process."""
    make_model(folder)

    def fresh() -> list[Replica]:
        return [Replica(name, EmbeddedEngine(folder, device="cpu")) for name in ("a", "b")]

    return asyncio.run(cache(folder, fresh, sessions, turns))


BLOCK = 32
"""Tokens that vLLM's cache holds or lacks together; a CPU takes no fewer."""


def vllm_cache(folder: Path, sessions: int, turns: int) -> list[CacheRow]:
    """On two real vLLM servers of a small model."""
    make_small_model(folder)
    with ExitStack() as stack:
        servers = []
        for name in ("a", "b"):
            folder.with_name(name).mkdir()
            servers.append(stack.enter_context(VllmServer(folder.with_name(name), folder)))
        with ThreadPoolExecutor() as both:
            list(both.map(lambda server: server.running("--block-size", str(BLOCK)), servers))

        def fresh() -> list[Replica]:
            for server in servers:
                server.call("POST", "/reset_prefix_cache")
            return [make_replica(server.url, VllmEngine) for server in servers]

        return asyncio.run(cache(folder, fresh, sessions, turns))


# ---- seams


@dataclass(frozen=True, slots=True)
class SeamRow:
    """One dialect over one interruption."""

    event: str
    dialect: str
    clean: bool
    """Whether the client read, without an error, what was captured."""
    tokens: int
    seam: int
    """Tokens before it."""
    versions: list[int]
    gap_ms: float | None
    """From the event to the first token after it; `None` = the reply had ended."""


class Server:
    """`bridle engine embedded:DIR` in a process of its own."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        command = [sys.executable, "-m", "bridle.cli", "engine", f"embedded:{folder}"]
        self._popen = stack.enter_context(
            subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
        )
        stack.callback(self.kill)

    def url(self) -> str:
        """Return its address, once it listens."""
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            if found := re.search(r"at (http://\S+?);", line):
                return found[1]
        raise RuntimeError("the engine did not start")

    def kill(self) -> None:
        """`kill -9`."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)


class Watch:
    """Tokens that each session received, and the time of the first one after a seam."""

    def __init__(self, pool: EnginePool, sessions: list[str]) -> None:
        self._pool = pool
        self._wanted = sessions
        self.before: dict[str, int] = {}
        self.resumed_at: dict[str, float] = {}

    def look(self) -> None:
        """Take note of all calls that run."""
        for one in self._pool.each():
            for call in one.running.values():
                session = call.request.session_id or ""
                if not call.given or session not in self._wanted:
                    continue
                if call.request.request_id.endswith("-1"):
                    self.resumed_at.setdefault(session, time.perf_counter())
                else:
                    self.before[session] = call.given

    async def until(self, least: int) -> None:
        """Wait until every session has so many tokens, or had fewer in all."""
        while len(self.before) < len(self._wanted) or self._few(least):
            self.look()
            await asyncio.sleep(0.001)

    def _few(self, least: int) -> bool:
        """Return whether a running call has fewer tokens than `least`."""
        calls = (call for one in self._pool.each() for call in one.running.values())
        return any(call.given < least for call in calls)

    async def run(self, calls: Sequence[asyncio.Task[str]]) -> None:
        """Look until every session goes on, or its call has ended."""
        while len(self.resumed_at) < len(self._wanted) and not all(call.done() for call in calls):
            self.look()
            await asyncio.sleep(0.001)


async def interrupted(
    served: GatewayServer,
    renderer: PromptRenderer,
    store: MemoryStore,
    pool: EnginePool,
    event: str,
    act: Callable[[], Awaitable[None]],
) -> list[SeamRow]:
    """All dialects at once on the first replica, interrupted by `act`."""
    first = pool.each()[0]
    callers = []
    for _ in DIALECTS:
        handle = await served.open_session(sampling=sampling(LONG))
        pool._router.pick(handle.session_id, [first])  # noqa: SLF001 - all on one, to be killed
        callers.append(Caller(handle))
    watch = Watch(pool, [caller.handle.session_id for caller in callers])
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(caller, stream=True))
            for ask, caller in zip(DIALECTS, callers, strict=True)
        ]
        await watch.until(20)
        at = time.perf_counter()
        watching = group.create_task(watch.run(tasks))
        await act()
        await watching
    rows = []
    for ask, caller, task in zip(DIALECTS, callers, tasks, strict=True):
        session_id = caller.handle.session_id
        (exchange,) = store.exchanges(session_id)
        resumed = watch.resumed_at.get(session_id)
        text = renderer.parse(
            exchange.output_ids,
            tools=(),
            prompt_tail=exchange.suffix_ids[-64:],
            finish=exchange.finish_reason,
            stop_text=None,
        ).content
        rows.append(
            SeamRow(
                event=event,
                dialect=ask.__name__,
                clean=task.result().strip() == text.strip(),
                tokens=len(exchange.output_ids),
                seam=watch.before[session_id],
                versions=[span.version for span in exchange.versions],
                gap_ms=None if resumed is None else round((resumed - at) * 1e3, 1),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Caller:
    """Interface of the clients of `DIALECTS`."""

    handle: SessionHandle


async def seams(folder: Path, newer: Path) -> list[SeamRow]:
    """New weights, then a killed replica."""
    make_model(folder)
    make_model(newer)
    with ExitStack() as stack:
        servers = [Server(stack, folder) for _ in range(2)]
        urls = [server.url() for server in servers]
        pool = EnginePool([make_replica(url, VllmEngine) for url in urls])
        async with gateway(pool, folder, stream="live") as (served, store):
            renderer = load_renderer(str(folder))

            async def update() -> None:
                await pool.update_weights(newer, 1, mode="abort")

            async def kill() -> None:
                servers[0].kill()

            rows = await interrupted(served, renderer, store, pool, "new weights", update)
            return rows + await interrupted(served, renderer, store, pool, "replica killed", kill)


def show(rows: list[Any]) -> None:
    """A Markdown table."""
    names = list(asdict(rows[0]))
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(str(value) for value in asdict(row).values()) + " |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("cache", "seams"))
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--vllm", action="store_true", help="the cache part on real vLLM servers")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if given.part in {None, "cache"}:
            measured = vllm_cache if given.vllm else embedded_cache
            found["cache"] = measured(Path(scratch, "cached"), given.sessions, given.turns)
        if given.part in {None, "seams"}:
            found["seams"] = asyncio.run(seams(Path(scratch, "model"), Path(scratch, "newer")))
    if given.json:
        print(json.dumps({part: [asdict(row) for row in rows] for part, rows in found.items()}))
        return
    for rows in found.values():
        show(rows)
        print()


if __name__ == "__main__":
    main()
