"""Cost of capture and trajectories: build time, bytes on disk, commit latency, training work.

Workload: sessions of 8, 32 and 128 turns with 300 new prompt tokens and 200 sampled tokens a turn,
append-only and in three harder variants. All is measured in one process, one after the other, so
read the ratios.

- `build`: CPU time, best of some runs: from the SQLite file to the trajectory (`from store`), the
  same and all its messages read, which otherwise happens when somebody looks (`with messages`), and
  from records in memory to arrays (`arrays`), beside a prefix tree with one dictionary per token,
  as other systems use to find parents: from the same file, each call's whole ids as lists, to the
  parent of each call. Such a system still has its traces to make.
- `disk`: size of the closed file against the bytes of its distinct tokens, logprobs and texts.
- `commit`: wall time from giving an exchange to its acknowledgement, for callers that come at once.
- `training`: tokens through a model, one trace per request against merged traces, beside the bound
  `T(P + Td/2) / (P + Td)` of T turns with a first prompt of P tokens and d new ones a turn.
- `tree`: a group of 8 sessions of one task packed as one tree against its merged traces, beside the
  bound `G(P + Td) / (P + GTd)`: the prompt once, everything else once per session.

    python -m benchmarks.trajectory [--turns 8 32 128] [--training-turns 32 64 128] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import uvloop
from rich.console import Console
from rich.table import Table
from tests.capture.made import MadeSession

from bridle.capture.records import SessionCapture
from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.config import BuilderSpec
from bridle.trajectory import DEFAULT_TRAIN, rebuild
from bridle.trajectory.graph import first_ids, grow
from bridle.trajectory.packing import pack
from bridle.trajectory.result import trajectory_bytes
from bridle.trajectory.sample import Trajectory
from bridle.types import DeliveryState, Kind

NEW, SAMPLED, ROOT = 300, 200, 2000
"""Prompt tokens and sampled tokens of a turn, prompt tokens of the first one."""

VARIANTS = ("append-only", "10 % retries", "3 sub-agents", "2 compactions")


def make(turns: int, variant: str = VARIANTS[0], session_id: str = "s1") -> MadeSession:
    """A session of about `turns` turns."""
    made = MadeSession(session_id, seed=turns)
    last: str | None = None
    subs: list[str | None] = [None, None, None]
    for turn in range(turns):
        if variant == VARIANTS[2] and turn % 4:
            which = turn % 4 - 1
            sub = made.call(
                subs[which], new=_new(subs[which]), output=SAMPLED, kind=Kind.SUBAGENT,
                continues=subs[which],
            )  # fmt: skip
            subs[which] = sub.exchange_id
            continue
        compacted = variant == VARIANTS[3] and turn in (turns // 3, 2 * turns // 3)
        if compacted:
            made.call(last, new=NEW, output=SAMPLED, kind=Kind.COMPACTION)
        parent = None if compacted else last
        said = made.call(parent, new=_new(parent), output=SAMPLED, continues=last)
        if variant == VARIANTS[1] and turn % 10 == 9:
            made.deliver(said.exchange_id, DeliveryState.ABANDONED)
            said = made.call(parent, new=said.suffix_ids, output=SAMPLED, continues=last)
        last = said.exchange_id
    made.end()
    return made


def _new(parent: str | None) -> int:
    return ROOT if parent is None else NEW


async def write(path: Path, sessions: list[MadeSession]) -> None:
    """All of `sessions` into one file."""
    async with await SqliteStore.open(path) as store:
        for made in sessions:
            await made.write(store)


def best_ms(work: Callable[[], object], repeat: int) -> float:
    """Least CPU milliseconds of `repeat` runs."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) * 1e3


class TrieNode:
    """One token of a prefix tree."""

    __slots__ = ("calls", "children")

    def __init__(self) -> None:
        self.children: dict[int, TrieNode] = {}
        self.calls: list[int] = []


def trie(calls: list[tuple[list[int], list[int]]]) -> list[int | None]:
    """The parent of each call, found and kept token by token, shortest prompts first."""
    root = TrieNode()
    parents: list[int | None] = [None] * len(calls)
    for number in sorted(range(len(calls)), key=lambda n: len(calls[n][0])):
        prompt, output = calls[number]
        at: TrieNode | None = root
        for token in prompt:
            at = at.children.get(token) if at is not None else None
            if at is None:
                break
            if at.calls:
                parents[number] = at.calls[0]
        at = root
        for token in prompt + output:
            following = at.children.get(token)
            if following is None:
                following = at.children[token] = TrieNode()
            at = following
        at.calls.append(number)
    return parents


def calls_of(capture: SessionCapture) -> list[tuple[list[int], list[int]]]:
    """Each call's whole prompt and output, as a per-token tree takes them."""
    nodes = grow(capture.session.session_id, capture.exchanges).nodes.values()
    return [
        (first_ids(node, node.prompt_length).tolist(), node.exchange.output_ids.tolist())
        for node in nodes
    ]


def build(capture: SessionCapture) -> Trajectory:
    """A trajectory, whose messages are read later."""
    return rebuild(capture, builder=BuilderSpec(), train=DEFAULT_TRAIN)


def with_messages(trajectory: Trajectory) -> int:
    """Read all messages of its traces; return their number."""
    return sum(len(t.prompt_messages) + len(t.response_messages) for t in trajectory.traces)


def delivered_turns(made: MadeSession, trajectory: Trajectory) -> tuple[int, int]:
    """Turns that train and turns that should."""
    trained = {e for trace in trajectory.traces for e in trace.exchange_ids}
    wanted = {
        e for e, delivery in made.deliveries.items() if delivery.state is DeliveryState.DELIVERED
    }
    return len(trained & wanted), len(wanted)


def measure_build(folder: Path, turns: int, variant: str, repeat: int) -> dict[str, object]:
    """One row of the build table."""
    made = make(turns, variant)
    path = folder / "build.sqlite"
    path.unlink(missing_ok=True)
    asyncio.run(write(path, [made]))
    with SqliteReader(path) as reader:
        capture = reader.read("s1")
        trajectory = rebuild(capture)
        whole = best_ms(lambda: rebuild(reader.read("s1")), repeat)
        read = best_ms(lambda: with_messages(rebuild(reader.read("s1"))), repeat)
        arrays = best_ms(lambda: build(capture), repeat)
        written = best_ms(lambda: trajectory_bytes(trajectory), repeat)
    names = [exchange.exchange_id for exchange in made.exchanges]
    with SqliteReader(path) as reader:
        beside = best_ms(lambda: trie(calls_of(reader.read("s1"))), max(1, repeat // 3))
    trained, wanted = delivered_turns(made, trajectory)
    return {
        "variant": variant,
        "turns": len(names),
        "from store ms": whole,
        "with messages ms": read,
        "arrays ms": arrays,
        "json ms": written,
        "trie ms": beside,
        "trie / store": beside / whole,
        "trie / arrays": beside / arrays,
        "turns kept": f"{trained} of {wanted}",
        "traces": len(trajectory.traces),
    }


def measure_disk(folder: Path, turns: int, sessions: int) -> dict[str, object]:
    """One row of the disk table."""
    made = [make(turns, session_id=f"s{number}") for number in range(sessions)]
    path = folder / "disk.sqlite"
    path.unlink(missing_ok=True)
    asyncio.run(write(path, made))
    tokens = sum(4 * (len(e.suffix_ids) + len(e.output_ids)) for m in made for e in m.exchanges)
    logprobs = sum(e.logprobs.nbytes for m in made for e in m.exchanges)
    texts = sum(len(body) for m in made for body in m.bodies.values())
    size = path.stat().st_size
    return {
        "turns": turns,
        "sessions in file": sessions,
        "KiB per session": size / sessions / 1024,
        "tokens KiB": tokens / sessions / 1024,
        "logprobs KiB": logprobs / sessions / 1024,
        "texts KiB": texts / sessions / 1024,
        "file / distinct": size / (tokens + logprobs + texts),
    }


async def measure_commit(
    folder: Path, callers: int, fsync: Literal["off", "group"]
) -> dict[str, object]:
    """One row of the commit table."""
    made = [MadeSession(f"s{number}", seed=number) for number in range(callers)]
    for session in made:
        for _ in range(max(8, 512 // callers)):
            session.call(None, new=NEW, output=SAMPLED)
    spans: list[float] = []
    path = folder / f"commit-{callers}-{fsync}.sqlite"
    async with await SqliteStore.open(path, fsync=fsync) as store:

        async def call(session: MadeSession) -> None:
            await store.open_session(session.record)
            for exchange in session.exchanges:
                start = time.perf_counter()
                await store.commit(exchange, session.new_bodies[exchange.exchange_id])
                spans.append(time.perf_counter() - start)
                await asyncio.sleep(0.002)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session in made:
                group.create_task(call(session))
        wall = time.perf_counter() - start
    spans.sort()
    return {
        "fsync": fsync,
        "callers at once": callers,
        "median ms": statistics.median(spans) * 1e3,
        "p95 ms": spans[int(len(spans) * 0.95)] * 1e3,
        "commits/s": len(spans) / wall,
    }


def uniform(
    turns: int, session_id: str = "s1", prompt: object = ROOT, seed: int = 0
) -> MadeSession:
    """An append-only session: `ROOT` first ids, then `NEW + SAMPLED` a turn."""
    made = MadeSession(session_id, seed=seed, texts=False)
    for turn in range(turns):
        new = NEW if turn else prompt
        made.call(f"x{turn - 1}" if turn else None, new=new, output=SAMPLED)
    made.end()
    return made


def measure_training(turns: int) -> dict[str, object]:
    """One row of the training table."""
    made = uniform(turns)
    sizes = {
        strategy: size_of(rebuild(made.capture(), builder=BuilderSpec(strategy=strategy)))
        for strategy in ("per_request", "prefix_merging")
    }
    new = NEW + SAMPLED
    bound = turns * (ROOT + turns * new / 2) / (ROOT + turns * new)
    ratio = sizes["per_request"] / sizes["prefix_merging"]
    return {
        "turns": turns,
        "per request": sizes["per_request"],
        "merged": sizes["prefix_merging"],
        "times fewer": ratio,
        "bound": bound,
        "of bound": ratio / bound,
    }


def size_of(trajectory: Trajectory) -> int:
    """Ids in all traces."""
    return sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectory.traces)


def measure_tree(turns: int, repeat: int, group: int = 8) -> dict[str, object]:
    """One row of the tree table: sessions of one task, each with samples of its own."""
    prompt = MadeSession(seed=99).ids(ROOT)
    sessions = [uniform(turns, f"s{n}", prompt, seed=n) for n in range(group)]
    built = [rebuild(m.capture(), builder=BuilderSpec(strategy="tree")) for m in sessions]
    merged, packed = sum(map(size_of, built)), len(pack(built).ids)
    # The last turn's new prompt tokens are never there: a turn's come before its samples.
    path = ROOT + turns * SAMPLED + (turns - 1) * NEW
    bound = group * path / (ROOT + group * (path - ROOT))
    return {
        "turns": turns,
        "sessions": group,
        "merged": merged,
        "tree": packed,
        "times fewer": merged / packed,
        "bound": bound,
        "of bound": merged / packed / bound,
        "pack ms": best_ms(lambda: pack(built), repeat),
    }


def show(console: Console, title: str, rows: list[dict[str, object]]) -> None:
    """A table of rows with the same keys."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    """Measure all and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--training-turns", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [measure_build(folder, n, VARIANTS[0], given.repeat) for n in given.turns]
        build += [measure_build(folder, max(given.turns), v, given.repeat) for v in VARIANTS[1:]]
        tables = {
            "build": build,
            "disk": [measure_disk(folder, n, many) for n in given.turns for many in (1, 16)],
            "commit": [
                uvloop.run(measure_commit(folder, callers, fsync))
                for fsync in ("off", "group")
                for callers in (1, 8, 32)
            ],
            "training": [measure_training(turns) for turns in given.training_turns],
            "tree": [measure_tree(turns, given.repeat) for turns in given.training_turns],
        }
    if given.json:
        sys.stdout.write(json.dumps(tables, indent=2) + "\n")
        return
    console = Console(width=150)
    for title, rows in tables.items():
        show(console, title, rows)


if __name__ == "__main__":
    main()
