"""`bridle teach`: a teacher's logprobs for captured sessions."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from bridle.capture.records import SessionCapture
from bridle.cli.options import CaptureArgument, JsonOption
from bridle.cli.output import check_file, number, print_json, print_table
from bridle.engines.probe import compare_vocabulary
from bridle.engines.teachers import Scores, ServedTeacher, served_teacher
from bridle.errors import ConfigError, first_error
from bridle.folders import private_file
from bridle.node.results import trajectory_of
from bridle.node.run_folder import capture_files, sessions
from bridle.prompting.texts import KEY, encoder_of, tokenizer_record
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Ids

AT_ONCE = 16
"""Sessions whose traces a server scores at the same time."""

EMBEDDED = "embedded:"


def teach(
    target: CaptureArgument,
    teacher: Annotated[
        str,
        typer.Option(help="embedded:DIR, http://HOST:PORT (vLLM) or sglang:URL; same tokenizer."),
    ],
    top: Annotated[
        int, typer.Option(help="Also the so many likeliest ids at each position.", min=0)
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file; teacher.parquet in the run folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a teacher's logprob of each response id of a run's traces.

    The file has a row per trace: session_id, trace_id, and teacher_logprobs, one for each id of
    response_ids in trajectories.parquet. With --top K, teacher_topk_ids and teacher_topk_logprobs
    have the K likeliest ids in place of each, likeliest first. The table has the mean reverse KL of
    the trained tokens, the policy's logprob minus the teacher's. A teacher with another tokenizer
    is refused.

    BRIDLE_ENGINE_API_KEY is the key of a teacher behind HTTP.
    """
    capture_files(target)
    base = target if target.is_dir() else target.parent
    path = check_file(out or base / "teacher.parquet", "--out")
    rows = asyncio.run(_teach(target, teacher, top, path))
    if json:
        print_json({"file": str(path), "sessions": rows})
        return
    table = [[row["session_id"], row["tokens"], number(row["reverse_kl"])] for row in rows]
    print_table(f"{path}", ("session", "#tokens", "#reverse KL, nats"), table)


async def _teach(target: Path, spec: str, top: int, path: Path) -> list[JSON]:
    columns: dict[str, list[object]] = {"session_id": [], "trace_id": [], "teacher_logprobs": []}
    if top:
        columns |= {"teacher_topk_ids": [], "teacher_topk_logprobs": []}
    rows: list[JSON] = []
    async with _opened(spec) as given:
        left = sessions(target)
        while captures := list(islice(left, AT_ONCE)):
            for capture in captures:
                await given.check(capture)
            trajectories = [trajectory_of(capture) for capture in captures]
            works = (partial(score_traces, one, given.score, top) for one in trajectories)
            scored = await _all(works)
            for trajectory, scores in zip(trajectories, scored, strict=True):
                rows.append(_row(trajectory, scores))
                for trace, of in zip(trajectory.traces, scores, strict=True):
                    named = trajectory.session_id, trace.trace_id, of.logprobs
                    best = ([*of.top_ids], [*of.top_logprobs]) if top else ()
                    for values, value in zip(columns.values(), (*named, *best), strict=True):
                        values.append(value)
    pq.write_table(pa.table(columns), private_file(path), compression="zstd")
    return rows


async def _all(
    works: Iterable[Callable[[], Coroutine[None, None, list[Scores]]]],
) -> list[list[Scores]]:
    """Do all at once; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work()) for work in works]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [one.result() for one in running]


async def score_traces(
    trajectory: Trajectory, score: Callable[[Ids, int], Awaitable[Scores]], top: int
) -> list[Scores]:
    """Return a teacher's scores of the response ids of each trace."""
    found = []
    for trace in trajectory.traces:
        scores = await score(trace.ids, top)
        found.append(scores.after(len(trace.prompt_ids)))
    return found


def _row(trajectory: Trajectory, scores: Sequence[Scores]) -> JSON:
    divergence, tokens = 0.0, 0
    for trace, of in zip(trajectory.traces, scores, strict=True):
        trained = trace.loss_mask == 1
        divergence += float((trace.response_logprobs - of.logprobs)[trained].sum())
        tokens += int(trained.sum())
    mean = divergence / tokens if tokens else None
    return {"session_id": trajectory.session_id, "tokens": tokens, "reverse_kl": mean}


class _Teacher:
    """A teacher that is open, and its tokenizer: a folder here, or the server's own."""

    def __init__(
        self,
        spec: str,
        score: Callable[[Ids, int], Awaitable[Scores]],
        folder: Path | None,
        served: ServedTeacher | None = None,
    ) -> None:
        self.score = score
        self._spec, self._folder, self._served = spec, folder, served
        self._same: set[str] = set()
        """Digests of tokenizers that are the teacher's."""

    async def check(self, capture: SessionCapture) -> None:
        """Raise `ConfigError` unless a session ran with the teacher's tokenizer."""
        named = capture.session.metadata.get(KEY) or {}
        digest = str(named.get("digest"))
        if digest in self._same:
            return
        fault = await self._difference(named)
        if fault is not None:
            raise ConfigError(
                f"--teacher: {self._spec} has another tokenizer than session "
                f"{capture.session.session_id}, which ran with "
                f"{named.get('source', 'an unknown one')}: {fault}"
            )
        self._same.add(digest)

    async def _difference(self, named: JSON) -> str | None:
        """Return how the session's tokenizer differs; `None` = it is the same."""
        if self._folder is not None:
            same = tokenizer_record(str(self._folder))["digest"] == named.get("digest")
            return None if same else f"that of {self._folder} is another file"
        found = encoder_of(named)
        if found is None:
            return "it is no longer where it was, so nothing can be compared"
        assert self._served is not None
        encode, size = found
        finding = await compare_vocabulary(self._served, encode, size)
        return None if finding.ok and finding.needed else finding.found


@asynccontextmanager
async def _opened(spec: str) -> AsyncIterator[_Teacher]:
    if spec.startswith(EMBEDDED):
        from bridle.embedded.model import PlainModel

        folder = Path(spec.removeprefix(EMBEDDED))
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--teacher: {folder} is not a folder with a model: no config.json")
        model = PlainModel(folder)

        async def score(ids: Ids, top: int) -> Scores:
            return await asyncio.to_thread(model.scores, ids, top)

        yield _Teacher(spec, score, folder)
        return
    served = served_teacher(spec)
    try:
        yield _Teacher(spec, served.score, await served.folder(), served)
    finally:
        await served.aclose()
