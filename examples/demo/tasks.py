"""The demo task set: small real jobs in a git work directory, each with a checker and a solution.

Every task is a folder that any task loader reads: `task.toml` (the task), `files/` (the work
directory before the harness comes), `check.sh` (fails before, passes after) and `solution.sh` (a
known way, never shown to a harness). The set is a pure function of a seed, so a fresh one can be
drawn at any time; `python -m examples.demo.tasks` writes the one of seed 0 to
`examples/demo-tasks`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bridle.types import JSON

WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jade",
    "kelp", "larch", "maple", "north", "olive", "pearl", "quartz", "river", "slate", "tulip",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoTask:
    """One task of the set, before it is written to a folder."""

    task_id: str
    instruction: str
    files: dict[str, str]
    """Relative path -> content of the work directory."""
    check: str
    """Shell lines; exit 0 = done. They run in the work directory."""
    solution: tuple[str, ...]
    """Shell commands that do the task, one a turn."""


def _find_value(rng: random.Random) -> DemoTask:
    names = rng.sample(WORDS, 4)
    keys = ("port", "workers", "timeout", "retries")
    values = {name: {key: rng.randint(10, 9999) for key in keys} for name in names}
    name, key = rng.choice(names), rng.choice(keys)
    files = {
        f"conf/{n}.ini": "[service]\n" + "".join(f"{k} = {v}\n" for k, v in values[n].items())
        for n in names
    }
    return DemoTask(
        f"find-{name}-{key}",
        f"The folder conf holds one ini file per service. Write the value of `{key}` of the "
        f"service `{name}` into a new file answer.txt, the number alone.",
        files,
        f'test "$(tr -d "[:space:]" < answer.txt)" = "{values[name][key]}"',
        ("ls conf", f"sed -n 's/^{key} = //p' conf/{name}.ini > answer.txt", "cat answer.txt"),
    )


def _count_errors(rng: random.Random) -> DemoTask:
    level = rng.choice(("ERROR", "WARN"))
    lines = [
        f"2026-01-{rng.randint(1, 28):02d} {rng.choice(('INFO', 'ERROR', 'WARN', 'DEBUG'))} "
        f"{rng.choice(WORDS)} took {rng.randint(1, 900)} ms"
        for _ in range(rng.randint(30, 60))
    ]
    lines.append(f"2026-01-28 {level} {rng.choice(WORDS)} took 1 ms")
    count = sum(f" {level} " in line for line in lines)
    return DemoTask(
        f"count-{level.lower()}-{rng.choice(WORDS)}",
        f"Count the lines of level {level} in app.log and write the number alone into count.txt.",
        {"app.log": "\n".join(lines) + "\n"},
        f'test "$(tr -d "[:space:]" < count.txt)" = "{count}"',
        ("head -3 app.log", f"grep -c ' {level} ' app.log > count.txt", "cat count.txt"),
    )


def _rename_function(rng: random.Random) -> DemoTask:
    old, new = (f"{a}_{b}" for a, b in (rng.sample(WORDS, 2), rng.sample(WORDS, 2)))
    number = rng.randint(2, 9)
    files = {
        "lib.py": f"def {old}(x):\n    return x * {number}\n",
        "main.py": f"from lib import {old}\n\nprint({old}({number}))\n",
        "notes.md": f"`{old}` multiplies its argument.\n",
    }
    return DemoTask(
        f"rename-{old.replace('_', '-')}",
        f"Rename the function `{old}` to `{new}` in all files of this folder; "
        "`python3 main.py` must still work.",
        files,
        f"! grep -q '{old}' lib.py main.py notes.md && grep -q 'def {new}' lib.py && "
        f"grep -q '{new}' notes.md && test \"$(python3 main.py)\" = '{number * number}'",
        (
            f"grep -rn --exclude-dir=.git '{old}' .",
            f"sed -i 's/{old}/{new}/g' lib.py main.py notes.md",
            "python3 main.py",
        ),
    )


def _fix_check(rng: random.Random) -> DemoTask:
    name = rng.choice(WORDS)
    right, wrong, operation = rng.choice(
        (
            ("max(values)", "min(values)", "largest"),
            ("sum(values)", "len(values)", "total"),
            ("sorted(values)[0]", "sorted(values)[-1]", "smallest"),
            ("len(set(values))", "len(values)", "distinct"),
        )
    )
    values = [rng.randint(1, 50) for _ in range(6)]
    values.append(values[0])
    expected = {
        "largest": max(values),
        "total": sum(values),
        "smallest": min(values),
        "distinct": len(set(values)),
    }[operation]
    files = {
        f"{name}.py": f'def {operation}(values):\n    """The {operation} of the values."""\n'
        f"    return {wrong}\n",
        "test_all.py": f"from {name} import {operation}\n\n"
        f"assert {operation}({values}) == {expected}, {operation}({values})\nprint('passed')\n",
    }
    return DemoTask(
        f"fix-{operation}-{name}",
        f"`python3 test_all.py` fails. Mend {name}.py so that it prints `passed`; "
        "leave test_all.py as it is.",
        files,
        "git diff --quiet HEAD -- test_all.py && test \"$(python3 test_all.py)\" = 'passed'",
        (
            f"cat {name}.py test_all.py",
            f"sed -i 's/return .*/return {right}/' {name}.py",
            "python3 test_all.py",
        ),
    )


def _sum_column(rng: random.Random) -> DemoTask:
    item = rng.choice(WORDS)
    rows = [(rng.choice(WORDS), rng.randint(1, 99), rng.randint(1, 20)) for _ in range(25)]
    rows.append((item, 7, 3))
    total = sum(price * count for name, price, count in rows if name == item)
    body = "name,price,count\n" + "".join(f"{n},{p},{c}\n" for n, p, c in rows)
    return DemoTask(
        f"sum-{item}",
        f"sales.csv has the columns name, price and count. Write the sum of price x count over "
        f"all rows of `{item}` into total.txt, the number alone.",
        {"sales.csv": body},
        f'test "$(tr -d "[:space:]" < total.txt)" = "{total}"',
        (
            "head -4 sales.csv",
            f"awk -F, '$1==\"{item}\"{{s+=$2*$3}} END{{print s}}' sales.csv > total.txt",
            "cat total.txt",
        ),
    )


def _json_check(path: str, wanted: object) -> str:
    """Shell lines that pass iff the JSON file at `path` holds exactly `wanted`."""
    return (
        f"python3 - <<'EOF'\nimport json\n"
        f'assert json.load(open({path!r})) == json.loads(r"""{json.dumps(wanted)}""")\nEOF'
    )


def _bump_version(rng: random.Random) -> DemoTask:
    name = rng.choice(WORDS)
    major, minor, patch = (rng.randint(0, 9) for _ in range(3))
    package = {
        "name": name,
        "version": f"{major}.{minor}.{patch}",
        "keywords": rng.sample(WORDS, 2),
    }
    new = f"{major}.{minor + 1}.0"
    return DemoTask(
        f"bump-{name}",
        "Raise the minor version in package.json by one, set the patch number to 0, and change "
        "nothing else in the file.",
        {"package.json": json.dumps(package, indent=2) + "\n"},
        _json_check("package.json", dict(package, version=new)),
        (
            "cat package.json",
            f"sed -i 's/{major}.{minor}.{patch}/{new}/' package.json",
            "cat package.json",
        ),
    )


def _sort_unique(rng: random.Random) -> DemoTask:
    words = [rng.choice(WORDS) for _ in range(30)]
    name = rng.choice(WORDS)
    expected = "\n".join(sorted(set(words)))
    return DemoTask(
        f"unique-{name}",
        f"Write every distinct line of {name}.txt once, in alphabetical order, into unique.txt.",
        {f"{name}.txt": "\n".join(words) + "\n"},
        f"test \"$(cat unique.txt)\" = '{expected}'",
        (f"wc -l {name}.txt", f"LC_ALL=C sort -u {name}.txt > unique.txt", "cat unique.txt"),
    )


def _csv_to_json(rng: random.Random) -> DemoTask:
    name = rng.choice(WORDS)
    rows = [{"id": str(i + 1), "label": rng.choice(WORDS)} for i in range(rng.randint(4, 8))]
    body = "id,label\n" + "".join(f"{row['id']},{row['label']}\n" for row in rows)
    convert = (
        'python3 -c "import csv, json; '
        f"json.dump(list(csv.DictReader(open('{name}.csv'))), open('{name}.json', 'w'))\""
    )
    return DemoTask(
        f"convert-{name}",
        f"Convert {name}.csv to {name}.json: a list with one object per row, whose keys are the "
        "column names and whose values are strings.",
        {f"{name}.csv": body},
        _json_check(f"{name}.json", rows),
        (f"cat {name}.csv", convert, f"cat {name}.json"),
    )


def _move_files(rng: random.Random) -> DemoTask:
    kinds = {"md": "docs", "py": "src", "csv": "data"}
    files = {f"{word}.{rng.choice(tuple(kinds))}": f"{word}\n" for word in rng.sample(WORDS, 6)} | {
        f"{word}.{kind}": f"{word} {kind}\n" for word, kind in zip(WORDS, kinds, strict=False)
    }
    checks = " && ".join(
        f"test -f {kinds[name.rpartition('.')[2]]}/{name} && test ! -e {name}" for name in files
    )
    return DemoTask(
        f"sort-out-{rng.choice(WORDS)}",
        "Move all .md files of this folder into docs/, all .py files into src/ and all .csv files "
        "into data/.",
        files,
        checks,
        (
            "ls",
            "mkdir -p docs src data && mv *.md docs/ && mv *.py src/ && mv *.csv data/",
            "ls docs src data",
        ),
    )


def _git_tag(rng: random.Random) -> DemoTask:
    name, word = rng.sample(WORDS, 2)
    number = rng.randint(1, 40)
    return DemoTask(
        f"release-{name}",
        f"Append the line `release {number}` to CHANGES, commit this with the message "
        f"`release {number}`, and put the tag `v{number}` on that commit.",
        {"CHANGES": f"{word} begins\n", f"{name}.txt": f"{word}\n"},
        f"test \"$(git log -1 --format=%s v{number})\" = 'release {number}' && "
        f"git show v{number}:CHANGES | tail -1 | grep -qx 'release {number}' && "
        'test -z "$(git status --porcelain -- CHANGES)"',
        (
            "git log --oneline && cat CHANGES",
            (
                f"echo 'release {number}' >> CHANGES && git add CHANGES && "
                f"git commit -qm 'release {number}' && git tag v{number}"
            ),
            "git log --oneline --decorate",
        ),
    )


def _largest_file(rng: random.Random) -> DemoTask:
    names = rng.sample(WORDS, 6)
    sizes = rng.sample(range(40, 900), 6)
    files = {f"store/{n}.dat": "x" * s + "\n" for n, s in zip(names, sizes, strict=True)}
    largest = max(zip(sizes, names, strict=True))[1]
    return DemoTask(
        f"largest-{largest}",
        "Write the name of the largest file in the folder store (the name alone, without the "
        "folder) into largest.txt.",
        files,
        f'test "$(tr -d "[:space:]" < largest.txt)" = "{largest}.dat"',
        ("ls -l store", "ls -S store | head -1 > largest.txt", "cat largest.txt"),
    )


MAKERS: tuple[Callable[[random.Random], DemoTask], ...] = (
    _find_value, _count_errors, _rename_function, _fix_check, _sum_column, _bump_version,
    _sort_unique, _csv_to_json, _move_files, _git_tag, _largest_file,
)  # fmt: skip
"""One maker per kind of job; a set takes them in turn."""


def demo_tasks(count: int = 44, *, seed: int = 0) -> list[DemoTask]:
    """`count` tasks with distinct ids, the kinds in turn; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible task set, not a secret
    tasks: dict[str, DemoTask] = {}
    while len(tasks) < count:
        task = MAKERS[len(tasks) % len(MAKERS)](rng)
        tasks.setdefault(task.task_id, task)
    return list(tasks.values())


def _task_toml(task: DemoTask) -> str:
    setup = (
        "git init -q && git config user.name demo && git config user.email demo@localhost && "
        "git add -A && git commit -qm start"
    )
    return (
        f'task_id = "{task.task_id}"\n'
        f"instruction = {json.dumps(task.instruction)}\n\n"
        # Python takes cached bytecode for current when a file of one size changed within a second.
        '[runtime.env]\nPYTHONDONTWRITEBYTECODE = "1"\n\n'
        "[[runtime.prepare]]\n"
        'type = "upload_dir"\nsource = "files"\ntarget = "."\n\n'
        "[[runtime.prepare]]\n"
        f'type = "exec"\ncommand = "{setup}"\n\n'
        "[[runtime.eval_prepare]]\n"
        'type = "upload_file"\nsource = "check.sh"\ntarget = ".check.sh"\n\n'
        "[evaluator]\n"
        'strategy = "command"\n\n'
        "[evaluator.config]\n"
        'command = "bash .check.sh"\n'
    )


def write_task(task: DemoTask, folder: Path) -> Path:
    """Write one task as a folder of its own; returns it. An older one of that id is replaced."""
    home = folder / task.task_id
    shutil.rmtree(home, ignore_errors=True)
    contents = {f"files/{path}": text for path, text in task.files.items()} | {
        "task.toml": _task_toml(task),
        "check.sh": f"{task.check}\n",
        "solution.sh": "set -e\n" + "\n".join(task.solution) + "\n",
    }
    for path, text in contents.items():
        target = home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return home


def demo_script(tasks: list[DemoTask]) -> JSON:
    """A scripted engine's script that solves `tasks` in the tool-using harnesses of the demo.

    pi (known by its `edit` tool) ends by answering; mini-swe-agent ends by its submit command.
    """
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return {"conversations": [c for task in tasks for c in _conversations(task, submit)]}


def _conversations(task: DemoTask, submit: str) -> Iterator[JSON]:
    steps: list[JSON] = [
        {"reasoning": f"Step {i + 1} of {task.task_id}.", "content": "", "shell": [command]}
        for i, command in enumerate(task.solution)
    ]
    done = {"content": "The task is done and checked."}
    yield {
        "when": {"user_contains": task.instruction, "tools_include": "edit"},
        "turns": [*steps, done],
    }
    yield {
        "when": {"user_contains": task.instruction},
        "turns": [*steps, {"content": "Done.", "shell": [submit]}, done],
    }


if __name__ == "__main__":
    SHIPPED = Path(__file__).resolve().parents[1] / "demo-tasks"
    for old in SHIPPED.glob("*/"):
        shutil.rmtree(old)
    for shipped in demo_tasks():
        write_task(shipped, SHIPPED)
