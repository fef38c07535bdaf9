"""Files that `bridle certify` and `bridle score` left in a run folder, checked for pages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from bridle.trajectory.causes import Suspect
from bridle.trajectory.disagreement import Disagreement
from bridle.trajectory.fidelity import TurnAgreement
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
