"""Stands in for prime-rl while `examples/prime-rl` runs, without a GPU.

Names, signatures, folders and routes are those of commit 559b447. Called as `inference` it is the
inference server, as `torchrun` the trainer, else it runs the example on stand-ins for the modules.
"""

import argparse
import asyncio
import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec


class RoutedExperts(msgspec.Struct, array_like=True):
    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct, array_like=True, kw_only=True):
    """The fields that the example may set; prime-rl's has a few more behind them."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[float] | None = None
    routed_experts: RoutedExperts | None = None


def step_path(path: Path, step: int) -> Path:
    return path / f"step_{step}"


def broadcast_dir(output_dir: Path) -> Path:
    return output_dir / "broadcasts"


def wait_for(path: Path, interval: int = 1, log_interval: int = 10) -> None:
    while not path.exists():
        time.sleep(0.05)


def prepare_batch(rollouts, seq_len, num_train_workers, bin_cost, pad_to_multiple_of=1):
    """Deal the samples out to the workers, each its own micro-batch; all get as many."""
    assert pad_to_multiple_of == 1
    assert bin_cost([1]) == 1
    for one in rollouts:
        per_id = (one.token_ids, one.mask, one.logprobs, one.temperatures, one.advantages)
        assert len({*map(len, per_id)}) == 1
        assert len(one.token_ids) <= seq_len
    rollouts = [*rollouts, *rollouts[:1] * (-len(rollouts) % num_train_workers)]
    return [rollouts[worker::num_train_workers] for worker in range(num_train_workers)]


class Sender:
    def __init__(self, output_dir: Path, data_world_size: int, current_step: int = 0) -> None:
        self.folder, self.workers, self.step = (
            output_dir / "rollouts",
            data_world_size,
            current_step,
        )

    async def send(self, micro_batch_grid):
        assert len(micro_batch_grid) == self.workers
        folder = step_path(self.folder, self.step)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, batches in enumerate(micro_batch_grid):
            draft = folder / f"rank_{rank}.bin.tmp"
            draft.write_bytes(msgspec.msgpack.encode(batches))
            draft.rename(folder / f"rank_{rank}.bin")
        self.step += 1


MODULES: dict[str, dict[str, object]] = {
    "prime_rl.trainer.batch": {
        "build_bin_cost": lambda _: sum,
        "prepare_batch": prepare_batch,
    },
    "prime_rl.transports.rollouts.filesystem": {"FileSystemMicroBatchSender": Sender},
    "prime_rl.transports.rollouts.types": {
        "RoutedExperts": RoutedExperts,
        "TrainingSample": TrainingSample,
    },
    "prime_rl.utils.pathing": {
        "get_broadcast_dir": broadcast_dir,
        "get_step_path": step_path,
        "sync_wait_for_path": wait_for,
    },
}


def train(words: list[str]) -> None:
    """Be the trainer: write weights, wait for a batch, and note what it trains on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--resume.step", dest="resume", type=int, default=0)
    parser.add_argument("--rollout-transport.type", dest="transport", choices=["filesystem"])
    given, _ = parser.parse_known_args(words)
    said = Path(os.environ["SAID"])
    for step in range(given.resume + 1, given.max_steps + 2):
        weights = step_path(broadcast_dir(given.output_dir), step - 1)
        weights.mkdir(parents=True)
        (weights / "STABLE").touch()
        if step > given.max_steps:
            return
        samples: list[TrainingSample] = []
        for rank in range(given.nproc_per_node):
            path = step_path(given.output_dir / "rollouts", step) / f"rank_{rank}.bin"
            wait_for(path)
            samples += msgspec.msgpack.decode(path.read_bytes(), type=list[TrainingSample])
        trained = [
            logprob
            for one in samples
            for logprob, trains in zip(one.logprobs, one.mask, strict=True)
            if trains
        ]
        with said.open("a") as file:
            print(
                json.dumps({"step": step, "samples": len(samples), "trained": trained}), file=file
            )
        step_path(given.output_dir / "checkpoints", step).mkdir(parents=True)


async def serve(port: int) -> None:
    """Be the inference server: vLLM's, whose logprobs tell the version of its weights."""
    from aiohttp import web
    from tests.engines.sleepers import Marked

    from bridle.scripted.script import make_script
    from bridle.scripted.server import EngineServer

    engine = Marked(make_script({"conversations": [{"turns": [{"content": "Done."}]}]}, "test"))

    async def update_weights(request: web.Request) -> web.Response:
        folder = Path((await request.json())["weight_dir"])
        assert (folder / "STABLE").exists()
        await engine.set_version(int(folder.name.removeprefix("step_")))
        return web.json_response({"status": "ok"})

    class Server(EngineServer):
        def _app(self) -> web.Application:
            app = super()._app()
            app.router.add_post("/update_weights", update_weights)
            return app

    async with Server(engine, port=port):
        await asyncio.Event().wait()


def main() -> None:
    role, *words = sys.argv[1:]
    if role == "torchrun":
        train(words)
    elif role == "inference":
        asyncio.run(serve(int(words[words.index("--server.port") + 1])))
    else:
        for name, content in MODULES.items():
            module: Any = ModuleType(name)
            vars(module).update(content)
            sys.modules[name] = module
        runpy.run_path(os.environ["EXAMPLE"], run_name="__main__")


if __name__ == "__main__":
    main()
