"""Causes that `bridle certify` names, against causes that were planted, and clean runs accused.

Each cause is planted by computing the logprobs of a tiny model under a wrong setting
(`tests.trajectory.planted`). A run counts as right if it has one mismatch and the planted cause is
named first. Judged twice: from the data, with the belief that both sides compute in float32 and no
other fact; and with all facts that both sides truthfully declare. `stripped` leaves out what a
trainer or an engine may not send: ids, entropies, padding, cache hits.

    python -m benchmarks.certify [--seeds 5] [--clean 100]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace

import torch
from rich.console import Console
from tests.trajectory.planted import PLANTED, Run, clean


def stripped(run: Run) -> Run:
    """The run without what a trainer or an engine may leave out."""
    answers = [replace(one, ids=None, entropies=None, padding=None) for one in run.answers]
    traces = [replace(one, metadata=one.metadata | {"cached_tokens": None}) for one in run.traces]
    return replace(run, traces=traces, answers=answers)


def row(cause: str, seeds: int) -> list[str]:
    """A line of the table: how often the cause was named first, and the first evidence."""
    right = Counter[str]()
    among: set[str] = set()
    evidence = ""
    for seed in range(seeds):
        run = PLANTED[cause](seed)
        found = {
            "data": run.certificate(facts=False),
            "facts": run.certificate(facts=True),
            "stripped": stripped(run).certificate(facts=False),
        }
        for kind, certificate in found.items():
            right[kind] += [m.names[0] for m in certificate.mismatches] == [cause]
        among |= {name for m in found["data"].mismatches for name in m.names} - {cause}
        if not seed:
            evidence = found["data"].mismatches[0].causes[0].evidence
    counts = [f"{right[kind]} of {seeds}" for kind in ("data", "facts", "stripped")]
    return [cause, *counts, ", ".join(sorted(among)) or "-", evidence]


def main(arguments: list[str]) -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clean", type=int, default=100)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    head = [
        "planted",
        "from data",
        "with facts",
        "stripped",
        "also named (data)",
        "evidence, seed 0",
    ]
    for cells in (head, ["---"] * len(head), *(row(cause, given.seeds) for cause in PLANTED)):
        console.print(f"| {' | '.join(cells)} |")
    runs = [clean(seed).certificate(facts=True) for seed in range(given.clean)]
    accused = sum(not run.faithful for run in runs)
    largest = max((run.rms / run.tolerance for run in runs), default=0)
    console.print(f"clean runs accused: {accused} of {given.clean}")
    console.print(f"largest rms of a clean run: {largest:.0%} of the tolerance")


if __name__ == "__main__":
    main(sys.argv[1:])
