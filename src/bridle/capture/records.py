"""Records of the capture: append-only facts, each written once and never changed.

An exchange holds only what is new against its parent: the suffix of the prompt, the sampled ids,
their logprobs, the messages that were not stored before. Everything else is reached over
`parent_id` (tokens) and `continues` (messages). A trajectory is a pure function of these records.

`Store` is the contract of writing and reading them. `commit` returns when `kill -9` of this process
cannot lose the exchange; only then does the gateway send the last event of a reply (law 4).
`bridle.capture.sqlite.SqliteStore` implements it and passes `tests/conformance/stores.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from bridle.errors import StoreError
from bridle.types import (
    JSON,
    Cause,
    DeliveryState,
    Dialect,
    FinishReason,
    Kind,
    LogprobMode,
    Sampling,
    SessionStatus,
    VersionSpan,
    record,
)

if TYPE_CHECKING:
    import asyncio

    from bridle.types import Ids, Logprobs


_NONE = LogprobMode.NONE


def no_ids() -> Ids:
    return np.empty(0, dtype=np.int32)


def no_logprobs() -> Logprobs:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Session as it was opened."""

    session_id: str
    opened_at: float
    """Unix time, seconds."""
    task_id: str | None = None
    metadata: JSON = field(default_factory=dict)
    """Fields for rebuilding and any of the caller's. `trajectory.rebuild` reads `builder`
    (`{"strategy", "config"}`) and `train` (list of kinds); others: harness and its version, sample
    index."""

    @property
    def is_aside(self) -> bool:
        """Return whether this is an evaluator's own session, which counts in no result."""
        return "judge_of" in self.metadata


@record()
class RequestRecord:
    """Request as it came, without the parts that are already stored.

    Its messages are the first `kept_spans` spans of exchange `base`'s request, then `spans`.
    """

    head: bytes
    """The request's JSON without messages and tools."""
    base: str | None
    """Exchange whose request begins the same; `None` = none."""
    kept_spans: int
    spans: tuple[bytes, ...]
    """16-byte content digests of the new spans, in order; the bodies are in the store."""
    tools: bytes | None
    """Content digest of the raw tool list; `None` = none sent."""


@record(eq=False)
class Exchange:
    """One model call as captured.

    Its prompt is the first `kept` ids of (parent's prompt + parent's output), then `suffix_ids`.
    `len(output_ids) == len(logprobs)`, checked here, unless the mode is `LogprobMode.NONE`.
    """

    exchange_id: str
    session_id: str
    index: int
    """Order of commit in the session, from 0."""
    dialect: Dialect
    kind: Kind
    parent_id: str | None
    """Exchange whose exact ids the prompt extends; `None` at a root."""
    continues: str | None
    """Exchange whose messages it continues, even if its ids could not; `None` if none."""
    root_reason: str | None
    """Reason of a root (`first`, `tools_changed`, `history_changed`...); `None` if extended."""
    kept: int
    suffix_ids: Ids
    output_ids: Ids
    logprobs: Logprobs
    logprob_mode: LogprobMode
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampling: Sampling
    """Effective sampling parameters."""
    constrained: bool
    """True if a grammar shaped the samples."""
    prompt_length: int
    prompt_digest: bytes
    """sha256 of the whole prompt's ids as little-endian int32."""
    request: RequestRecord
    reply: bytes
    """The reply's JSON in the dialect's own (non-streamed) shape."""
    started_at: float
    """Unix time, seconds, when the request was complete."""
    first_token_s: float | None
    """Seconds from `started_at` to the first sampled token; `None` if not reported."""
    duration_s: float
    """Seconds from `started_at` to commit."""
    extra: JSON = field(default_factory=dict)
    """Applied rules, `reasoning_restored`, retries, engine id... Trajectories read `drift` (class
    of the difference between the sampled turn and the harness's copy of it; missing = exact) and
    `break` (`{"position", "reason"}` if the engine used a different prompt)."""
    experts: bytes | None = None
    """`bridle.experts.pack` of the rows that are new with it: from the last id that its parent has,
    or the first at a root; `None` = the engine reported none."""

    def __post_init__(self) -> None:
        """Check the alignment that everything later relies on."""
        wanted = 0 if self.logprob_mode is _NONE else self.output_ids.size
        if self.logprobs.size != wanted:
            message = (
                f"exchange {self.exchange_id}: {len(self.output_ids)} sampled ids "
                f"but {len(self.logprobs)} logprobs"
            )
            raise ValueError(message)
        if self.kept + self.suffix_ids.size != self.prompt_length:
            message = (
                f"exchange {self.exchange_id}: kept {self.kept} + new {len(self.suffix_ids)} ids "
                f"is not the prompt's length {self.prompt_length}"
            )
            raise ValueError(message)


@record()
class Delivery:
    """Delivery state of an exchange's reply; the last record of an exchange counts."""

    exchange_id: str
    session_id: str
    state: DeliveryState
    at: float
    """Unix time, seconds."""
    detail: str = ""
    joined_by: Sequence[JSON] = ()
    """The requests that joined the call until then instead of being sampled: `at` (Unix time),
    `retry_count`, and `why`: `idempotency_key`, `retry_count` or `client_gone`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a session; at most one per session."""

    session_id: str
    status: str
    """A final `bridle.types.SessionStatus`."""
    ended_at: float
    reward: float | None
    """`None` = not known (no evaluator, or it failed)."""
    trace_rewards: tuple[float, ...] | None = None
    cause: str | None = None
    """A `bridle.types.Cause`; `None` when COMPLETED."""
    error: str | None = None
    metadata: JSON = field(default_factory=dict)
    """Evaluator's own metadata, exit code, timings, log paths."""


@dataclass(frozen=True, slots=True)
class Score:
    """Reward given to a session later; the last one counts."""

    session_id: str
    at: float
    """Unix time, seconds."""
    reward: float | None
    """`None` = not known: takes an earlier reward back."""
    trace_rewards: tuple[float, ...] | None = None
    by: str = ""
    """Person or program that gave it."""
    why: str = ""
    metadata: JSON = field(default_factory=dict)
    """Result of the scorer beside the reward."""
    turn_rewards: Mapping[str, float] | None = None
    """Rewards of turns, by the id of their exchange."""


def with_scores(outcome: Outcome, scores: Sequence[Score]) -> Outcome:
    """Return the outcome with the last score's reward and with all scores in its metadata.

    A session whose evaluator had failed is COMPLETED by a score.
    """
    if not scores:
        return outcome
    last = scores[-1]
    replaced = ("token_rewards", "turn_rewards")
    metadata = {name: kept for name, kept in outcome.metadata.items() if name not in replaced}
    metadata["scores"] = [
        {"at": s.at, "reward": s.reward, "trace_rewards": s.trace_rewards, "by": s.by, "why": s.why}
        for s in scores
    ]
    if last.metadata:
        metadata["evaluation"] = last.metadata
    if last.turn_rewards:
        metadata["turn_rewards"] = last.turn_rewards
    now = replace(outcome, reward=last.reward, trace_rewards=last.trace_rewards, metadata=metadata)
    if outcome.cause != Cause.EVALUATOR or last.reward is None:
        return now
    return replace(now, status=SessionStatus.COMPLETED.value, cause=None, error=None)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some exchanges of a session."""

    exchanges: int
    sampled: int
    """Tokens."""
    last_at: float
    """Unix time, seconds, when the last of them was committed."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """Row of a capture file that cannot be decoded."""

    exchange_id: str
    sampled: int
    """Tokens that it seems to hold; 0 if unknown."""
    why: str


@dataclass(frozen=True, slots=True)
class SessionCapture:
    """All records of one session: the input of its trajectory."""

    session: SessionRecord
    exchanges: Sequence[Exchange]
    """In commit order."""
    deliveries: Mapping[str, Delivery]
    """The last delivery record per exchange id."""
    bodies: Mapping[bytes, bytes]
    """Content digest -> raw JSON of a message, item, tool list or media body."""
    outcome: Outcome | None
    """`None` = the session has not ended, or was killed."""
    damaged: Sequence[Damaged] = ()
    """Rows that were committed and cannot be read; trajectories count them as excluded."""


Commit: TypeAlias = tuple[Exchange, Mapping[bytes, bytes]]
"""An exchange, and the bodies that are new to its session."""


class Store(Protocol):
    """Append-only records of many sessions. All failures are `StoreError`."""

    async def open_session(self, session: SessionRecord) -> None:
        """Record a session; a second one of the same id is an error."""

    async def commit(self, exchange: Exchange, bodies: Mapping[bytes, bytes]) -> None:
        """Record an exchange and the message, tool and media `bodies` that are new to its session.

        `bodies` maps 16-byte content digests to raw bytes; known ones are ignored.
        """

    def commit_now(self, commits: Sequence[Commit]) -> Sequence[asyncio.Future[None]] | None:
        """Record several exchanges as `commit` does, in one transaction where possible.

        `None` = all are durable; else each is when its future is done. After a `StoreError` none is
        recorded.
        """

    async def deliver(self, delivery: Delivery) -> None:
        """Record whether a reply was delivered; readers in this process see it at once."""

    def deliver_soon(self, delivery: Delivery, failed: Callable[[StoreError], object]) -> None:
        """Record whether a reply was delivered, without waiting until it is written.

        `failed` gets the error of a failure.
        """

    async def close_session(self, outcome: Outcome) -> None:
        """Record the end of a session; a second outcome of the same session is an error."""

    async def score(self, score: Score) -> None:
        """Record a reward that is given after the session's end; later readers of its outcome get
        it.
        """

    async def forget(self, session_id: str) -> None:
        """Remove all records of a session; an unknown one is ignored."""

    async def written(self) -> None:
        """Return when all earlier records were written, or failed; never raises."""

    async def flush(self) -> None:
        """Return when all earlier records are durable."""

    async def check(self) -> None:
        """Raise the `StoreError` that writing a small record would raise now."""

    async def aclose(self) -> None:
        """Write all records and close the store; idempotent."""

    # Reading: synchronous, from any thread, sees all that was given before in this process.

    def sessions(self) -> Sequence[SessionRecord]:
        """Return all sessions in the order they were opened."""

    def exchanges(self, session_id: str) -> Sequence[Exchange]:
        """Return a session's exchanges in commit order; empty if it is unknown."""

    def deliveries(self, session_id: str) -> Mapping[str, Delivery]:
        """Return the last delivery record per exchange id."""

    def bodies(self, session_id: str) -> Mapping[bytes, bytes]:
        """Return all content-addressed bodies of a session."""

    def outcome(self, session_id: str) -> Outcome | None:
        """Return the session's outcome; `None` = it still runs, or was killed."""

    def read(self, session_id: str) -> SessionCapture:
        """Return all records of one session. Raises `StoreError` if it was never opened."""

    def size(self) -> int:
        """Return the bytes that the records take, without freed space."""
