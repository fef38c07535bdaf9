"""`bridle show`: a run as a table, a session as its conversation tree."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bridle.capture.records import SessionCapture
from bridle.cli.terminal import JsonOption, console, number, print_json, print_table
from bridle.errors import ConfigError
from bridle.node.results import find_session, result_from, sessions
from bridle.trajectory.scores import (
    HarnessScore,
    from_summaries,
    report_of,
    scores_of,
    without_effect,
)
from bridle.trajectory.transcript import draw, script_of
from bridle.types import JSON, Kind

COLUMNS = (
    "session", "harness", "status", "#reward", "#calls", "#captured", "#trained", "#excluded",
    "#merge", "#traces",
)  # fmt: skip


def show(
    target: Annotated[str, typer.Argument(help="Run folder, or the beginning of a session id.")],
    run: Annotated[
        Path, typer.Option(help="Run or folder of runs to search for a session.")
    ] = Path("runs"),
    as_script: Annotated[
        bool, typer.Option("--as-script", help="Print the session as a scripted engine's script.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print pass@k and checks of the data.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show a run as a table, or a session as its conversation tree and token counts."""
    path = Path(target)
    if path.is_dir() or path.is_file():
        if report:
            _show_report(path, json=json)
        else:
            _show_run(path, json=json)
        return
    if report:
        raise ConfigError(f"--report needs a run folder; {target} is not one")
    _, capture = find_session(target, run)
    if as_script:
        print_json(script_of(capture))
    else:
        _show_session(capture, json=json)


def row(line: JSON) -> tuple[object, ...]:
    """Return a session's summary as a row of the table of sessions."""
    excluded = line["tokens_excluded"] or {}
    merge = "-" if line["merge_ratio"] is None else f"{line['merge_ratio']:.2f}"
    why = ", ".join(f"{count} {reason}" for reason, count in excluded.items()) or "0"
    status = line["status"] if not line["cause"] else f"{line['status']} ({line['cause']})"
    reward = "-" if line["reward"] is None else f"{line['reward']:g}"
    return (
        line["session_id"], line["harness"], status, reward, line["exchanges"],
        line["tokens_captured"], line["tokens_trained"], why, merge, line["traces"],
    )  # fmt: skip


def law_line(lines: list[JSON]) -> str:
    """Return a line that says whether captured = trained + excluded tokens holds over the
    sessions.
    """
    captured = sum(line["tokens_captured"] or 0 for line in lines)
    trained = sum(line["tokens_trained"] or 0 for line in lines)
    excluded = sum(sum((line["tokens_excluded"] or {}).values()) for line in lines)
    holds = "holds" if captured == trained + excluded else "DOES NOT HOLD"
    return f"captured {captured} = trained {trained} + excluded {excluded}: {holds}"


def counts_of(lines: Iterable[JSON], key: str) -> Counter[str]:
    """Return the sum of the counts under `key` in sessions' summaries."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.get(key) or {})
    return counts


def print_scores(scores: Sequence[HarnessScore]) -> None:
    """Print the scores of a batch as a table, if there are any."""
    if not scores:
        return
    ks = sorted({k for score in scores for k in score.pass_at})
    columns = ("task set", "harness", "#tasks", "#attempts", "#scored", "#mean reward")
    titles = (*columns, *(f"#pass@{k}" for k in ks), "failures")
    print_table("scores", titles, (_score_row(score, ks) for score in scores))


def _score_row(score: HarnessScore, ks: Sequence[int]) -> tuple[object, ...]:
    mean = number(score.mean, 3)
    if score.half_width is not None:
        mean += f" ± {score.half_width:.3f}"
    rates = []
    for k in ks:
        rate = number(score.pass_at.get(k), 3)
        few = score.tasks_at.get(k, score.tasks) < score.tasks
        rates.append(f"{rate} (of {score.tasks_at[k]})" if few else rate)
    causes = ", ".join(f"{count} {cause}" for cause, count in score.causes.items()) or "0"
    return (
        *(score.task_set, score.harness, score.tasks),
        *(f"{score.attempts} of {score.sessions}", score.scored, mean, *rates, causes),
    )


def _show_run(target: Path, *, json: bool) -> None:
    lines = [result_from(capture).summary() for capture in sessions(target)]
    if json:
        print_json(lines)
        return
    print_table(f"{target}: {len(lines)} sessions", COLUMNS, map(row, lines))
    console.print(law_line(lines))
    _print_without_effect(lines)


def _print_without_effect(lines: Sequence[JSON]) -> None:
    """Print the parts of requests that had no effect, if any."""
    for line in without_effect(counts_of(lines, "unknown"), counts_of(lines, "unenforced")):
        console.print(line, markup=False, soft_wrap=True)


def _show_report(target: Path, *, json: bool) -> None:
    lines: list[JSON] = []

    def results() -> Iterator[tuple[str, str, str, JSON]]:
        for result in map(result_from, sessions(target)):
            lines.append(result.summary())
            stats = result.trajectory.metadata["stats"]
            yield result.session_id, result.harness or "-", str(result.status), stats

    report = report_of(results())
    scores = scores_of(from_summaries(lines))
    if json:
        print_json({**report.as_json(), "scores": [score.as_json() for score in scores]})
        return
    print_scores(scores)
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)


def left_lines(metadata: JSON) -> Iterator[str]:
    """Yield lines about files that were not scored or kept, and about rewards that were given
    later.
    """
    evaluation = metadata.get("evaluation") or {}
    if why := evaluation.get("unscorable"):
        yield f"reward 0: {_shown(why)}"
    for path in evaluation.get("stayed", ()):
        yield f"not scored: {_shown(path)}"
    for given in metadata.get("scores", ()):
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(given["at"]))
        yield _shown(f"scored {given['reward']} by {given['by'] or '?'}, {at}: {given['why']}")
    for name, why in metadata.get("left_out", {}).items():
        yield f"not kept: {_shown(f'{name}: {why}')}"


def _shown(text: str) -> str:
    """Escape the control characters of a text."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _show_session(capture: SessionCapture, *, json: bool) -> None:
    result = result_from(capture)
    trajectory = result.trajectory
    if json:
        ours = ("evaluation", "scores", "left_out")
        more = {name: result.metadata[name] for name in ours if name in result.metadata}
        print_json({**result.summary(), "stats": trajectory.metadata["stats"], **more})
        return
    print_table("session", COLUMNS, [row(result.summary())])
    train = [Kind(kind) for kind in trajectory.metadata["train"]]
    for depth, text in draw(capture, train):
        console.print("  " * depth + text, markup=False, soft_wrap=True)
    console.print(law_line([result.summary()]))
    _print_without_effect([result.summary()])
    if result.error:
        console.print(f"error: {result.error}", markup=False)
    for line in left_lines(result.metadata):
        console.print(line, markup=False, soft_wrap=True)
    if capture.outcome is None:
        console.print("this session has no outcome: it is running, or its process was killed")
