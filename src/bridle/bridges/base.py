"""Base of all trainer bridges: groups -> sessions -> rows.

A trainer gets *rows*: one training sequence each, with the group and the session that it belongs
to, its reward, and its weight. A session may give several rows (sub-agents, compactions, forks) or
none. What a trainer must be protected from is done here, once, the same for all of them:

- a session whose reward is not known never trains, and does not move its group's mean: its rows
  have mask 0 and the mean of the others as reward (law 5);
- rows over a trainer's limits are cut, masked or left out, as the caller says, and counted;
- a session of which nothing trains is a row without training where the trainer wants one.

`Sessions` is how a bridge has tasks played: `bridle.bridges.local.LocalSessions` in this process,
`bridle.bridges.remote.ServerSessions` on a rollout server.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from bridle.config import Task
from bridle.errors import ConfigError
from bridle.trajectory.credit import has_own_rewards, trace_reward, trace_weights
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.types import JSON, Ids, Logprobs

log = structlog.get_logger()

Overlong = Literal["mask", "truncate", "drop"]


class Sessions(Protocol):
    """Has tasks played."""

    def play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """Run one session for each entry of `tasks`, in order; a task may be listed several
        times.
        """


@dataclass(frozen=True, slots=True, eq=False)
class SessionGroup:
    """The sessions of one task that are compared with each other."""

    task_id: str
    sessions: tuple[Trajectory, ...]

    @property
    def mean(self) -> float:
        """Mean of the group's known rewards; 0.0 = there is none."""
        known = [s.reward for s in self.sessions if s.reward is not None]
        return sum(known) / len(known) if known else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training sequence."""

    group: int
    """Place of its group."""
    task_id: str
    sample: int
    """Place of its session in the group."""
    session: Trajectory
    trace: Trace
    """Cut to the limits; of a session without any, one token that does not train."""
    reward: float
    """The trace's own (the sum of its token rewards, if it has any), else the session's; where the
    session's is not known, the mean of the group's others."""
    known: bool
    """True if that is its own reward."""
    weight: float
    """By its tokens that train, so that all rows of a session together weigh 1."""

    @property
    def prompt_ids(self) -> Ids:
        """Token ids before the first sampled token."""
        return self.trace.prompt_ids

    @property
    def response_ids(self) -> Ids:
        """Token ids from the first sampled token on."""
        return self.trace.response_ids

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """Loss mask: 1 = trains; aligned with `response_ids`."""
        return self.trace.loss_mask

    @property
    def logprobs(self) -> Logprobs:
        """Logprobs of the sampled tokens, aligned with `response_ids`; 0.0 where nothing trains."""
        return self.trace.response_logprobs

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        """Policy versions of the sampled tokens, aligned with `response_ids`; -1 where none was
        sampled.
        """
        return self.trace.versions

    @property
    def temperatures(self) -> npt.NDArray[np.float32]:
        """Return the sampling temperature of each response token, 1.0 where none was recorded;
        shape (R,).
        """
        size, ends = len(self.response_ids), self.trace.turn_ends
        recorded = (self.trace.metadata.get("temperatures") or [None] * len(ends))[: len(ends)]
        by_call = [1.0 if one is None else one for one in recorded]
        sizes = np.diff(np.minimum(ends, size), prepend=0, append=size)
        return np.repeat(np.array([*by_call, 1.0], np.float32), sizes)

    @property
    def lags(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token of the row; `None` = none was
        sampled.
        """
        known = self.versions[self.versions >= 0]
        return (int(known.min()), int(known.max())) if len(known) else None


@dataclass(slots=True)
class RowCounts:
    """Counts of sessions, rows and tokens, and of what was left out."""

    sessions: int = 0
    rows: int = 0
    tokens: int = 0
    """Tokens that train."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> sessions (`unknown`, `empty`) or rows (`overlong`: cut, masked or left out)."""

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.sessions + other.sessions,
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.left_out + other.left_out,
        )

    def json(self, prefix: str = "bridle") -> dict[str, float]:
        """Return the counts as metrics whose names begin with `prefix`."""
        left = {f"{prefix}/left_out/{name}": float(n) for name, n in sorted(self.left_out.items())}
        return {
            f"{prefix}/sessions": float(self.sessions),
            f"{prefix}/rows": float(self.rows),
            f"{prefix}/tokens_trained": float(self.tokens),
            **left,
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """Row limits of a trainer."""

    max_prompt: int | None = None
    """Most ids before the first sampled one; `None` = any number."""
    max_response: int | None = None
    """Most ids from there on."""
    overlong: Overlong = "mask"
    """A longer row is cut and trains nothing (`mask`), is cut and trains what is left (`truncate`:
    only the response may be over), or goes (`drop`)."""
    blanks: bool = False
    """A session of which nothing trains is one row that trains nothing; else it has none."""


def play(sessions: Sessions, tasks: Sequence[Task], samples: int) -> list[SessionGroup]:
    """Run `samples` sessions of each task, and return them as one group per task.

    `ConfigError` for a task that names something unknown.
    """
    played = iter(sessions.play([task for task in tasks for _ in range(samples)]))
    return [SessionGroup(task.task_id, tuple(itertools.islice(played, samples))) for task in tasks]


def by_task(trajectories: Iterable[Trajectory]) -> list[SessionGroup]:
    """Return trajectories grouped by their task, in the order of the groups' first sessions."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(str(trajectory.metadata.get("task_id") or ""), []).append(trajectory)
    return [SessionGroup(task_id, tuple(of)) for task_id, of in found.items()]


class TaskTable:
    """Tasks by id: what a trainer's data set names."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        """`ConfigError` if two have one id."""
        listed = list(tasks)
        self._tasks = {task.task_id: task for task in listed}
        if len(self._tasks) != len(listed):
            raise ConfigError("two tasks have the same task_id; give each task its own")

    def __getitem__(self, task_id: str) -> Task:
        if (task := self._tasks.get(task_id)) is None:
            raise ConfigError(
                f"the data set names task {task_id!r}, which is not in the task file; use the "
                "task file that the data set was made from"
            )
        return task

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())


def rows_of(
    groups: Sequence[SessionGroup], shape: Shape | None = None
) -> tuple[list[Row], RowCounts]:
    """Return the training rows of groups, one per trace that trains, and counts of what was left
    out.

    Rows come in the order of groups, samples and traces.
    """
    shape = shape or Shape()
    counts = RowCounts()
    rows: list[Row] = []
    for place, group in enumerate(groups):
        for sample, session in enumerate(group.sessions):
            counts.sessions += 1
            known = session.reward is not None
            traces = _of_session(session, shape, counts)
            rows += [
                Row(
                    place, group.task_id, sample, session,
                    trace if known else without_training(trace),
                    trace_reward(trace, session) if known else group.mean,
                    known, weight,
                )
                for trace, weight in zip(traces, trace_weights(traces).tolist(), strict=True)
            ]  # fmt: skip
            counts.left_out["unknown"] += not known
    counts.rows = len(rows)
    counts.tokens = sum(int(row.mask.sum()) for row in rows)
    counts.left_out = +counts.left_out
    return rows, counts


def _of_session(session: Trajectory, shape: Shape, counts: RowCounts) -> list[Trace]:
    trained = [trace for trace in session.traces if trace.loss_mask.any()]
    if not trained:
        counts.left_out["empty"] += 1
    fitting = []
    for trace in trained:
        fitted = fit_trace(trace, shape)
        counts.left_out["overlong"] += fitted is not trace
        if fitted is not None:
            fitting.append(fitted)
    return fitting or ([blank_row(session)] if shape.blanks else [])


def warn_of_own_rewards(bridge: str, session: Trajectory) -> None:
    """Warn, where a session has rewards of traces or tokens, that a bridge with one reward per
    session leaves them out.
    """
    if has_own_rewards(session):
        log.warning("trace_rewards_left_out", bridge=bridge, session=session.session_id)


def fit_trace(trace: Trace, shape: Shape) -> Trace | None:
    """Return the trace if it is within the trainer's length limits, else cut or masked as
    `shape.overlong` says; `None` = it is dropped.
    """
    prompt, response = len(trace.prompt_ids), len(trace.response_ids)
    most = prompt if shape.max_prompt is None else shape.max_prompt
    long_prompt = prompt > most
    if not long_prompt and (shape.max_response is None or response <= shape.max_response):
        return trace
    if shape.overlong == "drop":
        return None
    end = response if shape.max_response is None else min(response, shape.max_response)
    cut = trace.cut(end, max(0, prompt - most))
    # A token behind a cut prompt was sampled under another context.
    return without_training(cut) if long_prompt or shape.overlong == "mask" else cut


def without_training(trace: Trace) -> Trace:
    """Return the trace with nothing that trains: loss mask and logprobs are 0."""
    return dataclasses.replace(
        trace,
        loss_mask=np.zeros_like(trace.loss_mask),
        response_logprobs=np.zeros_like(trace.response_logprobs),
    )


def blank_row(session: Trajectory) -> Trace:
    """Return a trace of one prompt token and one response token, which does not train.

    It stands for a session of which nothing trains.
    """
    one = np.zeros(1, np.int32)
    return Trace.plain(f"{session.session_id}/blank", one, one, np.zeros(1, np.uint8))


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call on a trace: `response_ids[start:end]` was sampled, all before it given."""

    start: int
    end: int
    exchange_id: str
    given: tuple[JSON, ...]
    """Messages since the turn before, or since the prompt; none if they cannot be identified."""
    said: tuple[JSON, ...]
    """The model's messages: one, as a rule; none if they cannot be identified."""


def turns_of(trace: Trace) -> list[Turn]:
    """Return the model calls along a trace, each with its messages.

    Messages are assigned only if the trace has as many runs of model messages as calls. (A harness
    may write model messages of its own.)
    """
    spans = []
    before = 0
    for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=False):
        own = trace.reasons[before:end]
        spans.append((before + int((own == MaskReason.PROMPT).sum()), end, exchange_id))
        before = end
    texts = list(_runs(trace.response_messages))
    if len(texts) != len(spans):
        texts = [((), ())] * len(spans)
    return [Turn(*span, *text) for span, text in zip(spans, texts, strict=True)]


def _runs(messages: Sequence[JSON]) -> Iterator[tuple[tuple[JSON, ...], tuple[JSON, ...]]]:
    """Split a conversation into pairs: the messages given, then the model's reply to them."""
    given: tuple[JSON, ...] = ()
    for is_model, run in itertools.groupby(messages, lambda m: bool(m["role"] == "assistant")):
        if is_model:
            yield given, tuple(run)
        else:
            given = tuple(run)
