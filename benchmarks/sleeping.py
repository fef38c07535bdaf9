"""Releases of a real vLLM under load: it sleeps, other weights come, it wakes, sessions go on.

Callers play sessions of several turns through a gateway on one vLLM. In each cycle the gateway
releases the engine, vLLM gives its memory back (`/sleep`, levels 1 and 2 by turns), a trainer uses
that memory, vLLM wakes, loads the other of two sets of weights, and the gateway resumes it under
the next version. At the end every sampled token is computed again under both sets of weights: the
nearer one must be that of the token's version.

vLLM sleeps on a GPU only. Without one the model is of toy size, and a cycle has no sleep; the rest
is the same.

    python -m benchmarks.sleeping [--cycles 20] [--callers 8]

vLLM is the one of `make test-vllm`, or else the one that this Python imports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from benchmarks.gpu import DEVICE, ON_GPU, device_name, freed, make_model
from tests.vllm import serving

import bridle
from bridle.embedded.model import load_model
from bridle.training.forward import recompute
from bridle.trajectory.sample import Trace
from bridle.types import JSON

TURNS = 4
"""Calls of a session."""

OUTPUT_TOKENS = (16, 256)
"""Least and most sampled tokens of a call; unequal, so that a release meets calls that run."""

CONTEXT = 8192
"""Longest session, in tokens."""

GPU_FLAGS = (
    *("--enable-sleep-mode", "--dtype", "bfloat16", "--generation-config", "vllm"),
    *("--enforce-eager", "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(8 << 30)),
)


class Server(serving.VllmServer):
    """The engine: asleep, awake, under one of two sets of weights."""

    def __init__(self, scratch: Path, weights: Sequence[Path]) -> None:
        super().__init__(scratch, weights[0])
        self.weights = weights
        self.freed_gib: list[float] = []
        """Memory of the GPU that each sleep gave back."""
        self.sleeps_s: list[float] = []
        """Seconds of each sleep and waking, loading included."""

    def turn(self, version: int) -> None:
        """Sleep, let the trainer compute, wake with the weights of `version`."""
        began = time.perf_counter()
        if ON_GPU:
            before = torch.cuda.mem_get_info()[0]
            self.call("POST", f"/sleep?level={1 + version % 2}")
            gained = torch.cuda.mem_get_info()[0] - before
            self.freed_gib.append(gained / 2**30)
            self.compute(gained)
            self.call("POST", "/wake_up?tags=weights")
        folder = self.weights[version % len(self.weights)]
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.call("POST", "/collective_rpc", body)
        if ON_GPU:
            self.call("POST", "/wake_up?tags=kv_cache")
        self.call("POST", "/reset_prefix_cache")
        try:
            self.call("POST", "/update_weight_version", {"new_version": str(version)})
        except urllib.error.HTTPError as error:  # vLLM 0.24 has no such route
            if error.code != 404:
                raise
        self.sleeps_s.append(time.perf_counter() - began)

    def compute(self, gained: int) -> None:
        """Fill nine tenths of the memory that was gained, as a trainer does."""
        taken = torch.full((int(gained * 0.9) // 4,), 1.0, device=DEVICE)
        assert float(taken.sum(dtype=torch.float64)) == taken.numel()
        del taken
        freed()


class Load:
    """Callers that play sessions until they are stopped."""

    def __init__(self, gateway: bridle.Gateway) -> None:
        self.gateway = gateway
        self.stopped = False
        self.replies = 0
        self.waits_s: list[float] = []
        """Seconds of each call."""

    async def play(self, number: int) -> None:
        """Play as caller `number`. A call that fails ends the run."""
        lengths = random.Random(number)  # noqa: S311
        async with aiohttp.ClientSession() as client:
            while not self.stopped:
                async with self.gateway.session(task="sleep") as session:
                    await self.turns(client, session, lengths)

    async def turns(
        self,
        client: aiohttp.ClientSession,
        session: Any,  # noqa: ANN401 - the package names no class for it
        lengths: random.Random,
    ) -> None:
        """Make the calls of one session."""
        messages = [{"role": "user", "content": "Say something."}]
        for _ in range(TURNS):
            most = lengths.randint(*OUTPUT_TOKENS)
            body = {"model": "policy", "messages": messages, "max_completion_tokens": most}
            began = time.perf_counter()
            url = f"{session.openai_url}/chat/completions"
            headers = {"Authorization": f"Bearer {session.key}"}
            async with client.post(url, json=body, headers=headers) as answer:
                reply = await answer.json()
                if answer.status != 200:
                    raise RuntimeError(f"a call failed: {reply}")
            self.waits_s.append(time.perf_counter() - began)
            self.replies += 1
            messages.append(reply["choices"][0]["message"])
            messages.append({"role": "user", "content": "Go on."})

    async def further(self, count: int) -> None:
        """Wait for so many replies."""
        goal = self.replies + count
        while self.replies < goal:  # noqa: ASYNC110 - the callers have no event
            await asyncio.sleep(0.01)


async def engines(gateway: bridle.Gateway, client: aiohttp.ClientSession, **body: Any) -> None:  # noqa: ANN401
    """`POST /engines/all`, which must succeed."""
    headers = {"Authorization": f"Bearer {gateway.app.control_token}"}
    url = f"{gateway.app.control_url}/engines/all"
    async with client.post(url, json={"by": "trainer", **body}, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{body}: {await answer.text()}")


async def cycles(server: Server, folder: Path, count: int, callers: int) -> JSON:
    """Play and cycle; what was seen. Raises for a call that failed."""
    gateway = bridle.Gateway(server.url, tokenizer=str(server.weights[0]), data=folder)
    async with gateway, aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        load = Load(gateway)
        for number in range(callers):
            group.create_task(load.play(number))
        await load.further(callers)
        releases_s = []
        for version in range(1, count + 1):
            began = time.perf_counter()
            mode = "wait" if version % 3 == 0 else "abort"
            await engines(gateway, client, state="released", mode=mode)
            releases_s.append(time.perf_counter() - began)
            await asyncio.to_thread(server.turn, version)
            await engines(gateway, client, state="resumed", version=version)
            await load.further(callers)
        load.stopped = True
    traces = [trace for one in gateway.trajectories() for trace in one.traces]
    return {
        "traces": traces,
        "replies": load.replies,
        "longest_call_s": max(load.waits_s),
        "release_s": statistics.median(releases_s),
    }


def judged(traces: Sequence[Trace], weights: Sequence[Path]) -> JSON:
    """Compare each trained token's logprob with those of all sets of weights."""
    apart = []
    for folder in weights:
        model = load_model(folder, dtype="auto", device=DEVICE)
        answers = {one.trace_id: one for one in recompute(model, traces)}
        apart.append(
            np.concatenate([np.abs(answers[one.trace_id].logprobs - ours(one)) for one in traces])
        )
        del model
        freed()
    versions = np.concatenate([one.versions[one.loss_mask > 0] for one in traces])
    own = np.choose(versions % len(weights), apart)
    other = np.choose((versions + 1) % len(weights), apart)
    return {
        "tokens": len(versions),
        "versions": sorted({int(one) for one in versions}),
        "rms_own": float(np.sqrt((own**2).mean())),
        "rms_other": float(np.sqrt((other**2).mean())),
        "wrong_versions": wrong(traces, own, other),
    }


def ours(trace: Trace) -> np.ndarray:
    """The logprobs that the engine gave for the trained tokens."""
    return trace.response_logprobs[trace.loss_mask > 0]


def wrong(traces: Sequence[Trace], own: np.ndarray, other: np.ndarray) -> int:
    """Spans of one version in a trace, of 8 tokens at least, that the other weights fit better."""
    found, start = 0, 0
    for trace in traces:
        versions = trace.versions[trace.loss_mask > 0]
        cuts = np.flatnonzero(np.diff(versions)) + 1
        for span in np.split(np.arange(start, start + len(versions)), cuts):
            found += len(span) >= 8 and bool(own[span].mean() >= other[span].mean())
        start += len(versions)
    return found


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--callers", type=int, default=8)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if not serving.PYTHON.exists():
        serving.PYTHON = Path(sys.executable)
    if ON_GPU:
        serving.FLAGS = GPU_FLAGS
        serving.ENVIRONMENT.pop("TORCHDYNAMO_DISABLE", None)
        inherited = os.environ.get("PYTHONPATH")
        if inherited:
            serving.ENVIRONMENT["PYTHONPATH"] += f"{os.pathsep}{inherited}"
    with tempfile.TemporaryDirectory(prefix="bridle-") as scratch:
        weights = [Path(scratch, f"weights-{seed}") for seed in (0, 1)]
        for seed, folder in enumerate(weights):
            folder.mkdir()
            if ON_GPU:
                make_model(folder, "0.6b", CONTEXT, seed=seed, served=True)
            else:
                serving.make_model(folder, seed=seed)
        freed()
        with Server(Path(scratch), weights) as server:
            server.running("--logprobs-mode", "processed_logprobs")
            folder = Path(scratch, "run")
            try:
                report = asyncio.run(cycles(server, folder, given.cycles, given.callers))
            except BaseException:
                print(server.log.read_text(errors="replace")[-8000:], file=sys.stderr)
                raise
            server.stop()
        traces = report.pop("traces")
        report |= judged(traces, weights)
        report |= {
            "device": device_name(),
            "cycles": given.cycles,
            "callers": given.callers,
            "start_s": server.start_s,
            "freed_gib": statistics.median(server.freed_gib) if server.freed_gib else None,
            "sleep_s": statistics.median(server.sleeps_s),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
