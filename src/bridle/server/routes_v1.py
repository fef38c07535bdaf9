"""The `/v1` routes: tasks, sessions, groups, callbacks, nodes and the policy.

`check` and the other functions that `polar` shares stand at the beginning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from starlette.responses import FileResponse, Response

from bridle.capture.reader import SqliteReader
from bridle.config import ForkSpec, Task
from bridle.errors import ConfigError, StoreError
from bridle.gateway.weights import AddReplica, SetEngine, SetPolicy
from bridle.node.session import read_replay
from bridle.server import queries
from bridle.server.callbacks import ForbiddenAddressError
from bridle.server.http import (
    ARROW_TYPE,
    JSON_TYPE,
    MSGPACK_TYPE,
    ApiError,
    ApiRequest,
    Caller,
    RouteTable,
    TokenRole,
    negotiate,
    packed_reply,
    reply,
    validation_error,
)
from bridle.server.queries import is_final
from bridle.server.schemas import (
    Ack,
    CallbacksQuery,
    CancelBody,
    DrainQuery,
    Fork,
    GroupsQuery,
    PageQuery,
    ReplicaQuery,
    Reward,
    Row,
    SamplesQuery,
    SessionsQuery,
    Submission,
    TaskBatch,
    TasksQuery,
    WaitQuery,
    run_id,
)
from bridle.server.service import Service
from bridle.trajectory.result import encode, packed_json, trajectory_json
from bridle.types import JSON

T = TypeVar("T")

TASK_BYTES: Final = 4 << 20
"""Largest JSON of a task, which every run of it reads."""

METADATA_BYTES: Final = 64 << 20
"""Largest metadata of all results of a task; cancelling it writes all of them at once."""

POLL_S: Final = 2.0
"""Interval at which a long poll checks for groups that other servers ended."""

ARTIFACT_HEADERS: Final = {
    "content-disposition": "attachment",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
}
"""Headers that keep a browser from showing or running a file that an agent wrote."""

ROUTES = RouteTable()


def check(request: ApiRequest, submission: Submission) -> Submission:
    """Return the submission with the changes that the server's policy makes to it.

    Raises `ApiError` 422 if it is refused. By default only admins may use runtime `local`, which
    contains nothing.
    """
    policy = request.context.policy
    if not request.caller.may(TokenRole.ADMIN):
        policy = policy.model_copy(update={"local": False})
    task, _ = submission.split()
    _check_size(task)
    for param, message in policy.refused(task):
        raise ApiError(
            422, "not_permitted", f"{param} of the task is refused: {message}", param=param
        )
    if submission.callback_url is not None:
        try:
            request.context.addresses.check_url(submission.callback_url)
        except ForbiddenAddressError as error:
            message = f"callback_url: {error}"
            raise ApiError(422, "not_permitted", message, param="callback_url") from None
    crossed = policy.crossed(submission)
    try:
        request.service.check(crossed.split()[0])
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error), param=_param(str(error))) from None
    return crossed


def check_forks(caller: Caller, submissions: Iterable[Submission]) -> None:
    """Raise `ApiError` 422 for a task that forks a captured session of another owner.

    A tenant gets the error of a session that does not exist; an admin may fork every session.
    Sessions of `bridle run` have no owner: for them the submission policy decides. Reads captures,
    so call it in a thread.
    """
    for one in submissions:
        if one.fork is None or caller.may(TokenRole.ADMIN):
            continue
        path = Path(one.task_dir or ".", one.fork.capture)
        try:
            with SqliteReader(path) as reader:
                owner = reader.session(one.fork.session).metadata.get("owner")
                if owner not in (None, caller.name):
                    raise reader.never_opened(one.fork.session)
        except StoreError as error:
            raise ApiError(
                422, "invalid", f"fork: the captured session cannot be read: {error}", param="fork"
            ) from None


def _check_size(task: Task) -> None:
    try:
        size = len(task.model_dump_json())
    except PydanticSerializationError as error:
        raise ApiError(
            422, "invalid", f"a field of the task is nested too deeply: {error}"
        ) from None
    if size > TASK_BYTES:
        message = f"a task has at most {TASK_BYTES} bytes of JSON; this one has {size}"
        raise ApiError(422, "invalid", message)
    repeated = len(encode(task.metadata)) * task.num_samples
    if repeated > METADATA_BYTES:
        message = (
            f"metadata: each of the {task.num_samples} results has a copy; together these are "
            f"{repeated} bytes, and at most {METADATA_BYTES}"
        )
        raise ApiError(422, "invalid", message, param="metadata")


def _param(message: str) -> str | None:
    """Return the field of a task that an error is about, by its first words."""
    kinds = {
        "harness": "agent.harness",
        "runtime": "runtime.backend",
        "evaluator": "evaluator.strategy",
        "builder": "builder.strategy",
    }
    for kind, param in kinds.items():
        if message.startswith((f"unknown {kind} ", f"{kind} ")):
            return param
    field = message.partition(":")[0]
    return field if field.partition(".")[0] in {*kinds, "agent"} else None


async def submit(request: ApiRequest, submissions: Sequence[Submission]) -> list[bool]:
    """Accept checked submissions; return whether each is new. A tenant's task ids are its own."""
    caller = request.caller
    return await request.service.submit(
        submissions, owner=caller.name, tenant=caller.tenant is not None
    )


async def task_row(request: ApiRequest) -> Row:
    """Return the database row of the task in the request's path. Raises `ApiError` 404."""
    task_id = request.path("task_id")
    task = await request.queries.task(task_id)
    if task is None:
        raise ApiError(404, "not_found", f"there is no task {task_id[:200]!r}", param="task_id")
    return task


async def session_row(request: ApiRequest) -> Row:
    """Return the database row of the session in the request's path. Raises `ApiError` 404."""
    session_id = request.path("session_id")
    row = await request.queries.session(session_id)
    if row is None:
        message = f"no session {session_id[:250]!r}; a session exists once it has started"
        raise ApiError(404, "not_found", message, param="session_id")
    return row


def session_json(request: ApiRequest, row: Row) -> JSON:
    """Return a session's row as JSON, with the stage of a running one and the `task_id` if
    known.
    """
    running = row["state"] == "RUNNING"
    stage = request.service.stage(row["session_id"], row["attempt"]) if running else None
    task = {"task_id": row["task_id"]} if "task_id" in row else {}
    return queries.session_json(row, stage) | task


def page_json(
    name: str, rows: Sequence[Row], page: PageQuery, place: str, form: Callable[[Row], JSON]
) -> JSON:
    """Return one page of a list as JSON: its rows under `name`, and the `cursor` of the next page.

    `form` writes a row, `place` is the column that the cursor counts.
    """
    cursor = rows[-1][place] if rows else page.cursor
    return {name: [form(row) for row in rows], "cursor": cursor}


async def _poll(
    service: Service, wait_s: float, read: Callable[[], Awaitable[T]], ready: Callable[[T], bool]
) -> T:
    """Read again after each group's end until the result is `ready`, or `wait_s` is over."""
    deadline = time.monotonic() + wait_s
    while True:
        ticket = service.group_ended.ticket()
        found = await read()
        left_s = deadline - time.monotonic()
        if ready(found) or left_s <= 0 or service.stopping.is_set():
            return found
        await service.group_ended.wait(ticket, min(left_s, POLL_S))


# ---- tasks


@ROUTES.add("POST", "/v1/tasks", TokenRole.SUBMIT, body=TaskBatch)
async def submit_batch(request: ApiRequest) -> Response:
    """Accept all tasks of a batch, or none of them."""
    batch = await request.body(TaskBatch)
    ids = [one.task_id for one in batch.tasks]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ApiError(
            422,
            "invalid",
            f"task_id {twice!r} occurs twice; each task needs its own",
            param="tasks",
        )
    checked = []
    for index, one in enumerate(batch.tasks):
        try:
            checked.append(check(request, one))
        except ApiError as error:
            message = f"task {one.task_id!r}: {error}"
            error.body["error"] |= {"message": message, "task_id": one.task_id, "index": index}
            error.body["detail"] = message
            raise
    await asyncio.to_thread(check_forks, request.caller, batch.tasks)
    fresh = await submit(request, checked)
    accepted_tasks = [{"task_id": name, "new": new} for name, new in zip(ids, fresh, strict=True)]
    return reply({"tasks": accepted_tasks})


@ROUTES.add("GET", "/v1/tasks", TokenRole.READ, query=TasksQuery)
async def list_tasks(request: ApiRequest) -> Response:
    """List tasks in the order of their submission."""
    page = request.query(TasksQuery)
    rows = await request.queries.tasks(after=page.cursor, limit=page.limit, state=page.state)
    return reply(page_json("tasks", rows, page, "seq", queries.task_json))


@ROUTES.add("GET", "/v1/tasks/{task_id}", TokenRole.READ, query=WaitQuery)
async def show_task(request: ApiRequest) -> Response:
    """Return a task and its counts; the query `wait_s` waits until the task is final."""
    wait_s = request.query(WaitQuery).wait_s
    task = await _poll(request.service, wait_s, lambda: task_row(request), is_final)
    return reply(queries.task_json(task))


@ROUTES.add("DELETE", "/v1/tasks/{task_id}", TokenRole.SUBMIT)
async def cancel_task(request: ApiRequest) -> Response:
    """Cancel a task; an ended one does not change."""
    await request.service.cancel_task((await task_row(request))["key"])
    return reply(queries.task_json(await task_row(request)))


@ROUTES.add("POST", "/v1/tasks/cancel", TokenRole.SUBMIT, body=CancelBody)
async def cancel_batch(request: ApiRequest) -> Response:
    """Cancel tasks; returns the ids that are unknown."""
    wanted = await request.body(CancelBody)
    unknown = []
    for task_id in wanted.task_ids:
        task = await request.queries.task(task_id)
        if task is None or not await request.service.cancel_task(task["key"]):
            unknown.append(task_id)
    return reply({"unknown": unknown})


# ---- sessions


@ROUTES.add("GET", "/v1/tasks/{task_id}/sessions", TokenRole.READ, query=SamplesQuery)
async def list_sessions(request: ApiRequest) -> Response:
    """List the sessions of a task that have started or ended."""
    task = await task_row(request)
    page = request.query(SamplesQuery)
    rows = await request.queries.sessions(task["seq"], after=page.cursor, limit=page.limit)

    def form(row: Row) -> JSON:
        session = session_json(request, row)
        return session | {"status": queries.polar_state(session["status"])}

    listed = page_json("sessions", rows, page, "sample_index", form)
    return reply({"task_id": task["task_id"]} | listed)


@ROUTES.add("GET", "/v1/sessions", TokenRole.READ, query=SessionsQuery)
async def newest_sessions(request: ApiRequest) -> Response:
    """List sessions that have started or ended, those of the newest task first."""
    page = request.query(SessionsQuery)
    rows = await request.queries.newest(limit=page.limit, offset=page.offset, state=page.state)
    return reply({"sessions": [session_json(request, row) for row in rows]})


@ROUTES.add("GET", "/v1/sessions/{session_id}", TokenRole.READ)
async def show_session(request: ApiRequest) -> Response:
    """Return a session's state, or its result without its trajectory."""
    return reply(session_json(request, await session_row(request)))


@ROUTES.add("DELETE", "/v1/sessions/{session_id}", TokenRole.SUBMIT)
async def cancel_session(request: ApiRequest) -> Response:
    """Cancel a session; an ended one does not change."""
    await request.service.cancel_session((await session_row(request))["session_id"])
    return reply(session_json(request, await session_row(request)))


@ROUTES.add("POST", "/v1/sessions/{session_id}/reward", TokenRole.SUBMIT, body=Reward)
async def give_reward(request: ApiRequest) -> Response:
    """Give an ended session a reward; the last one counts, and all are in `scores`.

    A group that is not acknowledged yet is read with the new reward; `taken_at` is when the group
    was acknowledged.
    """
    session_id = (await session_row(request))["session_id"]
    given = await request.body(Reward)
    given = given.model_copy(update={"by": given.by or request.caller.name})
    await request.service.give_reward(session_id, given)
    row = await session_row(request)
    return reply(session_json(request, row) | {"taken_at": row["acked_at"]})


@ROUTES.add("POST", "/v1/sessions/{session_id}/fork", TokenRole.SUBMIT, body=Fork)
async def fork_session(request: ApiRequest) -> Response:
    """Submit a task whose sessions begin with replies of the session in the path.

    It is the session's task under another id, checked again as a submission of the caller.
    """
    row = await session_row(request)
    wanted = await request.body(Fork)
    capture = request.service.workers.capture
    if capture is None:
        message = "each node of a cluster has its own capture file: submit a task with `fork`"
        raise ApiError(409, "conflict", message)
    run = run_id(row["session_id"], max(1, row["attempt"]))
    fork = ForkSpec(capture=str(capture.absolute()), session=run, at=wanted.at)
    task = await request.queries.task(row["task_id"])
    assert task is not None
    own = {"task_id": wanted.task_id or f"{row['session_id']}.at{wanted.at}", "fork": None}
    given = orjson.loads(task["spec"]) | wanted.model_dump(exclude={"at"}) | own
    try:
        checked = check(request, Submission.model_validate(given))
        async with request.context.forking:  # each reads a whole session
            await asyncio.to_thread(read_replay, fork, capture.parent)
    except ValidationError as error:
        raise validation_error(error, "the body") from None
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error), param="at") from None
    except StoreError as error:
        raise ApiError(404, "not_found", f"the session's capture cannot be read: {error}") from None
    (new,) = await submit(request, [checked.model_copy(update={"fork": fork})])
    return reply({"task_id": checked.task_id, "new": new})


@ROUTES.add("GET", "/v1/sessions/{session_id}/trajectory", TokenRole.READ)
async def show_trajectory(request: ApiRequest) -> Response:
    """Return a trajectory as JSON, msgpack or an Arrow stream, by the header `Accept`."""
    kind = negotiate(request, (JSON_TYPE, MSGPACK_TYPE, ARROW_TYPE))
    row = await session_row(request)
    found = await queries.trajectory(request.service, row)
    if found is None:
        what = "has not ended" if row["ended_at"] is None else "has no trajectory, or not any more"
        raise ApiError(
            404,
            "not_found",
            f"there is no trajectory to show: session {row['session_id']!r} {what}",
        )
    if kind == MSGPACK_TYPE:
        return await asyncio.to_thread(lambda: packed_reply(packed_json(found)))
    if kind == ARROW_TYPE:
        stream = await asyncio.to_thread(request.service.files.codec.arrow, found)
        return Response(stream, media_type=ARROW_TYPE)
    return await asyncio.to_thread(lambda: reply(trajectory_json(found)))


@ROUTES.add("GET", "/v1/sessions/{session_id}/artifacts/{name:path}", TokenRole.READ)
async def artifact(request: ApiRequest) -> Response:
    """Return a log or an artifact of a session."""
    row = await session_row(request)
    name = request.path("name")
    run = run_id(row["session_id"], max(1, row["attempt"]))
    found = await request.service.workers.artifact(run, name)
    if found is None:
        raise ApiError(
            404, "not_found", f"this session has no log or artifact {name[:200]!r}", param="name"
        )
    kind = "application/octet-stream"
    if isinstance(found, bytes):
        return Response(found, media_type=kind, headers=ARTIFACT_HEADERS)
    return FileResponse(found, media_type=kind, headers=ARTIFACT_HEADERS)


# ---- groups


@ROUTES.add("GET", "/v1/groups", TokenRole.READ, query=GroupsQuery)
async def groups(request: ApiRequest) -> Response:
    """List groups that have ended and are not acknowledged; the query `wait_s` waits for the first
    one.

    `cursor` is the last group seen. Without it, a consumer that was restarted gets all groups again
    that it did not acknowledge, in order. By priority the cursor stays as it was given, because
    groups that end later may come first: such a page repeats what is not acknowledged.
    """
    packed = negotiate(request, (JSON_TYPE, MSGPACK_TYPE)) == MSGPACK_TYPE
    page = request.query(GroupsQuery)

    def read() -> Awaitable[Sequence[Row]]:
        return request.queries.groups(after=page.cursor, limit=page.limit, order=page.order)

    rows = await _poll(request.service, page.wait_s, read, bool)
    version = await request.service.store.number("policy_version")
    listed = []
    for row in rows:
        sessions = await request.queries.sessions(row["seq"])
        shown = [session_json(request, one) for one in sessions]
        group = queries.group_json(row, shown, version=version)
        if page.include is not None:
            group["results"] = [
                await queries.session_result(request.service, one, packed=packed)
                for one in sessions
            ]
        listed.append(group)
    place = "seq" if page.order == "submitted" else "done_seq"
    seen = [] if page.order == "priority" else [row[place] for row in rows]
    body = {"groups": listed, "cursor": max([page.cursor, *seen])}
    return await asyncio.to_thread(packed_reply if packed else reply, body)


@ROUTES.add("POST", "/v1/groups/ack", TokenRole.READ, body=Ack)
async def ack(request: ApiRequest) -> Response:
    """Acknowledge ended groups by their tasks' ids, or all up to a cursor; they are not listed
    again. `unknown` names the ids of which no group has ended.
    """
    wanted = await request.body(Ack)
    count = await request.service.ack(
        cursor=wanted.cursor, task_ids=wanted.task_ids, tenant=request.caller.tenant
    )
    ended = await request.queries.ended(wanted.task_ids)
    unknown = [one for one in wanted.task_ids if one not in ended]
    return reply({"acked": count, "unknown": unknown})


# ---- callbacks


@ROUTES.add("GET", "/v1/callbacks", TokenRole.READ, query=CallbacksQuery)
async def callbacks(request: ApiRequest) -> Response:
    """List callbacks; `state=dead` are those that are not retried any more."""
    page = request.query(CallbacksQuery)
    rows = await request.queries.callbacks(after=page.cursor, limit=page.limit, state=page.state)
    return reply(page_json("callbacks", rows, page, "seq", queries.callback_json))


@ROUTES.add("POST", "/v1/callbacks/replay", TokenRole.ADMIN)
async def replay_all(request: ApiRequest) -> Response:
    """Send all callbacks that are not retried any more (state `dead`) again."""
    return reply({"replayed": await request.service.replay(None)})


@ROUTES.add("POST", "/v1/callbacks/{delivery_id}/replay", TokenRole.ADMIN)
async def replay(request: ApiRequest) -> Response:
    """Send a callback that is not retried any more (state `dead`) again."""
    delivery_id = request.path("delivery_id")
    if not await request.service.replay(delivery_id):
        message = f"no dead callback {delivery_id[:80]!r}"
        raise ApiError(404, "not_found", message, param="delivery_id")
    return reply({"replayed": 1})


# ---- the server, its nodes and the policy


@ROUTES.add("GET", "/rollout/status", TokenRole.READ)
@ROUTES.add("GET", "/v1/status", TokenRole.READ)
async def status(request: ApiRequest) -> Response:
    """Return counts of tasks, sessions, groups and callbacks by state."""
    return reply(await request.service.status(request.caller.tenant))


@ROUTES.add("GET", "/metrics", TokenRole.METRICS)
async def metrics(request: ApiRequest) -> Response:
    """Return the metrics of the server and of its nodes' gateways as Prometheus text."""
    text = await request.service.metrics.render(request.service)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@ROUTES.add("POST", "/v1/pause", TokenRole.ADMIN)
async def pause(request: ApiRequest) -> Response:
    """Pause the server: no further session starts; running ones continue."""
    await request.service.pause()
    return await status(request)


@ROUTES.add("POST", "/v1/drain", TokenRole.ADMIN, query=DrainQuery)
async def drain(request: ApiRequest) -> Response:
    """Pause the server, and return when no session runs or `timeout_s` is over."""
    timeout_s = request.query(DrainQuery).timeout_s
    await request.service.pause()
    await request.service.scheduler.drained(timeout_s)
    return await status(request)


@ROUTES.add("POST", "/v1/resume", TokenRole.ADMIN)
async def resume(request: ApiRequest) -> Response:
    """End the server's pause: sessions start again."""
    await request.service.resume()
    return await status(request)


@ROUTES.add("GET", "/policy", TokenRole.READ)
async def show_policy(request: ApiRequest) -> Response:
    """Return the policy version under which sessions start, and whether sampling is held."""
    return reply((await request.service.status())["policy"])


@ROUTES.add("POST", "/policy", TokenRole.ADMIN, body=SetPolicy)
async def set_policy(request: ApiRequest) -> Response:
    """Set a policy version, pause or hold sampling, or load weights."""
    await request.service.set_policy(await request.body(SetPolicy))
    return await show_policy(request)


@ROUTES.add("GET", "/engines", TokenRole.READ)
async def show_engines(request: ApiRequest) -> Response:
    """List the engines with their states and versions, as the nodes last reported them."""
    return reply({"engines": request.service.workers.policy().get("engines", [])})


@ROUTES.add("POST", "/engines/{name:path}", TokenRole.ADMIN, body=SetEngine)
async def set_engine(request: ApiRequest) -> Response:
    """Release an engine to its trainer, or resume it, on every node.

    `name` is the engine's id or name; `all` = all engines.
    """
    wanted = await request.body(SetEngine)
    try:
        policy = wanted.policy(request.path("name"))
    except ValidationError as error:
        raise validation_error(error, "the request's body") from error
    await request.service.set_policy(policy)
    return await show_engines(request)


@ROUTES.add("GET", "/v1/nodes", TokenRole.READ)
async def show_nodes(request: ApiRequest) -> Response:
    """List the nodes with their slots and stages."""
    return reply({"nodes": request.service.workers.nodes()})


@ROUTES.add("POST", "/v1/nodes/{name}/drain", TokenRole.ADMIN)
async def drain_node(request: ApiRequest) -> Response:
    """Start no further session on a node; it leaves the cluster when its last session has ended.

    `name` is its name or its `node_id`.
    """
    try:
        await request.service.workers.drain_node(request.path("name"))
    except ConfigError as error:
        raise ApiError(404, "not_found", str(error), param="name") from error
    return await show_nodes(request)


@ROUTES.add("POST", "/v1/replicas", TokenRole.ADMIN, body=AddReplica)
async def add_replica(request: ApiRequest) -> Response:
    """Add an engine replica on every node."""
    wanted = await request.body(AddReplica)
    await request.service.workers.add_replica(wanted.engine)
    return await show_nodes(request)


@ROUTES.add("DELETE", "/v1/replicas", TokenRole.ADMIN, query=ReplicaQuery)
async def remove_replica(request: ApiRequest) -> Response:
    """Remove an engine replica on every node; its calls may continue for `drain_s`."""
    wanted = request.query(ReplicaQuery)
    try:
        await request.service.workers.remove_replica(wanted.name, float(wanted.drain_s))
    except ConfigError as error:
        raise ApiError(404, "not_found", str(error), param="name") from error
    return await show_nodes(request)
