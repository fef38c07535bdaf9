"""`bridle harness list|check|prune`: list the harnesses, check one, remove unused ones.

A check is one tool call of the real harness against the scripted engine; a harness without tools
edits a file instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer

from bridle.cli.terminal import JsonOption, console, print_json, table
from bridle.config import AUTO, EvaluatorSpec, ForkSpec, RuntimeSpec, Task
from bridle.harnesses import ANY_PROGRAM, HARNESSES, default_agent, dialects_of, open_harness
from bridle.harnesses.bundles import DAY_S, bundles_dir, installed
from bridle.harnesses.bundles import prune as remove
from bridle.harnesses.packaged import IMAGE, Npm
from bridle.types import JSON

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def harness() -> None:
    """List, check and remove harnesses that Bridle can run."""


@app.command("list")
def list_harnesses(
    json: JsonOption = False,
) -> None:
    """List the harnesses: pinned version, dialects (the default first), whether installed here."""
    rows: list[JSON] = []
    for name in sorted(HARNESSES):
        version, needs_none = open_harness(name).version, name in ANY_PROGRAM
        rows.append(
            {
                "harness": name,
                "version": None if needs_none else version,
                "dialects": [str(dialect) for dialect in dialects_of(name)],
                "installed": needs_none or installed(name, version, bundles_dir()) is not None,
            }
        )
    if json:
        print_json(rows)
        return
    shown = (
        (name, version or "-", ", ".join(dialects), "yes" if is_installed else "no")
        for name, version, dialects, is_installed in (row.values() for row in rows)
    )
    console.print(table("harnesses", ("harness", "version", "dialects", "installed"), shown))


@app.command()
def prune(
    unused_days: Annotated[
        float, typer.Option(min=0, help="Remove harnesses unused for so many days.")
    ] = 14,
    most_gb: Annotated[
        float | None, typer.Option(min=0, help="Then remove the longest unused, down to this size.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove installed harnesses that are unused; those in use by a running Bridle stay."""
    most_mb = None if most_gb is None else int(most_gb * 1024)
    pruned = remove(bundles_dir(), unused_s=unused_days * DAY_S, most_mb=most_mb, dry_run=dry_run)
    rows = [{"bundle": p.folder.name, "size_mb": p.size_mb, "why": p.why} for p in pruned]
    if json:
        print_json(rows)
        return
    gone = "would be removed" if dry_run else "removed"
    shown = ((row["bundle"], str(row["size_mb"]), row["why"]) for row in rows)
    total = sum(p.size_mb for p in pruned)
    title = f"{gone}: {len(rows)} bundles, {total} MB"
    console.print(table(title, ("bundle", "MB", "why"), shown))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Short name of the harness.")],
    version: Annotated[
        str | None,
        typer.Option(
            help="Another version than the pinned one, installed without a lock; or image."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Image to run it in; --version image checks the image's own program."),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Fork the session too, and name the parts that differ.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Install a harness, run it against the scripted engine, and report.

    It makes one tool call, or one edit if it has no tools.
    """
    report = check_harness(name, version, image=image, replay=replay)
    if json:
        print_json(report)
    else:
        console.print(table(f"harness {name}", ("what", "result"), report.items()))
    raise typer.Exit(0 if report["works"] else 1)


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Command by which mini-swe-agent submits; harmless elsewhere."""


PROOF = "proof.txt"

CALLS: list[JSON] = [
    {"content": "", "shell": [f"echo bridle > {PROOF}"]},
    {"content": "Done.", "shell": [SUBMIT]},
    {"content": "Done."},
]
"""One call of the harness's own shell tool, then the end."""

EDITS: dict[str, tuple[JSON, list[JSON]]] = {
    "aider": ({"files": [PROOF]}, [{"content": f"{PROOF}\n```\nbridle\n```"}]),
}
"""Settings and turns of harnesses without tools, which edit files as the model's text says."""


def check_harness(
    name: str, version: str | None = None, *, image: str | None = None, replay: bool = False
) -> JSON:
    """Install harness `name` (or use an image's), run it on a task that writes a file, and report.

    `works` in the report = the file was written and the session completed. With `replay` the
    session is forked too, and the report's `replay` is the result. `ConfigError` for an unknown
    name.
    """
    from bridle.cli.run import BatchRun, run_batch

    pinned = default_agent(name)
    agent = pinned.model_copy(update={"version": version}) if version else pinned
    harness = open_harness(agent)
    settings, turns = EDITS.get(name, ({}, CALLS))
    proof = f'test "$(cat {PROOF})" = bridle'
    package = getattr(harness, "package", None)
    if version == IMAGE and isinstance(package, Npm):
        proof += f" && {package.command} --version"
    task = Task(
        task_id=f"check-{name}",
        instruction=f"Write the word bridle into {PROOF}.",
        agent=agent.model_copy(update={"settings": settings}),
        # A harness of any program is checked with a program of this machine.
        runtime=RuntimeSpec(
            backend="local" if name in ANY_PROGRAM and image is None else AUTO, image=image
        ),
        evaluator=EvaluatorSpec(strategy="command", config={"command": proof}),
    )
    with tempfile.TemporaryDirectory(prefix="bridle-check-") as scratch:
        path = Path(scratch) / "script.json"
        path.write_bytes(orjson.dumps({"conversations": [{"turns": turns}]}))
        run = Path(scratch) / "run"
        engine = f"scripted:{path}"
        [line] = run_batch(BatchRun([task], engine, run, 1, f"check {name}"))
        forks = {"replay": _replayed(task, engine, run, line)} if replay else {}
        said = _output_of_proof(run) if version == IMAGE else ""
    made = line["reward"] == 1.0
    return {
        "harness": name,
        "works": made and line["status"] == "COMPLETED",
        "version": f"{said} {harness.version}".lstrip(),
        "dialect": str(harness.dialect),
        "status": line["status"],
        "cause": line["cause"],
        "error": line["error"],
        "edit" if name in EDITS else "tool call": "made" if made else "not made",
        "model calls": line["exchanges"],
        "merge ratio": line["merge_ratio"],
        "history": history_of(line),
        "unknown to the gateway": line["unknown"],
        **forks,
    }


def _output_of_proof(run: Path) -> str:
    from bridle.node.results import result_from, sessions

    evaluation = result_from(next(sessions(run))).metadata.get("evaluation") or {}
    return str(evaluation.get("output", "")).partition("\n")[0]


def _replayed(task: Task, engine: str, run: Path, line: JSON) -> str:
    """Fork a session at its last call; say whether it is exact, or what differs.

    If the fork is refused, both are run again with each of `_steady_settings`, and the first with
    which the harness repeats itself is named.
    """
    from bridle.cli.run import BatchRun, run_batch

    result = _forked(task, engine, run, line)
    if not result.startswith(REFUSED):
        return result
    for name, env in _steady_settings():
        agent = task.agent.model_copy(update={"env": task.agent.env | env})
        steady, folder = task.model_copy(update={"agent": agent}), run.parent / name
        [first] = run_batch(BatchRun([steady], engine, folder / "run", 1, name))
        again = _forked(steady, engine, folder / "run", first)
        if not again.startswith(REFUSED):
            settings = ", ".join(f"{key} = {value!r}" for key, value in env.items())
            return f"{result}; {again} with agent.env {settings}"
    return result


REFUSED = "refused"
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"
"""The library in packages of Linux distributions."""


def _steady_settings() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield settings with which programs repeat themselves: a seed, and a clock that stands still
    (if `faketime` is installed).
    """
    yield "seed", {"PYTHONHASHSEED": "0"}
    for library in sorted(Path("/").glob(FAKETIME.removeprefix("/")))[:1]:
        yield "clock", {"LD_PRELOAD": str(library), "FAKETIME": "2026-01-01 00:00:00"}


def _forked(task: Task, engine: str, run: Path, line: JSON) -> str:
    from bridle.cli.run import BatchRun, run_batch
    from bridle.node.results import CAPTURE

    at = max(1, line["exchanges"] - 1)
    fork = ForkSpec(capture=str(run / CAPTURE), session=line["session_id"], at=at)
    forked = task.model_copy(update={"fork": fork})
    [again] = run_batch(BatchRun([forked], engine, run.parent / "fork", 1, "replay"))
    facts = again["fork"] or {"verdict": REFUSED, "noise": []}
    verdicts = {"exact": "exact", "equivalent": f"equivalent but for {', '.join(facts['noise'])}"}
    return verdicts.get(facts["verdict"]) or f"{REFUSED}: {again['error']}"


HABITS = {
    "system_changed": "changes its system prompt (a clock?)",
    "window": "drops old messages (a window)",
    "masked": "replaces old results (masking)",
    "summary": "replaces old messages by fewer (a summary)",
    "other": "rewrites its history",
}
"""Phrase for each `bridle.prompting.conversation.Habit`."""


def history_of(line: JSON) -> str:
    """Return a sentence on how a harness changes its message history, and what that costs."""
    shown, verbatim = line["turns_shown"], line["turns_verbatim"]
    if not shown:
        return "shows no turn of the model again"
    if verbatim == shown:
        return f"keeps its history: all {shown} turns shown stand as they were sampled"
    done = [HABITS[name] for name in HABITS if name in line["habits"]]
    again = f"{shown - verbatim} of {shown} turns shown are not as they were sampled"
    does = " and ".join(done) or "changes turns of the model"
    return f"{does}: {again} ({line['tokens_rerendered']} tokens)"
