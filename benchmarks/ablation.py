"""Training cost by builder: the same captured sessions of many turns, trained three ways.

The demo model samples long conversations through the gateway; then the trainer makes its updates
from the traces of `per_request`, of `prefix_merging`, and of the latter packed as trees. Engine and
trainer alternate, so the engine's busy share is generation over generation and training. An update
takes a fixed number of traces, as trainers do. CPU time of this process with one thread; wall time
with more (`--threads 2`, on a quiet machine), which engine and trainer then both have. The bound is
what the same tokens would cost if each were computed once.

    python -m benchmarks.ablation --sessions 8 --turns 32 64
    python -m benchmarks.ablation --sessions 2 4 8 16 --turns 16 32 64 --ways prefix_merging
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch
from examples.demo.model import demo_model

from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import load_config, open_setup
from bridle.config import BuilderSpec, SamplingPolicy
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.training.forward import chosen, rows_of, trees_of
from bridle.training.grpo import Learner
from bridle.training.samples import Batch, Group, make_batch
from bridle.training.settings import GrpoSettings
from bridle.trajectory import rebuild
from bridle.trajectory.sample import Trajectory
from bridle.types import SessionStatus

OUTPUT_TOKENS = 24
"""Sampled tokens of a turn, at most."""


@dataclass(frozen=True)
class Way:
    """One way to train on what was captured."""

    name: str
    builder: str
    settings: GrpoSettings


def clock(threads: int) -> float:
    """Seconds: CPU time of one thread says more on a busy machine."""
    return time.process_time() if threads == 1 else time.perf_counter()


def ways(batch_tokens: int, threads: int) -> list[Way]:
    """The three of the table; traces may be longer than what is computed at once."""
    rows = GrpoSettings(learning_rate=1e-6, batch_tokens=batch_tokens, threads=threads)
    tree = rows.model_copy(update={"packing": "tree"})
    return [
        Way("per_request", "per_request", rows),
        Way("prefix_merging", "prefix_merging", rows),
        Way("tree", "prefix_merging", tree),
    ]


async def capture(model: Path, folder: Path, sessions: int, turns: int, threads: int) -> float:
    """Play conversations of `turns` calls at once; seconds of the generation."""
    setup = open_setup(load_config(None, engines=[f"embedded:{model}"]))
    store = await SqliteStore.open(folder / "capture.sqlite")
    gateway = GatewayServer(
        engine=setup.engine, renderer=setup.renderer, store=store, settings=GatewaySettings()
    )
    async with store, gateway, aiohttp.ClientSession() as http:
        began = clock(threads)
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(play(gateway, store, http, number, turns))
        return clock(threads) - began


async def play(
    gateway: GatewayServer, store: SqliteStore, http: aiohttp.ClientSession, number: int, turns: int
) -> None:
    """One conversation; the harness shows a new line after each reply."""
    policy = SamplingPolicy(max_output_tokens=OUTPUT_TOKENS)
    session = f"s{number}"
    handle = await gateway.open_session(session, sampling=policy)
    url = f"{handle.base_urls['openai']}/chat/completions"
    headers = {"Authorization": f"Bearer {handle.key}"}
    messages: list[object] = [{"role": "user", "content": "which number does each file hold?"}]
    for turn in range(turns):
        async with http.post(
            url, json={"model": "m", "messages": messages}, headers=headers
        ) as got:
            got.raise_for_status()
            reply = (await got.json())["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": f"file {turn} of {number} holds {turn}"}]
    await gateway.seal(session)
    ended = Outcome(session, SessionStatus.COMPLETED, ended_at=time.time(), reward=number % 2)
    await store.close_session(ended)


async def sessions_of(folder: Path, builder: str) -> tuple[Trajectory, ...]:
    """The captured sessions, built in one way."""
    store = await SqliteStore.open(folder / "capture.sqlite")
    async with store:
        spec = BuilderSpec(strategy=builder)
        captures = [store.read(one.session_id) for one in store.sessions()]
        return tuple(rebuild(one, builder=spec) for one in captures)


def batches(batch: Batch, size: int) -> list[Batch]:
    """A batch in pieces of at most `size` traces, each an update of its own."""
    samples = batch.samples
    return [
        Batch(samples[at : at + size], batch.version, batch.sessions, {}, batch.lags)
        for at in range(0, len(samples), size)
    ]


def measure(way: Way, model: Path, group: Group, size: int) -> tuple[int, int, int, float]:
    """Updates, traces, tokens computed and seconds of training on a group."""
    learner = Learner.load(model, way.settings)
    whole = make_batch([group], way.settings, version=0)
    pieces = batches(whole, size)
    threads = way.settings.threads or 1
    began = clock(threads)
    computed = sum(learner.update(piece).computed for piece in pieces)
    return len(pieces), len(whole.samples), computed, clock(threads) - began


def bound(group: Group) -> tuple[int, int]:
    """Tokens of the group if each were computed once, and how many of them were sampled."""
    batch = make_batch([group], GrpoSettings(), version=0)
    return sum(tree.computed for tree in trees_of(batch.samples, 1 << 40)), batch.tokens


def agree(model: Path, group: Group) -> float:
    """Largest difference between both layouts' logprobs and the rollout's, nats."""
    learner = Learner.load(model, GrpoSettings(threads=1))
    samples = make_batch([group], GrpoSettings(), version=0).samples[:2]
    worst = 0.0
    for pieces in (rows_of(samples, 1, share=False), trees_of(samples, 1)):
        for piece in pieces:
            with torch.no_grad():
                found = chosen(*piece.logits(learner.model), 1.0).numpy()
            worst = max(worst, float(abs(found - piece.tokens().old).max()))
    return worst


async def run(options: argparse.Namespace) -> None:
    """For each size capture once and train in each way; print a table."""
    torch.set_num_threads(options.threads)
    model = await asyncio.to_thread(demo_model)
    print(
        "| sessions | turns | sampled | way | updates | traces | tokens computed | of the bound "
        "| generation, s | trainer, s | engine busy |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for sessions in options.sessions:
        for turns in options.turns:
            await compare(options, model, sessions, turns)


async def compare(options: argparse.Namespace, model: Path, sessions: int, turns: int) -> None:
    """The rows of one size, and how far the trainer's logprobs are from the rollout's."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        generation = await capture(model, folder, sessions, turns, options.threads)
        merged = Group(0, "t", await sessions_of(folder, "prefix_merging"))
        least, sampled = bound(merged)
        for way in ways(options.batch_tokens, options.threads):
            if way.name not in options.ways:
                continue
            group = Group(0, "t", await sessions_of(folder, way.builder))
            updates, traces, tokens, seconds = measure(way, model, group, options.update)
            print(
                f"| {sessions} | {turns} | {sampled / least:.0%} | `{way.name}` | {updates} "
                f"| {traces} | {tokens:,} | {tokens / least:.2f} | {generation:.1f} "
                f"| {seconds:.1f} | {generation / (generation + seconds):.0%} |",
                flush=True,
            )
        print(f"logprobs differ by at most {agree(model, merged):.1e}", file=sys.stderr)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, nargs="+", default=[8])
    parser.add_argument("--turns", type=int, nargs="+", default=[32])
    parser.add_argument("--ways", nargs="+", default=["per_request", "prefix_merging", "tree"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--update", type=int, default=8, help="traces of an update")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens computed at once")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
