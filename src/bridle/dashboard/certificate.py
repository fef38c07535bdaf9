"""The certificate that `bridle certify` left in a run folder, checked for its page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from bridle.types import JSON

Number = float | None
"""`None` = not finite, so JSON cannot hold it."""


@dataclass(frozen=True, slots=True)
class FactRow:
    """A fact that one side or both declare."""

    name: str
    rollout: Any
    trainer: Any
    same: bool | None
    """`None` = one side is silent."""


@dataclass(frozen=True, slots=True)
class CauseRow:
    """A cause that fits a mismatch."""

    cause: str
    score: float
    evidence: str


@dataclass(frozen=True, slots=True)
class MismatchRow:
    """Tokens on which both sides disagree for one reason."""

    causes: Sequence[CauseRow]
    """Best first."""
    token_share: Number
    kl_share: Number


@dataclass(frozen=True, slots=True)
class TurnRow:
    """Agreement on one turn."""

    trace_id: str
    exchange_id: str
    tokens: int
    token_share: Number
    kl: Number
    kl_share: Number
    largest: Number
    causes: Sequence[str]

    @property
    def session_id(self) -> str:
        """Return the session of the trace, whose id is `SESSION/BUILDER/NUMBER`."""
        return self.trace_id.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True)
class RunCertificate:
    """The content of the file."""

    made_at: float
    """Unix time, seconds."""
    trainer: str
    """The model folder or the file of logprobs."""
    faithful: bool
    tokens: int
    missing: int
    kl: Number
    rms: Number
    tolerance: float
    facts: Sequence[FactRow]
    mismatches: Sequence[MismatchRow]
    turns: Sequence[TurnRow]

    @property
    def worst(self) -> list[TurnRow]:
        """Return the turns, those with the largest shares of the divergence first."""
        return sorted(self.turns, key=lambda turn: -(turn.kl_share or 0.0))


_FILE: Final = TypeAdapter(RunCertificate)


def certificate_of(content: JSON) -> RunCertificate | None:
    """Convert the content of a certificate; `None` = it is malformed."""
    try:
        return _FILE.validate_python(content)
    except ValidationError:
        return None
