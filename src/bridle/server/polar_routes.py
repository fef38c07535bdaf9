"""The routes that Polar's clients know, with its shapes.

Not served: registration and heartbeats of nodes, and callbacks that come in from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bridle import __version__
from bridle.capture.reader import SqliteReader
from bridle.config import Task
from bridle.errors import ConfigError, StateError, StoreError, root_cause
from bridle.server import wire
from bridle.server.addresses import ForbiddenAddressError
from bridle.server.answering import PAGE, Asked, Refusal, ServerContext, invalid, reply, route
from bridle.server.auth import Caller, Role
from bridle.server.polar import PolarTask
from bridle.server.results import task_status
from bridle.server.schemas import Submission
from bridle.server.views import is_final
from bridle.server.wire import Row
from bridle.trajectory.result import encode
from bridle.types import JSON, one_line

TASK_BYTES = 4 << 20
"""JSON of one task; every run of it reads this."""

METADATA_BYTES = 64 << 20
"""Metadata of all results of one task; a cancelled one writes all of them at once."""

FLAGS = ("true", "false", "1", "0")

HEALTH_TIMEOUT_S = 5.0

KEEPALIVE_S = 15.0
"""Longest silence in the event stream."""


def routes(served: ServerContext) -> list[Route]:
    read, submit = Role.READ, Role.SUBMIT
    return [
        route(served, "POST", "/rollout/task/submit", submit, submit_task, body=PolarTask),
        route(
            served,
            "GET",
            "/rollout/task/{task_id}",
            read,
            show_task,
            query={"include": {"enum": ["results"]}},
        ),
        route(
            served,
            "DELETE",
            "/rollout/task/{task_id}",
            submit,
            cancel_task,
            query={"register_if_missing": {"enum": list(FLAGS)}},
        ),
        route(served, "GET", "/rollout/status", read, status),
        route(served, "GET", "/tasks", read, list_tasks, query=PAGE),
        route(served, "GET", "/tasks/{task_id}/sessions", read, list_sessions, query=PAGE),
        route(served, "GET", "/events", read, events),
        route(served, "GET", "/health", None, health),
    ]


def check(asked: Asked, submission: Submission) -> Submission:
    """The submission as it is to run. 422 for what is not permitted, or names what is not there.

    By default `local`, which contains nothing, is for admins alone.
    """
    permits = asked.served.permits
    if not asked.caller.may(Role.ADMIN):
        permits = permits.model_copy(update={"local": False})
    task, _ = submission.split()
    _check_size(task)
    for param, message in permits.refused(task):
        raise Refusal(422, "not_permitted", f"{param}: {message}", param=param)
    if submission.callback_url is not None:
        try:
            asked.served.addresses.check_url(submission.callback_url)
        except ForbiddenAddressError as error:
            message = f"callback_url: {error}"
            raise Refusal(422, "not_permitted", message, param="callback_url") from None
    try:
        asked.service.check(task)
    except ConfigError as error:
        raise Refusal(422, "invalid", str(error), param=_param(str(error))) from None
    return permits.crossed(submission)


def check_forks(caller: Caller, submissions: Iterable[Submission]) -> None:
    """Refuse with 422 the forks of captured sessions that another owner's task began.

    To a tenant such a session is one that does not exist; an admin forks every session. `bridle
    run` records no owner: there the permit decides. Reads captures, so call it in a thread.
    """
    for one in submissions:
        if one.fork is None or caller.may(Role.ADMIN):
            continue
        path = Path(one.task_dir or ".", one.fork.capture)
        try:
            with SqliteReader(path) as reader:
                owner = reader.session(one.fork.session).metadata.get("owner")
                if owner not in (None, caller.name):
                    raise reader.never_opened(one.fork.session)
        except StoreError as error:
            raise Refusal(422, "invalid", f"fork: {error}", param="fork") from None


def _check_size(task: Task) -> None:
    """Refuse with 422 a task that costs the server more than it can carry for one."""
    try:
        size = len(task.model_dump_json())
    except PydanticSerializationError as error:
        raise Refusal(422, "invalid", f"a field is nested too deeply: {error}") from None
    if size > TASK_BYTES:
        message = f"a task has at most {TASK_BYTES} bytes of JSON; this one has {size}"
        raise Refusal(422, "invalid", message)
    repeated = len(encode(task.metadata)) * task.num_samples
    if repeated > METADATA_BYTES:
        message = (
            f"metadata: each of the {task.num_samples} results has a copy; together these are "
            f"{repeated} bytes, and at most {METADATA_BYTES}"
        )
        raise Refusal(422, "invalid", message, param="metadata")


def _param(message: str) -> str | None:
    """The field of a task that an error is about, by its first words."""
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


def is_tenant(asked: Asked) -> bool:
    """Return whether the caller's task ids are in a namespace of their own."""
    return asked.caller.tenant is not None


async def task_row(asked: Asked) -> Row:
    """The row of the task in the path. `Refusal` 404."""
    task_id = asked.path("task_id")
    task = await asked.views.task(task_id)
    if task is None:
        raise Refusal(404, "not_found", f"no task {task_id[:200]!r}", param="task_id")
    return task


async def submit_task(asked: Asked) -> Response:
    """`POST /rollout/task/submit`."""
    wanted = await asked.body(PolarTask)
    for param, message in wanted.refused(asked.served.permits):
        raise Refusal(422, "not_permitted", f"{param}: {message}", param=param)
    try:
        submission = wanted.submission()
    except ValidationError as error:
        raise invalid(error) from None
    submission = check(asked, submission)
    await asked.service.submit([submission], owner=asked.caller.name, tenant=is_tenant(asked))
    return reply({"task_id": submission.task_id, "status": "running"})


async def show_task(asked: Asked) -> Response:
    """`GET /rollout/task/{id}`: counts until it is final, then all results."""
    task = await task_row(asked)
    results = is_final(task) or asked.choice("include", ("results",)) == "results"
    told = await task_status(asked.service, task, results=results)
    return await asyncio.to_thread(reply, told)


async def cancel_task(asked: Asked) -> Response:
    """`DELETE /rollout/task/{id}`; with `register_if_missing` the id is taken from here on."""
    task_id = asked.path("task_id")
    register = asked.choice("register_if_missing", FLAGS) in ("true", "1")
    if register and await asked.views.task(task_id) is None:
        try:
            await asked.service.bar(task_id, owner=asked.caller.name, tenant=is_tenant(asked))
        except ValidationError as error:
            raise invalid(error) from None
    await asked.service.cancel_task((await task_row(asked))["key"])
    return reply(await task_status(asked.service, await task_row(asked), results=False))


async def status(asked: Asked) -> Response:
    """`GET /rollout/status`."""
    return reply(await asked.service.status(asked.caller.tenant))


async def list_tasks(asked: Asked) -> Response:
    """`GET /tasks`: a page of tasks, oldest first."""
    page = asked.page()
    rows = await asked.views.tasks(after=page.after, limit=page.limit)
    return reply(page.told("tasks", rows, "seq", lambda row: wire.polar_task(row, [], [])))


async def list_sessions(asked: Asked) -> Response:
    """`GET /tasks/{id}/sessions`: a page of sessions that were started."""
    task = await task_row(asked)
    page = asked.page(least=-1)
    rows = await asked.views.sessions(task["seq"], after=page.after, limit=page.limit)

    def form(row: Row) -> JSON:
        told = session_json(asked, row)
        return told | {"status": wire.polar_state(told["status"])}

    told = page.told("sessions", rows, "sample_index", form)
    return reply({"task_id": task["task_id"]} | told)


def session_json(asked: Asked, row: Row) -> JSON:
    """A session's row, with what it is doing if it runs."""
    running = row["state"] == "RUNNING"
    stage = asked.service.stage(row["session_id"], row["attempt"]) if running else None
    return wire.session_json(row, stage)


async def events(asked: Asked) -> Response:
    """`GET /events`: what happens from here on, as server-sent events."""
    return StreamingResponse(_events(asked), media_type="text/event-stream")


async def _events(asked: Asked) -> AsyncIterator[bytes]:
    with asked.service.events.reading(asked.caller.tenant) as reader:
        yield b": listening\n\n"
        while not asked.service.stopping.is_set():
            event = await reader.next(KEEPALIVE_S)
            if event is None:
                yield b": still here\n\n"
            else:
                yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), one_line(encode(event)))
                await asyncio.sleep(0)


async def health(asked: Asked) -> Response:
    """`GET /health`: open to all; 503 if a part has failed, or nothing can be stored."""
    told = {"status": "ok", "version": __version__}
    if asked.service.broken is not None:
        return reply(told | {"status": "failed"}, 503)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await asked.service.storing()
    except (StateError, StoreError, TimeoutError) as error:
        return reply(told | {"status": "store_error", "detail": root_cause(error)}, 503)
    return reply(told)
