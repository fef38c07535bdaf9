"""Stands in for `train.py` and `train_async.py` of slime and Miles; runs without a GPU.

Takes the options that both have (slime at commit 624b824, Miles at 31f1ca9) and Megatron's, starts
an engine of SGLang's shape and a router, and calls the rollout function in the trainer's order.
With `--colocate` the engine's memory is released outside the rollout function, from the start.
Writes what it was given and got to the folder of the checkpoints.
"""

import argparse
import asyncio
import importlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.bridges.samples import Sample
from tests.engines.sleepers import Marked, SglangSleeper

from bridle.scripted.script import make_script

TEXT = (
    "hf-checkpoint ref-load load save prompt-data input-key metadata-key rollout-function-path "
    "custom-reward-post-process-path custom-config-path advantage-estimator lr-decay-style"
)
NUMBERS = (
    "save-interval num-rollout rollout-batch-size n-samples-per-prompt global-batch-size "
    "rollout-max-context-len max-tokens-per-gpu actor-num-nodes actor-num-gpus-per-node "
    "rollout-num-gpus"
)
FLAGS = "colocate use-tis rollout-shuffle use-dynamic-batch-size"


def options():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for names, settings in (
        (TEXT, {}),
        (NUMBERS, {"type": int}),
        (FLAGS, {"action": "store_true"}),
        ("lr", {"type": float}),
    ):
        for name in names.split():
            parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    for name, value in json.loads(Path(args.custom_config_path).read_text()).items():
        setattr(args, name, value)
    return args


class Source:
    """Groups over the rows of the data set, as slime's data source gives them."""

    def __init__(self, args):
        rows = Path(args.prompt_data).read_text().splitlines()
        self.rows, self.size, self.given = [json.loads(row) for row in rows], 0, 0
        self.size = args.n_samples_per_prompt
        self.keys = args.input_key, args.metadata_key
        self.metadata = {}

    def get_samples(self, count):
        groups = []
        for number in range(self.given, self.given + count):
            row = self.rows[number % len(self.rows)]
            prompt, metadata = (row[key] for key in self.keys)
            groups.append(
                [
                    Sample(group_index=number, index=self.size * number + at, prompt=prompt,
                           metadata=dict(metadata))
                    for at in range(self.size)
                ]
            )  # fmt: skip
        self.given += count
        return groups


def start_router(engine):
    """SGLang's router, as far as it is asked: its workers."""
    content = json.dumps({"workers": [{"id": "1", "url": engine}], "total": 1}).encode()

    class Router(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(200 if self.path == "/workers" else 404)
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address


def called(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def main(args):
    script = make_script({"conversations": [{"turns": [{"content": "Done."}]}]}, "test")
    rollout, rewards = map(
        called, (args.rollout_function_path, args.custom_reward_post_process_path)
    )
    source, found = Source(args), []
    async with SglangSleeper(Marked(script)) as engine:
        if args.colocate:
            await engine.sleep()
        args.sglang_router_ip, args.sglang_router_port = start_router(engine.url)
        for step in range(args.num_rollout):
            if args.colocate:
                await engine.wake(step)
            groups = await asyncio.to_thread(partial(rollout, args, step, source))
            if args.colocate:
                await engine.sleep()
            samples = [one for group in groups for of in group for one in of]
            found.append(len(rewards(args, samples)[1]))
    return {"args": vars(args), "samples": found, "touches": engine.touches}


if __name__ == "__main__":
    given = options()
    said = json.dumps(asyncio.run(main(given)))
    Path(given.save).mkdir(exist_ok=True)
    (Path(given.save) / "said.json").write_text(said)
