"""Cost of a session's first call in the gateway, rendered by Bridle or by the engine.

A root of `--context` tokens is rendered and tokenised whole. With `--prompt renderer` the gateway
does that; with `--prompt engine` it asks the engine, a process of its own here, for the ids of the
messages and samples under them. CPU is that of the gateway's process, its client's included, which
is the same in both.

    python benchmarks/roots.py [--context 16000] [--sessions 20] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from gateway_parts import words

from bridle.capture.store import MemoryStore
from bridle.engines.vllm import VllmEngine
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import load_renderer

WAYS = ("renderer", "engine")
SCRIPT = {"context_length": 200_000, "conversations": [{"turns": [{"content": "word " * 127}]}]}


@contextmanager
def engine() -> Iterator[str]:
    """A scripted engine in a process of its own; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        path.write_text(json.dumps(SCRIPT))
        command = [sys.executable, "-m", "bridle.cli", "engine", f"scripted:{path}", "--port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            found = re.search(r"http://[\d.]+:\d+", process.stderr.readline())
            assert found is not None, "the engine did not start"
            yield found[0]
        finally:
            process.terminate()
            process.wait(10)


async def play(url: str, prompt: str, context: int, sessions: int) -> list[float]:
    """CPU of each session's first call, in ms."""
    settings = GatewaySettings.model_validate({"prompt": prompt})
    gateway = GatewayServer(
        engine=VllmEngine(url),
        renderer=load_renderer("builtin"),
        store=MemoryStore(),
        settings=settings,
    )
    spent = []
    async with gateway, aiohttp.ClientSession() as client:
        for number in range(sessions):
            handle = await gateway.open_session()
            seed = time.perf_counter_ns() + number
            # No two sessions begin alike, or the tokenizer would remember the text.
            text = f"Go {seed}. {words(context, seed)}"
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            headers = {"Authorization": f"Bearer {handle.key}"}
            began = time.process_time()
            where = handle.base_urls["openai"] + "/chat/completions"
            async with client.post(where, json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
            spent.append(1000 * (time.process_time() - began))
    return spent


async def main() -> None:
    """Take turns, and print the medians over the rounds; the first calls are thrown away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with engine() as url:
        for _ in range(options.rounds):
            for way in WAYS:
                spent = await play(url, way, options.context, options.sessions)
                found[way].append(statistics.median(spent[2:] or spent))
    for way, rounds in found.items():
        print(f"{way}: {statistics.median(rounds):.1f} ms of CPU a root")


if __name__ == "__main__":
    asyncio.run(main())
