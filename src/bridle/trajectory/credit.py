"""Credit: from the rewards of a group to one advantage per session, and a weight per trace.

Pure numpy in float64. A group is the `G` sessions of one task. `NaN` stands for a session whose
reward is not known (its evaluator failed, law 5): it has no part in the group's mean and gets
advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

SMALLEST_STD = 1e-6
"""A group whose rewards vary less than this says nothing; dividing by its deviation would turn
rounding into advantages of full size."""


def grpo_advantages(group: Sequence[float], *, normalise: bool = True) -> Floats:
    """Advantage of each session against its group's mean; shape (G,).

    `normalise` divides by the group's standard deviation (population form), as in DeepSeekMath
    (arXiv 2402.03300, eq. 3); without it this is Dr. GRPO's (arXiv 2503.20783). A group that does
    not vary gets zeros either way.
    """
    rewards, known = _known(group)
    advantages = np.zeros_like(rewards)
    if known.sum() < 2:
        return advantages
    centred = rewards[known] - rewards[known].mean()
    deviation = rewards[known].std()
    if deviation < SMALLEST_STD:
        return advantages
    advantages[known] = centred / deviation if normalise else centred
    return advantages


def rloo_advantages(group: Sequence[float]) -> Floats:
    """Advantage of each session against the mean of all others (leave one out); shape (G,).

    REINFORCE leave-one-out, arXiv 2402.14740 eq. 6. A group of one gets 0.
    """
    rewards, known = _known(group)
    advantages = np.zeros_like(rewards)
    if known.sum() > 1:
        advantages[known] = rewards[known] - leave_one_out_baselines(group)[known]
    return advantages


def leave_one_out_baselines(group: Sequence[float]) -> Floats:
    """For each session the mean reward of all others that have one; shape (G,).

    `NaN` where no other has one.
    """
    rewards, known = _known(group)
    values = np.where(known, rewards, 0.0)
    others = known.sum() - known
    means: Floats = np.full(len(rewards), np.nan)
    np.divide(values.sum() - values, others, out=means, where=others > 0)
    return means


def shared_advantages(sessions: Sequence[Sequence[float]], kind: str) -> list[list[float]]:
    """Advantages of several known rewards per session, where each session has one vote.

    `kind` is `grpo`, `dr_grpo` or `rloo`. With one reward each, these are the advantages above.
    """
    means = [float(np.mean(rewards)) for rewards in sessions]
    if kind == "rloo":
        others = leave_one_out_baselines(means)
        return [(np.asarray(of) - mean).tolist() for of, mean in zip(sessions, others, strict=True)]
    centred = [np.asarray(rewards) - np.mean(means) for rewards in sessions]
    deviation = float(np.sqrt(np.mean([np.mean(np.square(of)) for of in centred])))
    if deviation < SMALLEST_STD:
        return [[0.0] * len(of) for of in centred]
    return [(of / (deviation if kind == "grpo" else 1.0)).tolist() for of in centred]


def session_weights(traces: Sequence[int]) -> list[Floats]:
    """For each session with `traces[s]` traces, the weight of each: they sum to 1.

    So a session that forked into many traces does not outvote one with few.
    """
    return [np.full(count, 1.0 / count if count else 0.0) for count in traces]


def token_weights(trained_per_trace: Sequence[int]) -> Floats:
    """Weight of each token in each trace of one session, so that all its tokens together weigh 1.

    `trained_per_trace` counts the tokens that train; shape (traces,). Zeros where none does.
    """
    total = sum(trained_per_trace)
    return np.full(len(trained_per_trace), 1.0 / total if total else 0.0)


def _known(rewards: Sequence[float]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    values = np.asarray(rewards, dtype=np.float64)
    return values, np.isfinite(values)
