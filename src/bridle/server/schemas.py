"""Request bodies of the HTTP routes, and the values that the state's rows are read as.

Fields that Polar's clients know keep their names; what is ours stands beside them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from bridle.config import Settings, Task
from bridle.types import JSON

BATCH = 1000
"""Most tasks of one submit, and most rows of one page."""


Name = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=300)]
"""What may be the name of a task; PostgreSQL takes no NUL."""


class Terms(Settings):
    """The server's options for a task's group; the work itself is `bridle.config.Task`."""

    dispatch_priority: int = Field(default=0, ge=0, le=100)
    """Higher ones are started first."""
    callback_url: str | None = Field(default=None, max_length=2000)
    """Where every `SessionResult` is sent when its session ends, and the `TaskResult` at last."""
    early_stop_min_usable_sessions: int | None = Field(default=None, ge=1)
    """With this many usable sessions the others are ended; `None` = all run."""
    min_completed_fraction: float = Field(default=0.0, ge=0, le=1)
    """Part of `num_samples` that must be usable for the task to be completed; one must be, anyway.
    Met early by `early_stop_min_usable_sessions`."""
    max_refills: int = Field(default=0, ge=0, le=10_000)
    """Sessions that may be added in the place of ones that ended unusable."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Runs of one session, while they fail by infrastructure."""
    retry_backoff_s: float = Field(default=1.0, ge=0, le=3600)
    """Wait before the second run; twice as long before each one after."""

    @field_validator("callback_url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and ("\x00" in url or not url.startswith(("http://", "https://"))):
            message = "a callback goes to an http:// or https:// URL"
            raise ValueError(message)
        return url


class Submission(Task, Terms):
    """A task with its terms, as `POST /v1/tasks` takes it."""

    num_samples: int = Field(default=1, ge=1, le=10_000)

    def split(self) -> tuple[Task, Terms]:
        """Split it into the work and the options of its group."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        task = {name: values[name] for name in Task.model_fields}
        terms = {name: values[name] for name in Terms.model_fields}
        return Task.model_construct(**task), Terms.model_construct(**terms)


class Fork(Terms):
    """Body of `POST /v1/sessions/{session_id}/fork`: a new task of sessions that begin like it."""

    at: int = Field(ge=1)
    """How many of its replies are given again."""
    num_samples: int = Field(default=1, ge=1, le=10_000)
    task_id: Name | None = None
    """Id of the new task; `None` = the session's id with `.at` and the number."""


class Batch(Settings):
    """Body of `POST /v1/tasks`; all of it is accepted, or nothing."""

    tasks: tuple[Submission, ...] = Field(min_length=1, max_length=BATCH)


class Ack(Settings):
    """Body of `POST /v1/groups/ack`."""

    cursor: int | None = Field(default=None, ge=0)
    """All groups up to here have been dealt with."""
    task_ids: tuple[Name, ...] = Field(default=(), max_length=BATCH)
    """These groups have been dealt with."""


class CancelBody(Settings):
    """Body of `POST /v1/tasks/cancel`."""

    task_ids: tuple[Name, ...] = Field(min_length=1, max_length=BATCH)


Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Reward(Settings):
    """Body of `POST /v1/sessions/{session_id}/reward`."""

    reward: Finite
    trace_rewards: tuple[Finite, ...] | None = Field(default=None, max_length=10_000)
    """One for each trace; `None` = each has the session's."""
    by: str = Field(default="", max_length=200)
    """Person or program that gives it; empty = the token's owner."""
    why: str = Field(default="", max_length=10_000)


class OwnerSettings(Settings):
    """One owner's part of the server."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """Its share of the run slots is its weight over that of all owners with waiting sessions."""
    max_queued_samples: int | None = Field(default=None, ge=1)
    """Instead of the server's."""


class ServiceSettings(Settings):
    """Rates and timeouts of the service."""

    max_inflight_groups: int | None = Field(default=None, ge=1)
    """Groups of one owner that are started and have not ended; `None` = as many as there are
    slots."""
    max_unacked_groups: int | None = Field(default=None, ge=1)
    """No further group of an owner starts while this many ended ones wait for their ack; `None` =
    any number. For a trainer that acks."""
    groups_per_version: int | None = Field(default=None, ge=1)
    """Groups that the trainer uses up per policy version; needed by `max_version_lag`."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """How many versions behind a group's first token may be when the group is used. Groups are
    held back so that none has to be thrown away: at version v, at most
    `groups_per_version * (v + 1 + max_version_lag)` have been started since version 0."""
    on_stale: Literal["keep", "cancel"] = "keep"
    """What becomes of a running session that is more than `max_version_lag` versions behind:
    it ends as it does, or it is cancelled."""
    max_queued_samples: int | None = Field(default=None, ge=1)
    """Samples that are accepted and not started yet, of one owner; `None` = any number."""
    owners: dict[str, OwnerSettings] = Field(default_factory=dict)
    """What differs for an owner, by the name of its tokens."""
    lease_s: float = Field(default=60, gt=0)
    """How long a run counts as living after its server was last heard of."""
    drain_s: float = Field(default=30, ge=0)
    """After SIGTERM, how long running sessions may go on; then they are put back."""
    store_patience_s: float = Field(default=600, ge=0)
    """How long an ended session waits while its trajectory cannot be written (a full disk, an
    object store that is away); then it ends with `store_error` and may be run again."""
    callback_give_up_s: float = Field(default=86_400, gt=0)
    """How long a callback is tried before it is dead."""
    keep_days: float | None = Field(default=None, gt=0)
    """Files of acknowledged groups (trajectories, capture, logs, artifacts) are removed after this;
    `None` = kept."""
    keep_gb: float | None = Field(default=None, gt=0)
    """Files of acknowledged groups are removed, oldest first, beyond this; `None` = kept."""
    keep_rows_days: float | None = Field(default=None, gt=0)
    """All of acknowledged groups but their tasks' names and counts is removed after this; `None` =
    sessions, results and callbacks stay in the database."""
    keep_unacked_days: float | None = Field(default=None, gt=0)
    """Groups that nobody acknowledges count as acknowledged after this; `None` = never."""

    def quota_of(self, owner: str) -> int | None:
        """Samples that an owner may have queued; `None` = any number."""
        own = self.owners.get(owner, OwnerSettings()).max_queued_samples
        return self.max_queued_samples if own is None else own


def error_json(code: str, message: str, *, param: str | None = None, **more: object) -> JSON:
    """The body of every refusal; `detail` is where Polar's clients look."""
    return {"error": {"code": code, "message": message, "param": param, **more}, "detail": message}
