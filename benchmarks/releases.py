"""Verifies release tasks once more, each in an environment that is installed again from its lock.

    python examples/offline-data/run.py $(cat examples/offline-data/packages.txt) --out out
    python -m benchmarks.releases out/tasks

An environment is put aside, installed again in its place from the task's `requirements.lock`, by
hash and without the resolver, and gets the two files that name the package in the work folder. Then
`bridle tasks verify` plays the tasks. What cannot be installed again counts as not verified.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

BRIDLE = (sys.executable, "-m", "bridle.cli")
OWN_FILE = "_repository.pth"
"""Leads from site-packages to the work folder (`bridle.datasets.releases`)."""


def environment_of(task: Path) -> Path:
    """The environment that a task names."""
    fields = json.loads((task / "task.json").read_text())
    return Path(fields["runtime"]["env"]["PATH"].partition(":")[0]).parent


def install_again(environment: Path, lock: Path) -> None:
    """Put an environment aside and install it again. `CalledProcessError` if pip refuses."""
    aside = environment.with_name(f"{environment.name}.before")
    shutil.rmtree(aside, ignore_errors=True)
    environment.rename(aside)
    python = str(environment / "bin" / "python")
    venv = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(environment)]
    subprocess.run(venv, check=True)
    flags = ("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:")
    words = ["pip", "--python", python, "install", *flags, "-r", str(lock)]
    subprocess.run([sys.executable, "-m", *words], check=True)
    (old,), (new,) = (folder.glob("lib/python3*/site-packages") for folder in (aside, environment))
    shutil.copy(old / OWN_FILE, new)
    for info in old.glob("*.dist-info"):  # that of the package itself, which no wheel brought
        if not (info / "RECORD").exists():
            shutil.copytree(info, new / info.name)
    shutil.copy(lock, environment / "requirements.lock")
    shutil.rmtree(aside)


def verdicts(tasks: list[Path]) -> list[str]:
    """The verdict on each task."""
    found = []
    fresh: set[Path] = set()
    for task in tasks:
        environment = environment_of(task)
        try:
            if environment not in fresh:
                install_again(environment, task / "requirements.lock")
                fresh.add(environment)
        except subprocess.CalledProcessError:
            found.append("environment")
            continue
        command = [*BRIDLE, "tasks", "verify", str(task), "--json"]
        ended = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        (row,) = json.loads(ended.stdout)
        found.append(row["verdict"])
        print(f"{task.name}: {row['verdict']} {row['detail']}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Verify, and print the table; 1 if fewer than 98 % are sound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tasks", type=Path, help="folder of folders of tasks")
    folders = parser.parse_args().tasks.glob("*/*/task.json")
    found = verdicts(sorted(path.parent for path in folders))
    print("| verified again | tasks | % |\n|---|---:|---:|")
    for verdict, count in Counter(found).most_common():
        print(f"| {verdict} | {count} | {100 * count / len(found):.0f} |")
    return 0 if found.count("sound") >= 0.98 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
