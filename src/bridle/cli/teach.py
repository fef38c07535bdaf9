"""`bridle teach`: a teacher's logprobs of what was sampled, on the exact ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.output import check_file, number, print_json, print_table
from bridle.errors import ConfigError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.capture.records import SessionCapture
    from bridle.embedded.model import PlainModel
    from bridle.trajectory.sample import Trace
    from bridle.types import Logprobs

FORM = "embedded:"


def teach(
    target: Annotated[Path, typer.Argument(help="Run folder, gateway's data folder or capture.")],
    teacher: Annotated[str, typer.Option(help="embedded:DIR, a model with the same tokenizer.")],
    out: Annotated[
        Path | None, typer.Option(help="Parquet file; teacher.parquet in the run folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a teacher's logprob of each response id of a run's traces.

    A row of the file is a trace: session_id, trace_id, and teacher_logprobs, one for each id of
    response_ids in trajectories.parquet. The table has the mean reverse divergence of the tokens
    that train, the policy's logprob less the teacher's. A teacher with another tokenizer is
    refused.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from bridle.cli.captured import capture_files, sessions
    from bridle.embedded.model import PlainModel
    from bridle.folders import private_file
    from bridle.node.results import trajectory_of

    if not teacher.startswith(FORM):
        raise ConfigError(f"--teacher: {teacher!r} is not of the form {FORM}DIR")
    capture_files(target)
    folder = Path(teacher.removeprefix(FORM))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--teacher: {folder} is not a folder with a model: no config.json")
    base = target if target.is_dir() else target.parent
    path = check_file(out or base / "teacher.parquet", "--out")
    model = PlainModel(folder)
    columns: dict[str, list[object]] = {"session_id": [], "trace_id": [], "teacher_logprobs": []}
    rows: list[JSON] = []
    for capture in sessions(target):
        _check_tokenizer(capture, folder)
        trajectory = trajectory_of(capture)
        apart, tokens = 0.0, 0
        for trace in trajectory.traces:
            logprobs = taught(model, trace)
            trained = trace.loss_mask == 1
            apart += float((trace.response_logprobs - logprobs)[trained].sum())
            tokens += int(trained.sum())
            row = (trajectory.session_id, trace.trace_id, logprobs)
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
        mean = apart / tokens if tokens else None
        rows.append({"session_id": trajectory.session_id, "tokens": tokens, "reverse_kl": mean})
    pq.write_table(pa.table(columns), private_file(path), compression="zstd")
    if json:
        print_json({"file": str(path), "sessions": rows})
        return
    table = [[row["session_id"], row["tokens"], number(row["reverse_kl"])] for row in rows]
    print_table(f"{path}", ("session", "#tokens", "#reverse KL, nats"), table)


def taught(model: PlainModel, trace: Trace) -> Logprobs:
    """The model's logprob of each response id; 0.0 for the first id of a sequence."""
    import numpy as np

    if len(trace.prompt_ids):
        return model.logprobs(trace.prompt_ids, trace.response_ids, 1.0)
    rest = model.logprobs(trace.response_ids[:1], trace.response_ids[1:], 1.0)
    return np.concatenate([np.zeros(1, np.float32), rest])


def _check_tokenizer(capture: SessionCapture, folder: Path) -> None:
    from bridle.prompting.texts import KEY, tokenizer_record

    named = capture.session.metadata.get(KEY) or {}
    if named.get("digest") != tokenizer_record(str(folder))["digest"]:
        raise ConfigError(
            f"--teacher: {folder} has another tokenizer than session "
            f"{capture.session.session_id}, which ran with {named.get('source', 'an unknown one')}"
        )
