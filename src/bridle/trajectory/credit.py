"""Credit: from the rewards of a group to one advantage per session, and a weight per trace.

Pure numpy in float64. A group is the `G` sessions of one task. `NaN` stands for a session whose
reward is not known (its evaluator failed, law 5): it has no part in the group's mean and gets
advantage 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from bridle.trajectory.sample import Trace, Trajectory

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


def session_advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Advantage of each session; `kind` is `grpo`, `dr_grpo` or `rloo`."""
    found = (
        rloo_advantages(rewards)
        if kind == "rloo"
        else grpo_advantages(rewards, normalise=kind == "grpo")
    )
    return [float(value) for value in found]


def role_advantages(
    rewards: Sequence[float], parts: Sequence[Sequence[tuple[Hashable, float]]], kind: str
) -> tuple[list[list[float]], int]:
    """Advantages of the parts of sessions (traces, turns), each compared within its role.

    `rewards` has each session's own, `parts` the role and reward of each of its parts. Returns the
    advantages of the parts, and how many are the session's because no other session has that role.
    """
    found = [
        [own] * len(of) for own, of in zip(session_advantages(rewards, kind), parts, strict=True)
    ]
    cells: dict[Hashable, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, of in enumerate(parts):
        if np.isfinite(rewards[number]):
            for place, (role, _) in enumerate(of):
                cells[role][number].append(place)
    alone = 0
    for cell in cells.values():
        if len(cell) == 1:
            alone += sum(map(len, cell.values()))
            continue
        given = [[parts[number][place][1] for place in places] for number, places in cell.items()]
        compared = shared_advantages(given, kind)
        for (number, places), own in zip(cell.items(), compared, strict=True):
            for place, advantage in zip(places, own, strict=True):
                found[number][place] = advantage
    return found, alone


def has_own_rewards(session: Trajectory) -> bool:
    """Return whether an evaluator gave the session's traces or tokens rewards of their own."""
    return any(
        trace.token_rewards is not None or trace.reward not in (None, session.reward)
        for trace in session.traces
    )


def role_of(trace: Trace) -> tuple[str | None, str | None]:
    """Kind and name of the agent whose trace it is."""
    return trace.metadata.get("kind"), trace.metadata.get("agent")


def trace_reward(trace: Trace, session: Trajectory) -> float:
    """The sum of its token rewards, else its own reward, else the session's; `NaN` = not known."""
    if session.reward is None:
        return float("nan")
    if trace.token_rewards is not None:
        return float(trace.token_rewards.sum(dtype=np.float64))
    return float(session.reward if trace.reward is None else trace.reward)


def trace_advantages(sessions: Sequence[Trajectory], kind: str) -> list[list[float]]:
    """One advantage per trace of each session of a group.

    It is the session's, unless an evaluator rewarded traces or tokens of the group: then a trace is
    compared with those of its role in the other sessions.
    """
    rewards = [float("nan") if one.reward is None else float(one.reward) for one in sessions]
    parts = [[(role_of(t), trace_reward(t, one)) for t in one.traces] for one in sessions]
    if any(one.reward is not None and has_own_rewards(one) for one in sessions):
        return role_advantages(rewards, parts, kind)[0]
    own = session_advantages(rewards, kind)
    return [[value] * len(of) for value, of in zip(own, parts, strict=True)]


def session_weights(traces: Sequence[int]) -> list[Floats]:
    """For each session with `traces[s]` traces, the weight of each: they sum to 1.

    So a session that forked into many traces does not outvote one with few.
    """
    return [np.full(count, 1.0 / count if count else 0.0) for count in traces]


def trace_weights(traces: Sequence[Trace]) -> Floats:
    """Weight of each trace of one session, by its sampled tokens that train; they sum to 1.

    So tiny calls that an agent makes beside its work take little of its weight. A trace that is
    masked as a whole keeps its part; traces of which none has such a token weigh alike.
    """
    counts = [int(t.loss_mask.sum()) or int((t.reasons == 0).sum()) for t in traces]
    total = sum(counts)
    return np.array([n / total if total else 1.0 / len(counts) for n in counts])


def token_weights(trained_per_trace: Sequence[int]) -> Floats:
    """Weight of each token in each trace of one session, so that all its tokens together weigh 1.

    `trained_per_trace` counts the tokens that train; shape (traces,). Zeros where none does.
    """
    total = sum(trained_per_trace)
    return np.full(len(trained_per_trace), 1.0 / total if total else 0.0)


def _known(rewards: Sequence[float]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    values = np.asarray(rewards, dtype=np.float64)
    return values, np.isfinite(values)
