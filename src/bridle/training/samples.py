"""From groups of sessions to what one update computes: traces with an advantage and a weight.

Everything that decides how much a token counts is here, in numpy; the objective only sums. The
weights of a batch's tokens sum to 1 (less what `overlong = "mask"` took out), so the learning rate
means the same for any number of groups, sessions, traces or tokens. Dr. GRPO's do not: they are one
constant per session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridle.errors import TrainingError
from bridle.training.settings import GrpoSettings
from bridle.trajectory.credit import (
    Floats,
    role_advantages,
    role_of,
    roots_of,
    trace_advantages,
    tree_advantages,
)
from bridle.trajectory.sample import Trace, Trajectory, refuse_images
from bridle.types import JSON, LogprobMode

DR_GRPO_TOKENS = 1024
"""Constant by which Dr. GRPO divides the sum over a session's tokens. It only scales the loss."""

_FULL_SUPPORT: dict[str, tuple[float | None, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": (None,),
}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The sessions of one task that are compared with each other."""

    index: int
    """Number of the group in the training, from 0; -1 = from elsewhere."""
    task_id: str
    sessions: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """Reward of each session of the group; NaN where it is not known."""
        return [float("nan") if s.reward is None else float(s.reward) for s in self.sessions]

    @property
    def trains(self) -> bool:
        """Return whether at least two sessions have a known reward and trainable tokens."""
        return sum(s.reward is not None and _trained(s) > 0 for s in self.sessions) > 1

    @property
    def varies(self) -> bool:
        """Return whether the group's rewards give any session, trace or turn an advantage other
        than 0.
        """
        return _any(advantages_of(self, "grpo")[0])


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trace of a batch."""

    trace: Trace
    group: int
    """Place of its group in the batch."""
    advantage: float | Floats
    """Of each token that trains: one for all, or one per response token, shape (R,)."""
    weight: float
    """Of each token that trains."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one update, and counts of the rest."""

    samples: tuple[Sample, ...]
    version: int
    """Of the weights that are updated."""
    sessions: int
    """Sessions that count."""
    left_out: dict[str, int]
    """Reason -> sessions (`unknown` reward, `empty`, `flat`, `stale`, `newer`, `unversioned`) or
    traces (`overlong`)."""
    lags: dict[int, int]
    """Updates between sampling and training -> tokens that train; -1 = version not known."""
    alone: int = 0
    """Advantages that are the session's own: no other session has that role (or turn of it)."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch that train."""
        return sum(self.lags.values())


def make_batch(
    groups: Sequence[Group], settings: GrpoSettings, *, version: int, max_lag: int | None = None
) -> Batch:
    """Return the samples of `groups` for an update of the weights of `version`.

    With `max_lag`, sessions are left out that have a token sampled more updates ago (`stale`), of a
    version that there is not yet (`newer`) or of an unknown one (`unversioned`). Raises
    `TrainingError` for sessions with images, for those that were not sampled from the trained
    distribution, and for traces over the length limit if the settings refuse these.
    """
    left_out: Counter[str] = Counter()
    alone = 0
    kept: dict[tuple[int, int], list[tuple[Trace, float | Floats]]] = {}
    """By group and root: a session's forks share its weight."""
    sessions = 0
    for place, group in enumerate(groups):
        for session in group.sessions:
            refuse_images("`bridle train`", session)
            check_sampling(session, settings.temperature)
        advantages, without = advantages_of(group, settings.advantage)
        if settings.flat_groups != "keep" and not _any(advantages):
            left_out["flat"] += len(group.sessions)
            continue
        alone += without
        roots = roots_of(group.sessions)
        for root, session, own in zip(roots, group.sessions, advantages, strict=True):
            reason = _unfit(session, version, max_lag)
            if reason is not None:
                left_out[reason] += 1
                continue
            if traces := _fitting(session, own, settings, left_out):
                kept.setdefault((place, root), []).extend(traces)
                sessions += 1
    weights = _weights([[trace for trace, _ in traces] for traces in kept.values()], settings)
    samples = tuple(
        Sample(trace, place, advantage, weight)
        for ((place, _), traces), shares in zip(kept.items(), weights, strict=True)
        for (trace, advantage), weight in zip(traces, shares, strict=True)
        if trains(trace)
    )
    return Batch(samples, version, sessions, dict(left_out), _lags(samples, version), alone)


def nothing_left(batch: Batch) -> str:
    """Return an error text that says why all sessions of a batch were left out, and what to
    change.
    """
    message = f"nothing to train on; left out: {batch.left_out}"
    if "stale" in batch.left_out:
        message += "; stale sessions were sampled more than max_lag updates ago: raise max_lag"
    if "newer" in batch.left_out:
        message += (
            f"; newer sessions have tokens of versions after {batch.version}, which this training "
            "has not made: an engine samples with the weights of another one"
        )
    if "unversioned" in batch.left_out:
        message += (
            "; the engine did not say which weights sampled the unversioned sessions, so their lag "
            "is not known: take an engine that reports versions (`bridle doctor` tells)"
        )
    return message


def trains(trace: Trace) -> int:
    """Return how many tokens of a trace can train; the first id of a sequence cannot."""
    mask = trace.loss_mask if len(trace.prompt_ids) else trace.loss_mask[1:]
    return int(mask.sum())


def _trained(session: Trajectory) -> int:
    return sum(map(trains, session.traces))


def advantages_of(group: Group, kind: str) -> tuple[list[list[float | Floats]], int]:
    """Return the advantage of each trace of each session of a group, and how many of them are the
    session's own because no other session has that role.

    Where an evaluator gave traces rewards of their own, a trace is compared with those of its role
    (kind and name of the agent) in the group's other sessions. Where it gave rewards per token,
    each turn is compared: its value is the rewards from its beginning to the trace's end, and it is
    compared with the same turn of the role. Each session counts once in a mean, however many traces
    it has. A group with forks of its own sessions is compared branch by branch (`tree_advantages`).
    """
    if len(set(roots_of(group.sessions))) < len(group.sessions):
        return [[*of] for of in tree_advantages(group.sessions, kind)], 0
    known = [(n, s) for n, s in enumerate(group.sessions) if s.reward is not None]
    by_trace, alone = trace_advantages(group.sessions, kind)
    found: list[list[float | Floats]] = [[*of] for of in by_trace]
    if not any(t.token_rewards is not None for _, s in known for t in s.traces):
        return found, alone
    parts: list[list[tuple[tuple[object, int], float]]] = [[] for _ in group.sessions]
    for number, session in known:
        for trace in session.traces:
            values = _returns(trace, session.reward)
            parts[number] += [((role_of(trace), n), value) for n, value in enumerate(values)]
    compared, alone = role_advantages(group.rewards, parts, kind)
    for number, session in known:
        left = iter(compared[number])
        for place, trace in enumerate(session.traces):
            ends = _turn_ends(trace)
            found[number][place] = np.repeat([next(left) for _ in ends], np.diff([0, *ends]))
    return found, alone


def _any(advantages: Sequence[Sequence[float | Floats]]) -> bool:
    return any(np.any(advantage) for of in advantages for advantage in of)


def _turn_ends(trace: Trace) -> list[int]:
    return sorted({*trace.turn_ends, len(trace.response_ids)} - {0})


def _returns(trace: Trace, reward: float | None) -> list[float]:
    """Return the value of each turn: the token rewards from its beginning to the trace's end, else
    the reward of the trace or session.
    """
    ends = _turn_ends(trace)
    if trace.token_rewards is None or not ends:
        own = reward if trace.reward is None else trace.reward
        return [float(own or 0)] * len(ends)
    rewards = np.add.reduceat(trace.token_rewards.astype(np.float64), [0, *ends[:-1]])
    return [float(value) for value in rewards[::-1].cumsum()[::-1]]


def _unfit(session: Trajectory, version: int, max_lag: int | None) -> str | None:
    """Return the reason that a session does not train; `None` = it does."""
    if session.reward is None:
        return "unknown"
    if not _trained(session):
        return "empty"
    if max_lag is None:
        return None
    versions = np.concatenate([trace.versions[trace.loss_mask == 1] for trace in session.traces])
    if (versions < 0).any():
        return "unversioned"
    if int(versions.max()) > version:
        return "newer"
    return "stale" if version - int(versions.min()) > max_lag else None


def _fitting(
    session: Trajectory,
    advantages: Sequence[float | Floats],
    settings: GrpoSettings,
    left_out: Counter[str],
) -> list[tuple[Trace, float | Floats]]:
    """Return the session's traces within the limit.

    A masked one stays, with nothing that trains.
    """
    kept = []
    for trace, advantage in zip(session.traces, advantages, strict=True):
        if settings.max_length is None or trace.size <= settings.max_length:
            kept.append((trace, advantage))
            continue
        left_out["overlong"] += 1
        if settings.overlong == "refuse":
            raise TrainingError(
                f"trace {trace.trace_id} has {trace.size} tokens, over the limit max_length = "
                f"{settings.max_length}; set overlong to 'mask', 'truncate' or 'drop' to train in "
                "spite of it"
            )
        if settings.overlong == "truncate":
            end = max(0, settings.max_length - len(trace.prompt_ids))
            shorter = advantage[:end] if isinstance(advantage, np.ndarray) else advantage
            kept.append((trace.cut(end), shorter))
        elif settings.overlong == "mask":
            kept.append((replace(trace, loss_mask=trace.loss_mask * 0), advantage))
    return kept


def check_sampling(session: Trajectory, temperature: float) -> None:
    """Raise `TrainingError` if a token that trains was not sampled at `temperature` alone.

    Metadata of older versions without `sampling` is judged by its `temperatures`.
    """
    for trace in filter(trains, session.traces):
        where = f"session {session.session_id} (trace {trace.trace_id})"
        sampling = trace.metadata.get("sampling")
        if sampling is None:
            sampling = {"temperature": trace.metadata.get("temperatures", ())}
        for field, values in sampling.items():
            for value in values:
                if (fault := unfit_setting(field, value, temperature)) is not None:
                    raise TrainingError(f"{where} {fault}")
        mode = trace.logprob_mode
        if mode == LogprobMode.NONE or (mode != LogprobMode.PROCESSED and temperature != 1):
            raise TrainingError(
                f"{where} has logprobs of mode {mode or 'unknown'!r}, and training at temperature "
                f"{temperature:g} needs 'processed', those after the temperature: set the engine's "
                "(vLLM: --logprobs-mode processed_logprobs; SGLang: no "
                "SGLANG_RETURN_ORIGINAL_LOGPROB), or sample and train at temperature 1"
            )


def unfit_setting(field: str, value: float | JSON | None, temperature: float) -> str | None:
    """Return why samples under this sampling setting cannot be trained at `temperature`; `None` =
    they can.

    `field` is one of `SamplingPolicy`; a `value` of `None` is the engine's default: temperature 1,
    full support.
    """
    if isinstance(value, dict):
        return (
            f"samples with a {field}, and training is for none: set the task's "
            f'sampling.{field} = {{mode = "override"}}'
        )
    allowed = _FULL_SUPPORT | {"temperature": (temperature,)}
    if value is None:
        value = 1 if field == "temperature" else allowed[field][0]
    if value is None or value in allowed[field]:
        return None
    trained = allowed[field][0]
    also = f", or [grpo] temperature = {value:g}" if field == "temperature" and value > 0 else ""
    return (
        f"samples at {field} {value:g}, and training is for {trained:g}: set the task's "
        f'sampling.{field} = {{mode = "override", value = {trained:g}}}{also}'
    )


def _weights(sessions: Sequence[Sequence[Trace]], settings: GrpoSettings) -> list[list[float]]:
    """Return for each session the weight of a token of each of its traces."""
    counts = [[trains(trace) for trace in traces] for traces in sessions]
    share = 1.0 / max(1, len(sessions))
    if settings.advantage == "dr_grpo":
        return [[share / DR_GRPO_TOKENS] * len(traces) for traces in counts]
    if settings.normalise == "batch":
        each = 1.0 / max(1, sum(map(sum, counts)))
        return [[each] * len(traces) for traces in counts]
    if settings.normalise == "sequence":
        return [[share / len(of) / max(1, count) for count in of] for of in counts]
    return [[share / max(1, sum(_sizes(traces)))] * len(traces) for traces in sessions]


def _sizes(traces: Sequence[Trace]) -> list[int]:
    """Return tokens of each trace that count for its session's weight, also where they are masked
    now.
    """
    return [trains(t) or int((t.reasons == 0).sum()) for t in traces]


def _lags(samples: Sequence[Sample], version: int) -> dict[int, int]:
    lags: Counter[int] = Counter()
    for sample in samples:
        trace = sample.trace
        values, counts = np.unique(trace.versions[trace.loss_mask == 1], return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            lags[-1 if value < 0 else version - value] += count
    return dict(sorted(lags.items()))
