"""Small tasks in Harbor's format: jobs for a shell, each with tests and a known solution.

They need bash, coreutils, grep, sed and awk, so they run in any runtime, with no image built and
nothing installed. `scripts/make_harbor_tasks` writes them to `examples/harbor-tasks`; a test runs
each with harness `oracle` (1.0) and `empty` (0.0). One seed gives one set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SEED = 0
EACH = 3
"""Tasks of each kind."""
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jade",
    "kelp", "larch", "maple", "north", "olive", "pearl", "quartz", "river", "slate", "tulip",
)  # fmt: skip

DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ .\n"

TOML = """schema_version = "1.1"

[task]
name = "bridle-examples/{name}"
description = "{kind}"

[metadata]
difficulty = "easy"
category = "shell"
tags = ["{kind}"]

[metadata.bridle]
portable = true    # any Linux with bash, coreutils, grep, sed and awk will do

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
"""

TEST = """#!/bin/bash
# Runs in the work folder; LOGS_DIR is set where /logs cannot be.
logs="${{LOGS_DIR:-/logs}}/verifier"
mkdir -p "$logs"
passed() {{
{check}
}}
if passed; then echo 1 > "$logs/reward.txt"; else echo 0 > "$logs/reward.txt"; fi
"""


@dataclass(frozen=True, slots=True)
class Example:
    """One task before it is written."""

    kind: str
    name: str
    instruction: str
    files: dict[str, str]
    check: str
    """Bash lines; the last command's status decides."""
    solution: str
    """Bash lines."""


def harbor_examples(seed: int = SEED) -> list[Example]:
    """The whole set, the same for the same seed."""
    made = []
    for maker in MAKERS:
        draw = random.Random(f"{seed}-{maker.__name__}")  # noqa: S311 - no secret
        names = draw.sample(WORDS, EACH)
        made += [maker(draw, name) for name in names]
    return made


def write_example(example: Example, folder: Path) -> Path:
    """Write one task below `folder` in Harbor's layout; returns its own folder."""
    home = folder / f"{example.kind}-{example.name}"
    texts = {
        "task.toml": TOML.format(name=home.name, kind=example.kind),
        "instruction.md": example.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST.format(check=example.check),
        "solution/solve.sh": f"#!/bin/bash\nset -e\n{example.solution}\n",
        **{f"environment/files/{name}": text for name, text in example.files.items()},
    }
    for name, text in texts.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return home


def _says(path: str, wanted: str) -> str:
    """A check that a file holds exactly these lines."""
    return f"diff -q {path} - <<'END' >/dev/null\n{wanted.rstrip()}\nEND"


def _count(draw: random.Random, name: str) -> Example:
    levels = draw.choices(("INFO", "WARN", "ERROR"), k=60)
    lines = [f"10:{i:02d} {level} {draw.choice(WORDS)}" for i, level in enumerate(levels)]
    return Example(
        "count",
        name,
        f"Count the lines of {name}.log whose level is ERROR and write the number, nothing else, "
        "to count.txt in the same folder.",
        {f"{name}.log": "\n".join(lines) + "\n"},
        _says("count.txt", str(levels.count("ERROR"))),
        f"grep -c ' ERROR ' {name}.log > count.txt",
    )


def _total(draw: random.Random, name: str) -> Example:
    rows = [(draw.choice(("ann", "bob", "cat")), draw.randint(1, 90)) for _ in range(30)]
    total = sum(amount for who, amount in rows if who == "bob")
    text = "who,amount\n" + "".join(f"{who},{amount}\n" for who, amount in rows)
    return Example(
        "total",
        name,
        f"{name}.csv has the columns who and amount. Write the sum of bob's amounts to total.txt.",
        {f"{name}.csv": text},
        _says("total.txt", str(total)),
        f"awk -F, '$1 == \"bob\" {{ s += $2 }} END {{ print s }}' {name}.csv > total.txt",
    )


def _unique(draw: random.Random, name: str) -> Example:
    words = draw.choices(draw.sample(WORDS, 12), k=40)
    return Example(
        "unique",
        name,
        f"Write every different line of {name}.txt once, in alphabetical order, to unique.txt.",
        {f"{name}.txt": "\n".join(words) + "\n"},
        _says("unique.txt", "\n".join(sorted(set(words)))),
        f"LC_ALL=C sort -u {name}.txt > unique.txt",
    )


def _setting(draw: random.Random, name: str) -> Example:
    before, after = draw.sample(range(1000, 9000), 2)
    conf = "[server]\nhost = localhost\nport = {port}\n\n[client]\nport = {other}\n"
    other = draw.randint(1000, 9000)
    wanted = conf.format(port=after, other=other)
    return Example(
        "setting",
        name,
        f"In {name}.ini, change the port of the section server to {after}. Change nothing else.",
        {f"{name}.ini": conf.format(port=before, other=other)},
        _says(f"{name}.ini", wanted),
        f"sed -i '/\\[server\\]/,/^$/ s/^port = .*/port = {after}/' {name}.ini",
    )


def _rename(draw: random.Random, name: str) -> Example:
    names = draw.sample(WORDS, 5)
    moved = " && ".join(f"test -f {n}.md && test ! -e {n}.txt" for n in names)
    return Example(
        "rename",
        name,
        f"Every file in the folder {name} that ends in .txt must end in .md instead. Its content "
        "must stay.",
        {f"{name}/{n}.txt": f"about {n}\n" for n in names},
        f"cd {name} && {moved} && grep -q 'about {names[0]}' {names[0]}.md",
        f'cd {name}; for f in *.txt; do mv "$f" "${{f%.txt}}.md"; done',
    )


def _largest(draw: random.Random, name: str) -> Example:
    sizes = dict(zip(draw.sample(WORDS, 6), draw.sample(range(10, 400), 6), strict=True))
    largest = max(sizes, key=sizes.__getitem__)
    return Example(
        "largest",
        name,
        f"Write the name of the largest file in the folder {name} to largest.txt, beside it.",
        {f"{name}/{n}.dat": "x" * size + "\n" for n, size in sizes.items()},
        _says("largest.txt", f"{largest}.dat"),
        f"ls -S {name} | head -1 > largest.txt",
    )


def _replace(draw: random.Random, name: str) -> Example:
    old, new = draw.sample(WORDS, 2)
    text = "".join(f"{draw.choice((old, 'stone'))} {draw.choice(WORDS)}{old}\n" for _ in range(12))
    lines = [line.split(" ") for line in text.splitlines()]
    wanted = "\n".join(f"{new if a == old else a} {b}" for a, b in lines)
    return Example(
        "replace",
        name,
        f"In {name}.txt, replace the word {old} by {new} where it stands as a word of its own; "
        "leave longer words that contain it.",
        {f"{name}.txt": text},
        _says(f"{name}.txt", wanted),
        f"sed -i 's/\\b{old}\\b/{new}/g' {name}.txt",
    )


def _join(draw: random.Random, name: str) -> Example:
    parts = {str(i): draw.choice(WORDS) for i in range(1, 7)}
    return Example(
        "join",
        name,
        f"The folder {name} has numbered parts. Join them in the order of their numbers into "
        "whole.txt, beside the folder.",
        {f"{name}/part-{i}": f"{word}\n" for i, word in parts.items()},
        _says("whole.txt", "\n".join(parts.values())),
        f"cat $(ls {name}/part-* | sort -V) > whole.txt",
    )


MAKERS: tuple[Callable[[random.Random, str], Example], ...] = (
    *(_count, _total, _unique, _setting, _rename, _largest, _replace, _join),
)
