"""`pack`: the traces of a session or of a group as one tree in which each token stands once.

For trainers with tree attention: the model runs over every token once, however many traces share
it. A token sees its ancestors and itself, nothing beside them, and its position is its depth, so
its logprob is what it would be on its own path.

    ids        0   1   2   3   4   5   6            0 1 2 3 4   one trace
    parent    -1   0   1   2   3   2   5            0 1 2 5 6   the other
    position   0   1   2   3   4   3   4
    segment    0   0   0   1   1   2   2

Two tokens are one where all before them and they themselves are equal. The one exception keeps law
2: tokens that two sessions of a group sampled alike, and that train in both, stand in each, because
each has its own logprob and its own advantage. What follows them stands twice too.

The cost is linear in the tokens of the traces: runs are compared as arrays, and split where traces
part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bridle.experts import is_known
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import Ids, Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Traces as one tree of `N` tokens in `S` segments; parents come before their children."""

    ids: Ids
    """Shape (N,), int32."""
    parents: npt.NDArray[np.int32]
    """Index of the token before it on its path, -1 at the start of one; shape (N,)."""
    position_ids: npt.NDArray[np.int32]
    """Tokens before it on its path; shape (N,)."""
    segment_ids: npt.NDArray[np.int32]
    """Index of its run without a branch; contiguous, rising; shape (N,)."""
    segment_parents: npt.NDArray[np.int32]
    """Segment that each segment follows, to its end; -1 at a root; shape (S,)."""
    loss_mask: npt.NDArray[np.uint8]
    """1 = trains; shape (N,)."""
    logprobs: Logprobs
    """Of each token that trains, 0.0 elsewhere; shape (N,), float32."""
    versions: npt.NDArray[np.int32]
    """Policy version that sampled it, -1 elsewhere; shape (N,)."""
    trace_of: npt.NDArray[np.int32]
    """Index of the trace in which it trains, -1 elsewhere: where its advantage comes from."""
    last: tuple[int, ...]
    """For each trace, in the order given, the index of its last token."""
    traces: tuple[Trace, ...]
    """The traces that were packed."""

    def path(self, trace: int) -> npt.NDArray[np.int64]:
        """Return the indices of a trace's tokens, first to last; `ids[path(t)]` are its ids."""
        runs = []
        segment, end = int(self.segment_ids[self.last[trace]]), self.last[trace] + 1
        starts = np.searchsorted(self.segment_ids, np.arange(len(self.segment_parents) + 1))
        while segment >= 0:
            runs.append(np.arange(starts[segment], end))
            segment = int(self.segment_parents[segment])
            end = int(starts[segment + 1])
        return np.concatenate(runs[::-1])

    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """Return the experts that each token of the tree was routed to; `None` = no trace
        has them.
        """
        found: npt.NDArray[np.int16] | None = None
        for number, trace in enumerate(self.traces):
            rows = trace.routed_experts
            if rows is None or not len(rows):
                continue
            if found is None:
                found = np.full((len(self.ids), *rows.shape[1:]), -1, np.int16)
            own = self.path(number)
            found[own] = np.where(is_known(rows)[:, None, None], rows, found[own])
        return found


def pack(trajectories: Iterable[Trajectory]) -> Packed:
    """Return all traces of `trajectories` as one tree, in order; each shared token is in it once.

    Traces that have no ids are left out of it.
    """
    traces = [trace for trajectory in trajectories for trace in trajectory.traces]
    root = _Run(0, 0, 0)
    sources = [_Source.of(trace) for trace in traces]
    for number, source in enumerate(sources):
        _insert(root, number, source, sources)
    return _laid_out(root, traces, sources)


def block_mask(packed: Packed) -> npt.NDArray[np.bool_]:
    """Return the attention mask of a packed tree, shape (N, N): row attends to column.

    For models that take a dense mask.
    """
    parents = packed.segment_parents
    above = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for segment, parent in enumerate(parents.tolist()):
        if parent >= 0:
            above[segment] = above[parent]
        above[segment, segment] = True
    rows = packed.segment_ids
    at = np.arange(len(rows))
    sees: npt.NDArray[np.bool_] = above[rows[:, None], rows[None, :]] & (at[:, None] >= at[None, :])
    return sees


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A trace's whole sequence."""

    ids: Ids
    trains: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, trace: Trace) -> _Source:
        prompt = np.zeros(len(trace.prompt_ids), np.bool_)
        return cls(
            trace.ids,
            np.concatenate([prompt, trace.loss_mask == 1]),
        )


@dataclass(slots=True, eq=False)
class _Run:
    """Tokens `start <= i < end` of a trace's sequence, which no trace leaves in the middle."""

    source: int
    start: int
    end: int
    users: list[int] = field(default_factory=list)
    """Traces that pass through."""
    children: dict[int, list[_Run]] = field(default_factory=dict)
    """By their first id."""

    def split(self, at: int, sources: Sequence[_Source]) -> None:
        """End at `at`; what follows becomes the only child."""
        rest = _Run(self.source, at, self.end, [*self.users], self.children)
        self.end = at
        self.children = {int(sources[self.source].ids[at]): [rest]}


def _insert(root: _Run, number: int, source: _Source, sources: Sequence[_Source]) -> None:
    """Put a trace into the tree; a run that it leaves in the middle is split there."""
    at, run, size = 0, root, len(source.ids)
    while at < size:
        beside = run.children.setdefault(int(source.ids[at]), [])
        shared, found = 0, None
        for child in beside:
            length = _shared(child, at, source, sources)
            if length > shared:
                shared, found = length, child
        if found is None:
            found = _Run(number, at, size)
            beside.append(found)
            shared = size - at
        elif shared < found.end - found.start:
            found.split(found.start + shared, sources)
        found.users.append(number)
        at, run = at + shared, found


def _shared(run: _Run, at: int, source: _Source, sources: Sequence[_Source]) -> int:
    """Count the tokens from `at` that a trace shares with `run`, none of which trains in both."""
    length = min(run.end - run.start, len(source.ids) - at)
    here, other = slice(run.start, run.start + length), slice(at, at + length)
    owner = sources[run.source]
    parts = owner.ids[here] != source.ids[other]
    trains = source.trains[other]
    if trains.any():
        for user in run.users:
            parts = parts | (sources[user].trains[here] & trains)
    different = np.flatnonzero(parts)
    return int(different[0]) if len(different) else length


def _laid_out(root: _Run, traces: list[Trace], sources: list[_Source]) -> Packed:
    """Return the tree's arrays, depth first."""
    order: list[tuple[_Run, int]] = []
    stack = [(run, -1) for run in _below(root)]
    while stack:
        run, parent = stack.pop()
        stack += [(child, len(order)) for child in _below(run)]
        order.append((run, parent))
    starts = np.cumsum([0, *(run.end - run.start for run, _ in order)]).tolist()
    size = starts[-1]
    parents = np.arange(-1, size - 1, dtype=np.int32)
    positions = np.empty(size, np.int32)
    ids, mask = np.empty(size, np.int32), np.zeros(size, np.uint8)
    logprobs, versions = np.zeros(size, np.float32), np.full(size, -1, np.int32)
    trace_of = np.full(size, -1, np.int32)
    last = [-1] * len(traces)
    for (run, parent), start, end in zip(order, starts, starts[1:], strict=False):
        parents[start] = -1 if parent < 0 else starts[parent + 1] - 1
        positions[start:end] = np.arange(run.start, run.end)
        ids[start:end] = sources[run.source].ids[run.start : run.end]
        for user in run.users:
            trace = traces[user]
            if run.end == len(sources[user].ids):
                last[user] = end - 1
            first = max(run.start, len(trace.prompt_ids))
            if first >= run.end:
                continue
            own = slice(first - len(trace.prompt_ids), run.end - len(trace.prompt_ids))
            here = slice(start + first - run.start, end)
            trains = trace.loss_mask[own] == 1
            sampled = trace.versions[own] >= 0
            np.copyto(versions[here], trace.versions[own], where=sampled)
            np.copyto(mask[here], 1, where=trains)
            np.copyto(logprobs[here], trace.response_logprobs[own], where=trains)
            np.copyto(trace_of[here], user, where=trains)
    sizes = np.diff(starts)
    return Packed(
        ids=ids,
        parents=parents,
        position_ids=positions,
        segment_ids=np.repeat(np.arange(len(order), dtype=np.int32), sizes),
        segment_parents=np.array([parent for _, parent in order], dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        trace_of=trace_of,
        last=tuple(last),
        traces=tuple(traces),
    )


def _below(run: _Run) -> list[_Run]:
    """Return a run's children in reverse, for a stack."""
    return [child for same in run.children.values() for child in same][::-1]
