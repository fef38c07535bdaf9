"""Interface to the data of the pages: a run folder or a rollout server.

Files that `bridle certify` and `bridle score` left in a run folder are checked here for the pages.

`attempts_of` makes the tree of attempts: a session, its forks, their forks, and where they part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from bridle.dashboard.session import CapturedSession
from bridle.dashboard.summaries import Overview, SampleGroup, SessionFilter, SessionRow, SessionSet
from bridle.node.results import CERTIFICATE, SCORERS
from bridle.trajectory.causes import Suspect
from bridle.trajectory.fidelity import TurnAgreement
from bridle.trajectory.sample import Trajectory
from bridle.trajectory.scores import Disagreement
from bridle.types import JSON


@dataclass(frozen=True, slots=True)
class FactRow:
    """A fact that one side or both declare."""

    name: str
    rollout: Any
    trainer: Any
    same: bool | None
    """`None` = one side is silent."""


@dataclass(frozen=True, slots=True)
class MismatchRow:
    """Tokens on which both sides disagree for one reason."""

    causes: Sequence[Suspect]
    token_share: float
    kl_share: float


@dataclass(frozen=True, slots=True)
class RunCertificate:
    """The content of the file: that of `bridle.trajectory.fidelity.Certificate`, and its origin."""

    made_at: float
    """Unix time, seconds."""
    trainer: str
    """The model folder or the file of logprobs."""
    faithful: bool
    tokens: int
    missing: int
    kl: float
    rms: float
    tolerance: float
    facts: Sequence[FactRow]
    mismatches: Sequence[MismatchRow]
    turns: Sequence[TurnAgreement]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunReport(Generic[T]):
    """A file that a command left in a run folder, and the type of its content."""

    file: str
    form: TypeAdapter[T]
    title: str
    """Words before the name of a run that has none."""

    def read(self, content: JSON) -> T | None:
        """Return the report in a file's content; `None` = it is malformed."""
        try:
            return self.form.validate_python(content)
        except ValidationError:
            return None


CERTIFIED: Final = RunReport(
    CERTIFICATE, TypeAdapter(RunCertificate), "certificate by `bridle certify` for"
)
COMPARED_SCORERS: Final = RunReport(SCORERS, TypeAdapter(Disagreement), "comparison of scorers on")


@dataclass(frozen=True, slots=True)
class SessionPage:
    """A page of the session list."""

    lines: Sequence[SessionRow]
    total: int
    """Sessions on all pages."""
    choices: Mapping[str, Sequence[str]]
    """Values that the list can be filtered by: `status`, `cause`, `harness`, `run`."""
    unsearched: int = 0
    """Calls whose messages have yet to be searched for the text of the filter."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """Data of a session's pages."""

    line: SessionRow
    trajectory: Trajectory | None = None
    """`None` = not built yet, or deleted."""
    session: CapturedSession | None = None
    """The capture; `None` = not available here."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Name -> what `DataSource.file` is asked for."""
    facts: JSON = field(default_factory=dict)
    """Further facts: exit code, evaluation, attempts."""
    fork_command: str | None = None
    """Command that forks the session, without the value of its last option `--at`; `None` = the
    command line cannot fork it."""


class DataSource(Protocol):
    """Data of the pages. Methods are called from worker threads and may raise `BridleError`."""

    @property
    def title(self) -> str:
        """Title of the pages."""

    @property
    def fork(self) -> Callable[[str, int, int], str] | None:
        """Function that submits forks of a session (its id, `at`, their number) and returns their
        task's id; `None` = the reader's token may not, or there is no server.
        """

    def overview(self) -> Overview:
        """Return the data of the overview page."""

    def sessions(self, wanted: SessionFilter, start: int, count: int) -> SessionPage:
        """Return a page of the matching sessions in the order of `wanted.sort`."""

    def groups(self, run: str, start: int, count: int) -> tuple[Sequence[SampleGroup], int]:
        """Return a page of groups, newest first, and their number; an empty `run` = all runs."""

    def session_set(self, run: str, version: int | None) -> SessionSet | None:
        """Return the sessions of a run, or those that a policy version began; `None` = no run."""

    def group(self, task_id: str, run: str) -> SampleGroup | None:
        """Return the sessions of a task; an empty `run` = of all runs. `None` = no such task."""

    def session(self, session_id: str, run: str) -> SessionView | None:
        """Return a session; an empty `run` = of whichever run has it. `None` = none has it."""

    def attempts(self, session_id: str, run: str) -> AttemptTree | None:
        """Return the tree of a session and its forks; an empty `run` = of whichever run has it.

        `None` = none has it.
        """

    def report(self, kind: RunReport[T], run: str) -> T | None:
        """Return the last report of a kind on a run; an empty `run` = on the first that has one.

        `None` = there is none that can be read.
        """

    def file(self, session_id: str, run: str, name: str) -> Path | bytes | None:
        """Return a log or kept file of a session, by a name of `SessionView.logs`; `None` = there
        is none.
        """


# ---- attempts


Place = tuple[str, str]
"""Run and session id."""


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A session of the tree, or one of its replies: the place where forks begin."""

    line: SessionRow
    depth: int
    """Forks between it and the first session."""
    at: int | None = None
    """The reply's number; `None` = the session itself."""
    forks: int = 0
    """Forks that begin there."""
    mean: float | None = None
    """Mean reward of the sessions that pass there: its own, and the forks from there on."""
    rewarded: int = 0
    """Sessions that this is the mean of."""


@dataclass(frozen=True, slots=True)
class AttemptTree:
    """All attempts that began with one session."""

    rows: Sequence[AttemptRow]
    sessions: int
    mean: float | None
    """Mean reward of those that have one."""


def place_of(line: SessionRow) -> Place:
    """Return what identifies a session on the dashboard: its run and its id."""
    return line.run, line.session_id


def attempts_of(
    wanted: Place,
    lines: Sequence[SessionRow],
    origins: Mapping[Place, tuple[Place, int]],
    replies: Collection[int] = (),
) -> AttemptTree:
    """Return the tree of the session `wanted` and the sessions that are forks of each other with
    it.

    `origins` has, for each fork, the session that it was made of and the number of its replies;
    `replies` are those of `wanted` that get a row though nothing forks there.
    """
    known = {place_of(line): line for line in lines}
    points: defaultdict[Place, dict[int, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for fork, (above, reply) in origins.items():
        if fork in known and above in known:
            points[above][reply].append(fork)
    points[wanted] = defaultdict(list, {reply: [] for reply in replies}) | points[wanted]
    root = _root(wanted, known, origins)
    below: dict[Place, tuple[float, int]] = {}
    rows: list[AttemptRow] = []
    # Backwards: a reply comes after all that begins behind it.
    for place, depth, at in reversed(_in_order(root, points)):
        line = known[place]
        own = (0.0, 0) if line.reward is None else (line.reward, 1)
        total, count = below.setdefault(place, own)
        if at is None:
            rows.append(AttemptRow(line, depth))
            continue
        forks = points[place][at]
        for more, further in (below.get(fork, (0.0, 0)) for fork in forks):
            total, count = total + more, count + further
        below[place] = (total, count)
        mean = total / count if forks and count else None
        rows.append(AttemptRow(line, depth, at, len(forks), mean, count))
    total, count = below[root]
    return AttemptTree(rows[::-1], len(below), total / count if count else None)


def _root(
    wanted: Place, known: Mapping[Place, SessionRow], origins: Mapping[Place, tuple[Place, int]]
) -> Place:
    """Return the session that `wanted` descends from; a circle of origins ends where it began."""
    root, seen = wanted, {wanted}
    while (above := origins.get(root)) is not None and above[0] in known and above[0] not in seen:
        root = above[0]
        seen.add(root)
    return root


def _in_order(
    root: Place, points: defaultdict[Place, dict[int, list[Place]]]
) -> list[tuple[Place, int, int | None]]:
    """Return each session, followed by its replies with the forks from there: (session, depth,
    reply), depth first.
    """
    found: list[tuple[Place, int, int | None]] = []
    seen: set[Place] = set()
    waiting: list[tuple[Place, int, int | None]] = [(root, 0, None)]
    while waiting:
        place, depth, at = waiting.pop()
        if at is None:
            if place in seen:
                continue
            seen.add(place)
            waiting += [(place, depth, reply) for reply in sorted(points[place], reverse=True)]
        else:
            waiting += [(fork, depth + 1, None) for fork in reversed(points[place][at])]
        found.append((place, depth, at))
    return found
