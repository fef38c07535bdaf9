"""Credit: from the rewards of a group to one advantage per session, and a weight per trace.

Pure numpy in float64. A group is the `G` sessions of one task. `NaN` stands for a session whose
reward is not known (its evaluator failed, law 5): it has no part in the group's mean and gets
advantage 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bridle.trajectory.sample import Trace, Trajectory

Floats = npt.NDArray[np.float64]

SMALLEST_STD = 1e-6
"""A group whose rewards vary less than this says nothing; dividing by its deviation would turn
rounding into advantages of full size."""


def grpo_advantages(group: Sequence[float], *, normalise: bool = True) -> Floats:
    """Return the advantage of each session against its group's mean; shape (G,).

    `normalise` divides by the group's standard deviation (population form), as in DeepSeekMath
    (arXiv 2402.03300, eq. 3); without it this is Dr. GRPO's (arXiv 2503.20783). A group that does
    not vary gets zeros either way.
    """
    return np.array(session_advantages(group, "grpo" if normalise else "dr_grpo"))


def session_advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Return the advantage of each session of a group; `kind` is `grpo`, `dr_grpo` or `rloo`.

    A session without others that have a reward gets 0.
    """
    values = np.asarray(rewards, dtype=np.float64)
    known = np.isfinite(values)
    found = np.zeros(len(values))
    if known.sum() > 1:
        found[known] = np.concatenate(shared_advantages(values[known, None], kind))
    return [float(value) for value in found]


def shared_advantages(sessions: Sequence[Sequence[float]] | Floats, kind: str) -> list[list[float]]:
    """Return the advantages of sessions with several known rewards each, where each session has one
    vote.

    There are at least two sessions. `rloo` is against the mean of all others (REINFORCE
    leave-one-out, arXiv 2402.14740 eq. 6), the other kinds as in `grpo_advantages`.
    """
    means = np.array([np.mean(rewards) for rewards in sessions])
    if kind == "rloo":
        others = (means.sum() - means) / (len(means) - 1)
        return [(np.asarray(of) - mean).tolist() for of, mean in zip(sessions, others, strict=True)]
    centred = [np.asarray(rewards) - means.mean() for rewards in sessions]
    deviation = float(np.sqrt(np.mean([np.mean(np.square(of)) for of in centred])))
    if deviation < SMALLEST_STD:
        return [[0.0] * len(of) for of in centred]
    return [(of / (deviation if kind == "grpo" else 1.0)).tolist() for of in centred]


def role_advantages(
    rewards: Sequence[float], parts: Sequence[Sequence[tuple[Hashable, float]]], kind: str
) -> tuple[list[list[float]], int]:
    """Return the advantages of parts of sessions (traces or turns), each compared within its role.

    `rewards` has each session's own, `parts` the role and reward of each of its parts. Also returns
    how many advantages are the session's own because no other session has that role.
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
    """Return kind and name of the agent (main agent, sub-agent) that produced a trace."""
    return trace.metadata.get("kind"), trace.metadata.get("agent")


def trace_reward(trace: Trace, session: Trajectory) -> float:
    """Return a trace's reward: the sum of its token rewards, else its own reward, else its
    session's.

    `NaN` = not known.
    """
    if session.reward is None:
        return float("nan")
    if trace.token_rewards is not None:
        return float(trace.token_rewards.sum(dtype=np.float64))
    return float(session.reward if trace.reward is None else trace.reward)


def trace_advantages(sessions: Sequence[Trajectory], kind: str) -> tuple[list[list[float]], int]:
    """Return one advantage per trace of each session of a group, and how many of them are the
    session's own because no other session has a trace of that role.

    A trace gets its session's advantage, unless an evaluator rewarded traces or tokens of the
    group: then it is compared with the traces of its role in the other sessions.
    """
    rewards = [float("nan") if one.reward is None else float(one.reward) for one in sessions]
    parts = [[(role_of(t), trace_reward(t, one)) for t in one.traces] for one in sessions]
    if any(one.reward is not None and has_own_rewards(one) for one in sessions):
        return role_advantages(rewards, parts, kind)
    own = session_advantages(rewards, kind)
    return [[value] * len(of) for value, of in zip(own, parts, strict=True)], 0


def roots_of(sessions: Sequence[Trajectory]) -> list[int]:
    """Return, for each session of a group, the index of the session that it was forked from first.

    A session that is no fork, or a fork of a session outside the group, has its own index.
    """
    places = {session.session_id: place for place, session in enumerate(sessions)}
    found = []
    for place in range(len(sessions)):
        root, above = place, _origin(sessions[place], places)
        while above is not None:
            root, above = above, _origin(sessions[above], places)
        found.append(root)
    return found


def _origin(session: Trajectory, places: Mapping[str, int]) -> int | None:
    fork = session.metadata.get("fork")
    return None if fork is None else places.get(fork["session"])


def tree_advantages(sessions: Sequence[Trajectory], kind: str) -> list[list[Floats]]:
    """Return the advantage of each response token of each trace of a group that has forks of its
    own sessions.

    At a branch point, what a session did next is compared with what its forks from there did: each
    of them is worth the mean of what the next branch point has, or its reward where there is none.
    Tokens before the first branch point are compared with those of the group's other roots. These
    are the sibling comparisons of TreeRPO (arXiv 2506.05183), with turns as steps.
    """
    return _Tree(sessions, kind).advantages()


class _Tree:
    """Branch points and values of a group; `kind` as for `session_advantages`."""

    def __init__(self, sessions: Sequence[Trajectory], kind: str) -> None:
        self._sessions, self._kind = sessions, kind
        places = {session.session_id: place for place, session in enumerate(sessions)}
        points: list[dict[frozenset[str], list[int]]] = [{} for _ in sessions]
        self._roots = []
        for place, session in enumerate(sessions):
            above = _origin(session, places)
            if above is None:
                self._roots.append(place)
            else:
                before = frozenset(session.metadata["fork"]["replayed"])
                points[above].setdefault(before, []).append(place)
        self._points = [sorted(of.items(), key=lambda point: len(point[0])) for of in points]
        """Of each session: the exchanges before a branch point and the forks from there."""
        self._found = [[0.0] * (len(of) + 1) for of in self._points]
        """Of each session: the advantage of what lies before, between and after its points."""

    def advantages(self) -> list[list[Floats]]:
        self._compare([(place, 0) for place in self._roots])
        for place, points in enumerate(self._points):
            for number in range(len(points)):
                self._compare(self._branches(place, number))
        return [
            [self._of_trace(place, trace) for trace in session.traces]
            for place, session in enumerate(self._sessions)
        ]

    def _branches(self, place: int, number: int) -> list[tuple[int, int]]:
        """Return the sessions that part at a branch point, each with its part that begins there."""
        return [(place, number + 1), *((fork, 0) for fork in self._points[place][number][1])]

    def _compare(self, branches: Sequence[tuple[int, int]]) -> None:
        values = [self._value(place, part) for place, part in branches]
        for (place, part), own in zip(
            branches, session_advantages(values, self._kind), strict=True
        ):
            self._found[place][part] = own

    def _value(self, place: int, part: int) -> float:
        """Return the worth of a session from the beginning of one of its parts.

        `NaN` = not known.
        """
        if part == len(self._points[place]):
            reward = self._sessions[place].reward
            return float("nan") if reward is None else float(reward)
        values = np.array([self._value(*branch) for branch in self._branches(place, part)])
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else float("nan")

    def _of_trace(self, place: int, trace: Trace) -> Floats:
        found: Floats = np.zeros(len(trace.response_ids))
        begin = 0
        for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            part = sum(exchange_id not in before for before, _ in self._points[place])
            found[begin:end] = self._found[place][part]
            begin = max(begin, end)
        return found


def trace_weights(traces: Sequence[Trace]) -> Floats:
    """Return the weight of each trace of one session, by its sampled tokens that train; they sum to
    1.

    So small calls that an agent makes beside its work get little of the weight. A trace that is
    masked as a whole keeps its part; traces of which none has such a token weigh alike.
    """
    counts = [int(t.loss_mask.sum()) or int((t.reasons == 0).sum()) for t in traces]
    total = sum(counts)
    return np.array([n / total if total else 1.0 / len(counts) for n in counts])
