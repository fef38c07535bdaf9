"""Makes a data set of packages' releases: tasks, attempts, filters; tables of pairs and sessions.

    python examples/offline-data/run.py PACKAGE[==A..B]... --out OUT [--engine ENGINE]

Every step is a command of Bridle, and goes on where an earlier call was stopped.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

BRIDLE = [sys.executable, "-m", "bridle.cli"]
PAIRS = ".pairs.json"
"""In the folder of a package that is done: the verdict on each pair of releases."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TITLES = (
    "repository",
    "attempted",
    "accepted",
    "accepted %",
    "turns",
    "tokens",
    "engine s",
    "cost",
)


def make_tasks(packages: list[str], tasks: Path, *making: str) -> None:
    """Make a folder of tasks for each package, but for those that an earlier call finished."""
    for package in packages:
        folder = tasks / package
        if (folder / PAIRS).exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        command = ["tasks", "from-releases", package, *making, "--out", str(folder)]
        ended = subprocess.run([*BRIDLE, *command, "--json"], check=False, stdout=subprocess.PIPE)
        if ended.returncode > 1:  # 1: no task was kept
            raise SystemExit(2)
        (folder / PAIRS).write_bytes(ended.stdout)
    for folder in tasks.iterdir():
        if not (folder / PAIRS).exists():  # a package that this call does not name
            shutil.rmtree(folder)
    if not any(tasks.glob("*/*/task.json")):
        raise SystemExit(f"{tasks}: no task was kept of {', '.join(packages)}")


def causes(tasks: Path) -> str:
    """Count the verdicts on the pairs of releases, as a Markdown table."""
    rows = [row for path in tasks.glob(f"*/{PAIRS}") for row in json.loads(path.read_text())]
    counts = Counter(row["verdict"] for row in rows).most_common()
    lines = [f"| {cause} | {count} | {100 * count / len(rows):.0f} |" for cause, count in counts]
    head = ["| pairs of releases | count | % |", "|---|---:|---:|"]
    return "\n".join([*head, *lines, f"| all | {len(rows)} | 100 |"]) + "\n"


def write_script(tasks: Path, script: Path) -> None:
    """A scripted engine that makes the reference change, but in each third task."""
    conversations = []
    for number, folder in enumerate(sorted(path.parent for path in tasks.glob("*/*/task.json"))):
        first_line = json.loads((folder / "task.json").read_text())["instruction"].split("\n")[0]
        patch = (folder / "solution" / "reference.patch").read_text()
        apply = f"git apply --whitespace=nowarn - <<'END'\n{patch}END"
        commands = [SUBMIT] if number % 3 == 2 else [apply, "python -m pytest -q", SUBMIT]
        turns = [{"shell": [command]} for command in commands]
        conversations.append({"when": {"user_contains": first_line}, "turns": turns})
    script.write_text(json.dumps({"conversations": conversations}))


def table(statistics: dict, price: float) -> str:
    """The statistics as a Markdown table; the cost is that of the time the engine was used."""
    bill, used = price * statistics["wall_hours"], statistics["engine_s"]
    rows = [TITLES, ("---", *("---:" for _ in TITLES[1:]))]
    for name, of in [*statistics["sources"].items(), ("all", statistics)]:
        turns = "-" if of["turns_mean"] is None else f"{of['turns_mean']:.1f}"
        cost = f"{bill * of['engine_s'] / used if used else 0:.4f}"
        share = f"{100 * of['acceptance']:.0f}"
        counts = (of["attempted"], of["accepted"], share, turns, of["tokens"])
        rows.append((name, *map(str, counts), f"{of['engine_s']:.1f}", cost))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("packages", nargs="+", metavar="PACKAGE[==A..B]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=3, help="tasks of a package")
    parser.add_argument("--hint", default="notes", help="as `from-releases` takes it")
    parser.add_argument("--engine", help="as `bridle generate` takes it; default: a script")
    parser.add_argument("--harness", default="mini_swe_agent")
    parser.add_argument("--price", type=float, default=0.0, help="of an hour of the engine")
    given, options = parser.parse_known_args()
    tasks, data = given.out / "tasks", given.out / "set"
    tasks.mkdir(parents=True, exist_ok=True)
    make_tasks(given.packages, tasks, "--most", str(given.most), "--hint", given.hint)
    engine = given.engine
    if engine is None:
        write_script(tasks, given.out / "script.json")
        engine = f"scripted:{given.out / 'script.json'}"
    command = ["generate", str(tasks), "--harness", given.harness, "--engine", engine]
    ended = subprocess.run([*BRIDLE, *command, "--out", str(data), *options], check=False)
    if ended.returncode > 1:  # 1: nothing was accepted, which the table shows
        return ended.returncode
    report = table(json.loads((data / "statistics.json").read_text()), given.price)
    report += "\n" + causes(tasks)
    (given.out / "report.md").write_text(report)
    sys.stdout.write(report)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
