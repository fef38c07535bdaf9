"""One tool call of a real harness against the scripted engine: does it work on this machine?

A program without tools makes one edit instead.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bridle.cli.batch import Batch, run_batch
from bridle.config import AUTO, EvaluatorSpec, ForkSpec, RuntimeSpec, Task
from bridle.harnesses import ANY_PROGRAM, default_agent, open_harness
from bridle.lifecycle.run_folder import CAPTURE
from bridle.types import JSON

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent says that it is done; harmless elsewhere."""


PROOF = "proof.txt"

CALLS: list[JSON] = [
    {"content": "", "shell": [f"echo bridle > {PROOF}"]},
    {"content": "Done.", "shell": [SUBMIT]},
    {"content": "Done."},
]
"""One call of the program's own shell tool, then its end."""

EDITS: dict[str, tuple[JSON, list[JSON]]] = {
    "aider": ({"files": [PROOF]}, [{"content": f"{PROOF}\n```\nbridle\n```"}]),
}
"""Programs without tools, which change files as the model's text says: settings and turns."""


def check_harness(name: str, version: str | None = None, *, replay: bool = False) -> JSON:
    """Install harness `name`, let it write a file in its own way, and say how it went.

    `version` is another one than the pinned. `works` in the report is whether the file is there and
    the session completed; with `replay`, `replay` is what a fork of that session came to.
    `ConfigError` for an unknown name.
    """
    pinned = default_agent(name)
    agent = pinned.model_copy(update={"version": version}) if version else pinned
    harness = open_harness(agent)
    settings, turns = EDITS.get(name, ({}, CALLS))
    task = Task(
        task_id=f"check-{name}",
        instruction=f"Write the word bridle into {PROOF}.",
        agent=agent.model_copy(update={"settings": settings}),
        # What runs any program is shown with one of this machine's.
        runtime=RuntimeSpec(backend="local" if name in ANY_PROGRAM else AUTO),
        evaluator=EvaluatorSpec(
            strategy="command", config={"command": f'test "$(cat {PROOF})" = bridle'}
        ),
    )
    with tempfile.TemporaryDirectory(prefix="bridle-check-") as scratch:
        path = Path(scratch) / "script.json"
        path.write_text(json.dumps({"conversations": [{"turns": turns}]}))
        run = Path(scratch) / "run"
        engine = f"scripted:{path}"
        [line] = run_batch(Batch([task], engine, None, run, 1, f"check {name}"))
        forks = {"replay": _replayed(task, engine, run, line)} if replay else {}
    made = line["reward"] == 1.0
    return {
        "harness": name,
        "works": made and line["status"] == "COMPLETED",
        "version": harness.version,
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


def _replayed(task: Task, engine: str, run: Path, line: JSON) -> str:
    """Fork a session at its last call; tell whether it is exact, and what differs."""
    at = max(1, line["exchanges"] - 1)
    fork = ForkSpec(capture=str(run / CAPTURE), session=line["session_id"], at=at)
    forked = task.model_copy(update={"fork": fork})
    [again] = run_batch(Batch([forked], engine, None, run.parent / "fork", 1, "replay"))
    facts = again["fork"] or {"verdict": "refused", "noise": []}
    told = {"exact": "exact", "equivalent": f"equivalent but for {', '.join(facts['noise'])}"}
    return told.get(facts["verdict"]) or f"refused: {again['error']}"


HABITS = {
    "system_changed": "changes its system prompt (a clock?)",
    "window": "drops old messages (a window)",
    "masked": "replaces old results (masking)",
    "summary": "replaces old messages by fewer (a summary)",
    "other": "rewrites its history",
}
"""A `bridle.prompting.conversation.Habit` -> what the harness does."""


def history_of(line: JSON) -> str:
    """One sentence: what a harness does to its history, and what that costs."""
    shown, verbatim = line["turns_shown"], line["turns_verbatim"]
    if not shown:
        return "shows no turn of the model again"
    if verbatim == shown:
        return f"keeps its history: all {shown} turns shown stand as they were sampled"
    done = [HABITS[name] for name in HABITS if name in line["habits"]]
    again = f"{shown - verbatim} of {shown} turns shown are not as they were sampled"
    does = " and ".join(done) or "changes turns of the model"
    return f"{does}: {again} ({line['tokens_rerendered']} tokens)"
