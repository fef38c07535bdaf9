"""Trainer and rollout of a mixture of experts, with the rollout's routing replayed and without.

A tiny mixture of random weights plays conversations through a gateway over the embedded engine.
The reference trainer computes their logprobs again, with routers that are off: by noise of a share
of their weights, or rounded to bfloat16. In one model the experts come in pairs that the router
hardly tells apart, so that arithmetic alone flips some; the other has routers as they are drawn.

    python -m benchmarks.experts [--sessions 8] [--turns 4]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from tests.training.mixture import difference, flipped, off, played, save_mixture

from bridle.experts import Experts, pack
from bridle.trajectory.sample import Trace

ROUTERS = {
    "as the engine's": {},
    "noise 3e-6": {"noise": 3e-6},
    "noise 1e-4": {"noise": 1e-4},
    "noise 1e-2": {"noise": 1e-2},
    "bfloat16": {"dtype": torch.bfloat16},
}


def traces_of(folder: Path, *, sessions: int, turns: int) -> list[Trace]:
    """Traces of sessions that a gateway captured."""
    found = asyncio.run(played(folder, sessions=sessions, turns=turns))
    return [trace for one in found for trace in one.traces]


def main(arguments: list[str]) -> None:
    """Print the table as Markdown, and what the experts of a token take in a capture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    head = (
        "experts", "the trainer's router", "routed elsewhere", "KL with replay", "without",
        "largest difference with", "without",
    )  # fmt: skip
    console.print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    size = numbers = tokens = 0
    for name, ties in (("in pairs", True), ("as drawn", False)):
        with tempfile.TemporaryDirectory(prefix="bridle-") as made:
            folder = save_mixture(Path(made), ties=ties)
            traces = traces_of(folder, sessions=given.sessions, turns=given.turns)
            for router, setting in ROUTERS.items():
                model = off(folder, **setting)
                (kl, largest), (kl_alone, largest_alone) = (
                    difference(model, traces, replay=replay) for replay in (True, False)
                )
                console.print(
                    f"| {name} | {router} | {flipped(model, traces):.1%} | {kl:.1e} |"
                    f" {kl_alone:.1e} | {largest:.1e} | {largest_alone:.1e} |"
                )
        for trace in traces:
            rows = trace.routed_experts
            assert rows is not None
            tokens += len(rows)
            numbers += rows[:-1].size
            size += len(pack(Experts(0, rows[:-1])))
    console.print(f"{tokens} tokens; a number of an expert takes {size / numbers:.2f} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
