"""Schemas of the server: its tables, and the bodies and query parameters of its HTTP API.

The tables are the same on SQLite and PostgreSQL; `migrations` makes them, and a test compares the
two. What a query selects by is a column; tasks and results are JSON text. Times are Unix seconds.
The states of rows, and small values read from them, stand with the tables.

The stages of a RUNNING session (`bridle.node.session`) are published as events and not stored.

Of the bodies, Polar's fields keep their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.json_schema import SkipJsonSchema
from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from bridle.config import Settings, Task
from bridle.types import JSON, Cause

State = TypeVar("State", bound=StrEnum)

Row = Mapping[Any, Any]
"""A row by its columns' names."""

Key = BigInteger().with_variant(Integer, "sqlite")
"""A number that the database counts up; SQLite only counts INTEGER."""

metadata = MetaData()

tasks = Table(
    "tasks",
    metadata,
    Column("seq", Key, primary_key=True, autoincrement=True),  # order of acceptance
    Column("task_id", String(200), nullable=False, unique=True),  # `task_key`
    Column("digest", String(64), nullable=False),  # of the body, for a second submit
    Column("spec", Text, nullable=False),  # `bridle.config.Task`
    Column("terms", Text, nullable=False),  # `GroupOptions`
    Column("owner", String(200), nullable=False),  # its token's name; empty = from before tokens
    Column("priority", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("open", Integer, nullable=False),  # 1 = sessions are still to be started
    Column("samples", Integer, nullable=False),  # as asked for
    Column("target", Integer, nullable=False),  # with refills
    Column("expanded", Integer, nullable=False),  # rows in `sessions`
    Column("ended", Integer, nullable=False),
    Column("usable", Integer, nullable=False),
    Column("version", Integer, nullable=False),  # policy version at submit
    Column("submitted_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("stopped", String(64)),  # why no further session starts
    Column("done_seq", BigInteger, unique=True),  # order in which groups became final
    Column("acked_at", Float),
    Column("kept", Integer, nullable=False, server_default="2"),  # `RetentionLevel`
    Column("name", String(200), nullable=False, server_default=""),  # its id as its owner knows it
    Index("ix_tasks_name", "owner", "name", unique=True),
    # With what is counted, so that counting does not read the tasks themselves.
    Index("ix_tasks_open", "open", "owner", "priority", "seq", "target", "expanded"),
    Index("ix_tasks_state", "state", "seq", "open", "target", "expanded", "done_seq", "acked_at"),
    Index(
        "ix_tasks_owner",
        *("owner", "seq", "state", "open", "target", "expanded", "done_seq", "acked_at"),
    ),
    Index("ix_tasks_acked", "acked_at", "done_seq"),
    Index("ix_tasks_groups", "owner", "acked_at", "done_seq"),
    Index("ix_tasks_kept", "kept", "acked_at", "ended_at"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(220), primary_key=True),
    Column("task_seq", Key, ForeignKey("tasks.seq"), nullable=False),
    Column("sample_index", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),  # of the run that counts, from 1
    Column("state", String(16), nullable=False),
    Column("not_before", Float, nullable=False),
    Column("leased_by", String(64)),
    Column("leased_until", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("version_started", Integer),  # policy version when its run began
    Column("version_min", Integer),  # over its sampled tokens
    Column("version_max", Integer),
    Column("usable", Integer, nullable=False),
    Column("result", Text),  # the session's result without its trajectory
    Column("file", String(300)),  # of its trajectory
    Column("file_bytes", BigInteger),
    Column("stopped", String(64)),  # why its run ends and no other starts
    Column("earlier", Text),  # JSON list: runs that do not count, and why
    Column("owner", String(200), nullable=False, server_default=""),  # the task's
    UniqueConstraint("task_seq", "sample_index"),
    Index("ix_sessions_state", "state", "owner", "priority", "task_seq"),
    Index("ix_sessions_owner", "owner", "task_seq", "sample_index", "state"),
)

callbacks = Table(
    "callbacks",
    metadata,
    Column("seq", Key, primary_key=True, autoincrement=True),
    Column("delivery_id", String(64), nullable=False, unique=True),
    Column("task_seq", Key, ForeignKey("tasks.seq"), nullable=False),
    Column("session_id", String(220)),  # null = the task's own result
    Column("url", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_at", Float, nullable=False),
    Column("made_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("error", Text),  # of the last attempt
    Column("receiver", String(300), nullable=False, server_default=""),  # `receiver_of`
    Column("sent_by", String(64)),  # the server that sends it now
    Column("owner", String(200), nullable=False, server_default=""),  # the task's
    Index("ix_callbacks_due", "state", "next_at"),
    Index("ix_callbacks_task", "task_seq"),
    Index("ix_callbacks_owner", "owner", "seq", "state"),
)

numbers = Table(
    "numbers",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`done_seq` (groups that became final), `policy_version`, `paused` (1 = no session starts)."""


class TaskState(StrEnum):
    """State of a task."""

    QUEUED = "queued"
    """Accepted; no session has started."""
    RUNNING = "running"
    """A session has started."""
    ENDING = "ending"
    """No further session starts; running ones are being ended."""
    COMPLETED = "completed"
    """All sessions have ended, and enough of them are usable."""
    FAILED = "failed"
    """All sessions have ended, and too few of them are usable."""
    CANCELLED = "cancelled"
    """The task was cancelled, and all sessions have ended."""


class SessionState(StrEnum):
    """State of an accepted session."""

    QUEUED = "QUEUED"
    """Waits for its first run or for another one."""
    RUNNING = "RUNNING"
    """Leased to a run."""
    COMPLETED = "COMPLETED"
    TIMEOUT = "TIMEOUT"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"


class CallbackState(StrEnum):
    """State of a callback."""

    PENDING = "pending"
    """To be sent, or to be retried."""
    DELIVERED = "delivered"
    """Acknowledged with 2xx."""
    DEAD = "dead"
    """Not retried any more; can be replayed."""


class RetentionLevel(IntEnum):
    """Extent to which a group's data are kept."""

    NAME = 0
    """The task's id, its digest and its counts."""
    ROWS = 1
    """Also its sessions, without their files."""
    ALL = 2


_T, _S, _C = TaskState, SessionState, CallbackState

FINAL_TASKS: Final = frozenset({_T.COMPLETED, _T.FAILED, _T.CANCELLED})
FINAL_SESSIONS: Final = frozenset({_S.COMPLETED, _S.TIMEOUT, _S.ERROR, _S.CANCELLED})

TASK_TRANSITIONS: Final[Mapping[TaskState, frozenset[TaskState]]] = {
    _T.QUEUED: frozenset({_T.RUNNING, _T.CANCELLED, _T.FAILED}),
    _T.RUNNING: frozenset({_T.ENDING}) | FINAL_TASKS,
    _T.ENDING: FINAL_TASKS,
    **{state: frozenset() for state in FINAL_TASKS},
    _T.FAILED: frozenset({_T.COMPLETED}),
}
"""The states that may follow each state; a later reward can complete a FAILED task."""

SESSION_TRANSITIONS: Final[Mapping[SessionState, frozenset[SessionState]]] = {
    _S.QUEUED: frozenset({_S.RUNNING, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.QUEUED}) | FINAL_SESSIONS,
    **{state: frozenset() for state in FINAL_SESSIONS},
    _S.ERROR: frozenset({_S.COMPLETED}),
}
"""The states that may follow each state: RUNNING returns to QUEUED for another run, and a later
reward completes a session whose evaluator failed."""

CALLBACK_TRANSITIONS: Final[Mapping[CallbackState, frozenset[CallbackState]]] = {
    _C.PENDING: frozenset({_C.DELIVERED, _C.DEAD}),
    _C.DELIVERED: frozenset(),
    _C.DEAD: frozenset({_C.PENDING}),
}
"""The states that may follow each state; a replay returns DEAD to PENDING."""


def step(table: Mapping[State, frozenset[State]], before: str, after: State) -> State:
    """Return the state `after`, and assert that `table` allows it after `before`.

    The same state again is allowed.
    """
    allowed = table[type(after)(before)]
    assert after == before or after in allowed, f"{before} does not lead to {after}"
    return after


@dataclass(frozen=True, slots=True)
class Claim:
    """A session that was leased to a run."""

    session_id: str
    task_id: str
    sample_index: int
    attempt: int
    """From 1."""
    spec: str
    """The task's JSON."""
    avoid: frozenset[str] = frozenset()
    """Nodes on which earlier runs of it failed."""
    owner: str = ""

    @property
    def run_id(self) -> str:
        """Id of this run at its node; each attempt of a session has its own."""
        return run_id(self.session_id, self.attempt)


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended, as it is stored."""

    session_id: str
    attempt: int
    status: str
    """`COMPLETED`, `TIMEOUT`, `ERROR` or `CANCELLED`."""
    cause: Cause | None
    usable: bool
    result: JSON
    """The session's result without its trajectory."""
    file: str | None = None
    """Name of the trajectory's file, which is written already."""
    file_bytes: int | None = None
    version_min: int | None = None
    version_max: int | None = None

    @property
    def error(self) -> str | None:
        """Error text of the run's result; `None` = it has none."""
        error: str | None = self.result.get("error")
        return error


@dataclass(frozen=True, slots=True)
class FinalizeResult:
    """Consequences of the end of a run or of a task."""

    what: Literal["final", "again", "lost"]
    """The session is final; it is queued for another run; or neither, such as where another server
    holds its lease."""
    run_ids: tuple[str, ...] = ()
    """Runs to cancel, because their task ends early."""
    task_id: str | None = None
    """Key of the task, if this was its last session."""
    name: str = ""
    """The task's id as its owner knows it."""
    owner: str = ""


def task_key(name: str, owner: str | None) -> str:
    """Return a task's id among all owners' tasks; the ids of its sessions begin with it.

    The key of an operator's task (`owner` is `None`) is its name. A tenant's key always has a
    digest after the name, so that no tenant learns which ids others use.
    """
    if owner is None:
        return name
    digest = hashlib.sha256(f"{owner}\n{name}".encode()).hexdigest()[:12]
    return f"{name[:150]}-{digest}"


def session_id(task_id: str, sample_index: int) -> str:
    """Return the id of the session that runs one sample of a task, at most 190 characters."""
    if len(task_id) > 170:
        digest = hashlib.sha256(task_id.encode()).hexdigest()[:8]
        task_id = f"{task_id[:160]}-{digest}"
    return f"{task_id}.{sample_index}"


def run_id(session: str, attempt: int) -> str:
    """Return the id of one run of a session; the first run has the session's id."""
    return session if attempt == 1 else f"{session}.r{attempt}"


def receiver_of(url: str) -> str:
    """Return the part of a callback's URL that names its receiver: scheme, host and port, at most
    300 characters.
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()[:300]


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
        """Return the task and the options of its group."""
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
    """Acknowledges all groups that ended up to this one: the `cursor` of a group, or of a page in
    the order `done`. Who reads in another order acknowledges by `task_ids`."""
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
