"""From groups of sessions to what one update computes: traces with an advantage and a weight.

Everything that decides how much a token counts is here, in numpy; the objective only sums. The
weights of a batch's tokens sum to 1 (less what `overlong = "mask"` took out), so the learning rate
means the same for any number of groups, sessions, traces or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridle.errors import TrainingError
from bridle.training.settings import GrpoSettings
from bridle.trajectory.credit import (
    grpo_advantages,
    rloo_advantages,
    session_weights,
    token_weights,
)
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import LogprobMode


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The sessions of one task that are compared with each other."""

    index: int
    """The how manieth group of the training it is; -1 = from elsewhere."""
    task_id: str
    sessions: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """One per session; NaN where it is not known."""
        return [float("nan") if s.reward is None else float(s.reward) for s in self.sessions]

    @property
    def trains(self) -> bool:
        """Whether two sessions with a known reward and something to train are there."""
        return sum(s.reward is not None and _trained(s) > 0 for s in self.sessions) > 1

    @property
    def varies(self) -> bool:
        """Whether its rewards tell the sessions apart."""
        return bool(grpo_advantages(self.rewards).any())


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trace of a batch."""

    trace: Trace
    group: int
    """Place of its group in the batch."""
    advantage: float
    """Of each token that trains."""
    weight: float
    """Of each token that trains."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update computes, and what became of the rest."""

    samples: tuple[Sample, ...]
    version: int
    """Of the weights that are updated."""
    sessions: int
    """Sessions that count."""
    left_out: dict[str, int]
    """Reason -> sessions (`unknown`, `empty`, `flat`, `stale`) or traces (`overlong`)."""
    lags: dict[int, int]
    """Updates between sampling and training -> tokens that train."""

    @property
    def tokens(self) -> int:
        return sum(self.lags.values())


def make_batch(
    groups: Sequence[Group], settings: GrpoSettings, *, version: int, max_lag: int | None = None
) -> Batch:
    """The samples of `groups` for an update of weights `version`.

    A session with a token sampled more than `max_lag` updates ago is left out (`None` = none is).
    Raises `TrainingError` for logprobs that are not those of the trained distribution, and for
    traces over the limit where that is refused.
    """
    left_out: Counter[str] = Counter()
    kept: list[tuple[int, float, list[Trace]]] = []
    for place, group in enumerate(groups):
        advantages = _advantages(group, settings)
        if settings.flat_groups != "keep" and not advantages.any():
            left_out["flat"] += len(group.sessions)
            continue
        for session, advantage in zip(group.sessions, advantages.tolist(), strict=True):
            reason = _unfit(session, version, max_lag)
            if reason is not None:
                left_out[reason] += 1
                continue
            if traces := _fitting(session, settings, left_out):
                kept.append((place, advantage, traces))
    weights = _weights([traces for _, _, traces in kept], settings)
    samples = tuple(
        Sample(trace, place, advantage, weight)
        for (place, advantage, traces), shares in zip(kept, weights, strict=True)
        for trace, weight in zip(traces, shares, strict=True)
        if trains(trace)
    )
    return Batch(samples, version, len(kept), dict(left_out), _lags(samples, version))


def trains(trace: Trace) -> int:
    """How many tokens of a trace can be trained on: the very first id of a sequence cannot."""
    mask = trace.loss_mask if len(trace.prompt_ids) else trace.loss_mask[1:]
    return int(mask.sum())


def _trained(session: Trajectory) -> int:
    return sum(map(trains, session.traces))


def _advantages(group: Group, settings: GrpoSettings) -> np.ndarray:
    if settings.advantage == "rloo":
        return rloo_advantages(group.rewards)
    return grpo_advantages(group.rewards, normalise=settings.advantage == "grpo")


def _unfit(session: Trajectory, version: int, max_lag: int | None) -> str | None:
    """Why a session does not train; `None` = it does."""
    if session.reward is None:
        return "unknown"
    if not _trained(session):
        return "empty"
    if max_lag is None:
        return None
    told = [t.versions[(t.loss_mask == 1) & (t.versions >= 0)] for t in session.traces]
    oldest = min((int(versions.min()) for versions in told if len(versions)), default=version)
    return "stale" if version - oldest > max_lag else None


def _fitting(session: Trajectory, settings: GrpoSettings, left_out: Counter[str]) -> list[Trace]:
    """The session's traces within the limit; a masked one stays, with nothing that trains."""
    kept = []
    for trace in session.traces:
        _check_logprobs(trace, settings)
        length = len(trace.prompt_ids) + len(trace.response_ids)
        if settings.max_length is None or length <= settings.max_length:
            kept.append(trace)
            continue
        left_out["overlong"] += 1
        if settings.overlong == "refuse":
            raise TrainingError(
                f"trace {trace.trace_id} has {length} tokens, over the limit of "
                f"{settings.max_length}; `overlong` says what else to do with it"
            )
        if settings.overlong == "truncate":
            kept.append(_cut(trace, max(0, settings.max_length - len(trace.prompt_ids))))
        elif settings.overlong == "mask":
            kept.append(replace(trace, loss_mask=trace.loss_mask * 0))
    return kept


def _cut(trace: Trace, end: int) -> Trace:
    """A trace with the first `end` tokens of its response."""
    rewards = trace.token_rewards
    return replace(
        trace,
        response_ids=trace.response_ids[:end],
        loss_mask=trace.loss_mask[:end],
        response_logprobs=trace.response_logprobs[:end],
        versions=trace.versions[:end],
        reasons=trace.reasons[:end],
        token_rewards=None if rewards is None else rewards[:end],
    )


def _check_logprobs(trace: Trace, settings: GrpoSettings) -> None:
    if trace.logprob_mode == LogprobMode.RAW and settings.temperature != 1:
        raise TrainingError(
            f"trace {trace.trace_id} has logprobs from before the temperature; at "
            f"{settings.temperature:g} they are not of the distribution that it was sampled from "
            "(vLLM: --logprobs-mode processed_logprobs)"
        )


def _weights(sessions: Sequence[Sequence[Trace]], settings: GrpoSettings) -> list[list[float]]:
    """For each session the weight of a token of each of its traces."""
    counts = [[trains(trace) for trace in traces] for traces in sessions]
    share = 1.0 / max(1, len(sessions))
    if settings.normalise == "batch":
        each = 1.0 / max(1, sum(map(sum, counts)))
        return [[each] * len(traces) for traces in counts]
    if settings.normalise == "token":
        return [(token_weights(_sizes(s)) * share).tolist() for s in sessions]
    found = session_weights([len(traces) for traces in counts])
    return [
        [share * weight / max(1, count) for weight, count in zip(weights, of, strict=True)]
        for weights, of in zip(found, counts, strict=True)
    ]


def _sizes(traces: Sequence[Trace]) -> list[int]:
    """Tokens of each trace that count for its session's weight, also where they are masked now."""
    return [trains(t) or int((t.reasons == 0).sum()) for t in traces]


def _lags(samples: Sequence[Sample], version: int) -> dict[int, int]:
    lags: Counter[int] = Counter()
    for sample in samples:
        trace = sample.trace
        values, counts = np.unique(trace.versions[trace.loss_mask == 1], return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            lags[version - value] += count
    return dict(sorted(lags.items()))
