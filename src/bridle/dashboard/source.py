"""Interface to the data of the pages: a run folder or a rollout server.

Files that `bridle certify` and `bridle score` left in a run folder are checked here for the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from bridle.dashboard.attempts import AttemptTree
from bridle.dashboard.session import CapturedSession
from bridle.dashboard.summaries import Overview, SampleGroup, SessionFilter, SessionRow, SessionSet
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


_CERTIFICATE: Final = TypeAdapter(RunCertificate)
_SCORERS: Final = TypeAdapter(Disagreement)
T = TypeVar("T")


def certificate_of(content: JSON) -> RunCertificate | None:
    """Convert the content of a certificate; `None` = it is malformed."""
    return _checked(_CERTIFICATE, content)


def scorers_of(content: JSON) -> Disagreement | None:
    """Convert the content of a comparison of scorers; `None` = it is malformed."""
    return _checked(_SCORERS, content)


def _checked(form: TypeAdapter[T], content: JSON) -> T | None:
    try:
        return form.validate_python(content)
    except ValidationError:
        return None


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
    def title(self) -> str: ...

    @property
    def fork(self) -> Callable[[str, int, int], str] | None:
        """Function that submits forks of a session (its id, `at`, their number) and returns their
        task's id; `None` = the reader may not, or there is no server.
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
        """Return the sessions of a task; an empty `run` = of all runs."""

    def session(self, session_id: str, run: str) -> SessionView | None:
        """Return a session; an empty `run` = of whichever run has it."""

    def attempts(self, session_id: str, run: str) -> AttemptTree | None:
        """Return the tree of a session and its forks; an empty `run` = whichever run has it."""

    def certificate(self, run: str) -> RunCertificate | None:
        """Return the certificate of a run; an empty `run` = of the first that has one."""

    def scorers(self, run: str) -> Disagreement | None:
        """Return the last comparison of scorers on a run; an empty `run` = of the first that has
        one.
        """

    def file(self, session_id: str, run: str, name: str) -> Path | bytes | None:
        """Return a log or kept file of a session, by a name of `SessionView.logs`."""
