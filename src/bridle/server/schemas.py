"""Bodies and query parameters of the HTTP API. Polar's fields keep their names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.json_schema import SkipJsonSchema

from bridle.config import Settings, Task
from bridle.server.tables import CallbackState, SessionState, TaskState

BATCH = 1000
"""The most tasks of one submission, and rows of one page."""


MOST_CURSOR = 2**62
"""The largest cursor that is accepted; the database's integers have 64 bits."""

GroupOrder = Literal["done", "submitted", "priority"]
"""Order of groups: as they ended; as they were submitted, each after all before it; those of the
highest priority first."""

Name = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=300)]
"""A task's id in a body; PostgreSQL accepts no NUL."""


class GroupOptions(Settings):
    """The server's options for a task's group; the work itself is `bridle.config.Task`."""

    dispatch_priority: int = Field(default=0, ge=0, le=100)
    """Tasks of a higher priority start first."""
    callback_url: str | None = Field(default=None, max_length=2000)
    """Gets each `SessionResult` when its session ends, and the `TaskResult` at the end."""
    early_stop_min_usable_sessions: int | None = Field(default=None, ge=1)
    """After this many usable sessions the others are cancelled; `None` = all run."""
    min_completed_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of `num_samples`, but at least one session, that must be usable for the task to be
    completed. `early_stop_min_usable_sessions` satisfies it early."""
    max_refills: int = Field(default=0, ge=0, le=10_000)
    """Sessions that may replace ones that ended unusable."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Runs of one session while infrastructure failures end them."""
    retry_backoff_s: float = Field(default=1.0, ge=0, le=3600)
    """Backoff before the second run; doubles before each later one."""
    hand_out: bool = True
    """`GET /v1/groups` hands the group out until it is acknowledged. False = it is fetched by its
    id alone, and counts as acknowledged when it ends."""

    @field_validator("callback_url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and ("\x00" in url or not url.startswith(("http://", "https://"))):
            raise ValueError("callback_url must be an http:// or https:// URL")
        return url


class Submission(Task, GroupOptions):
    """A task with the options of its group: an entry of `POST /v1/tasks`."""

    num_samples: int = Field(default=1, ge=1, le=10_000)

    def split(self) -> tuple[Task, GroupOptions]:
        """Split it into the task and the options of its group."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        task = {name: values[name] for name in Task.model_fields}
        terms = {name: values[name] for name in GroupOptions.model_fields}
        return Task.model_construct(**task), GroupOptions.model_construct(**terms)


class Fork(GroupOptions):
    """Body of `POST /v1/sessions/{session_id}/fork`."""

    at: int = Field(ge=1)
    """Number of the session's replies that the new sessions begin with."""
    num_samples: int = Field(default=1, ge=1, le=10_000)
    task_id: Name | None = None
    """Id of the new task; `None` = the session's id with `.at` and the number."""


class TaskBatch(Settings):
    """Body of `POST /v1/tasks`; all tasks are accepted, or none."""

    tasks: tuple[Submission, ...] = Field(min_length=1, max_length=BATCH)


class Ack(Settings):
    """Body of `POST /v1/groups/ack`."""

    cursor: int | None = Field(default=None, ge=0)
    """Acknowledges all groups up to this cursor."""
    task_ids: tuple[Name, ...] = Field(default=(), max_length=BATCH)
    """Acknowledges these groups."""


class CancelBody(Settings):
    """Body of `POST /v1/tasks/cancel`."""

    task_ids: tuple[Name, ...] = Field(min_length=1, max_length=BATCH)


Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Reward(Settings):
    """Body of `POST /v1/sessions/{session_id}/reward`."""

    reward: Finite
    trace_rewards: tuple[Finite, ...] | None = Field(default=None, max_length=10_000)
    """One for each trace; `None` = each trace has the session's reward."""
    by: str = Field(default="", max_length=200)
    """Person or program that gives it; empty = the token's owner."""
    why: str = Field(default="", max_length=10_000)


class QueryParameters(BaseModel):
    """Base of query parameters; unknown parameters are ignored."""

    model_config = ConfigDict(frozen=True)


class PageQuery(QueryParameters):
    """Page of a list."""

    cursor: int = Field(default=0, ge=0, le=MOST_CURSOR)
    limit: int = Field(default=100, ge=1, le=BATCH)


class TasksQuery(PageQuery):
    """Query of `GET /v1/tasks`."""

    state: TaskState | SkipJsonSchema[None] = None


class CallbacksQuery(PageQuery):
    """Query of `GET /v1/callbacks`."""

    state: CallbackState | SkipJsonSchema[None] = None


class SamplesQuery(PageQuery):
    """Page of a task's sessions; the cursor is a sample's index."""

    cursor: int = Field(default=-1, ge=-1, le=MOST_CURSOR)


class SessionsQuery(QueryParameters):
    """Query of `GET /v1/sessions`."""

    limit: int = Field(default=100, ge=1, le=BATCH)
    offset: int = Field(default=0, ge=0, le=2**31 - 1)
    state: SessionState | SkipJsonSchema[None] = None


class WaitQuery(QueryParameters):
    """Query of a long poll."""

    wait_s: int = Field(default=0, ge=0, le=60)


class GroupsQuery(WaitQuery):
    """Query of `GET /v1/groups`."""

    cursor: int = Field(default=0, ge=0, le=MOST_CURSOR)
    limit: int = Field(default=10, ge=1, le=100)
    order: GroupOrder = "done"
    include: Literal["trajectories"] | SkipJsonSchema[None] = None


class DrainQuery(QueryParameters):
    """Query of `POST /v1/drain`."""

    timeout_s: int = Field(default=60, ge=0, le=3600)


class ReplicaQuery(QueryParameters):
    """Query of `DELETE /v1/replicas`."""

    name: str = Field(min_length=1)
    drain_s: int = Field(default=0, ge=0, le=3600)


class PolarTaskQuery(QueryParameters):
    """Query of `GET /rollout/task/{task_id}`."""

    include: Literal["results"] | SkipJsonSchema[None] = None


class PolarCancelQuery(QueryParameters):
    """Query of `DELETE /rollout/task/{task_id}`."""

    register_if_missing: Literal["true", "false", "1", "0"] = "false"
