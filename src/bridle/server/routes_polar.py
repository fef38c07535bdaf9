"""The routes that Polar's clients use, with Polar's shapes.

Polar's routes for its nodes (registration, heartbeats, their callbacks) are not served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from bridle import __version__
from bridle.errors import StateError, StoreError, root_cause
from bridle.server.auth import TokenRole
from bridle.server.http import ApiError, ApiRequest, RouteTable, invalid, reply
from bridle.server.polar import PolarTask
from bridle.server.queries import is_final
from bridle.server.results import polar_task, task_status
from bridle.server.routes_v1 import check, list_sessions, page_json, submit, task_row
from bridle.server.schemas import PageQuery, PolarCancelQuery, PolarTaskQuery, SamplesQuery
from bridle.trajectory.result import encode
from bridle.types import one_line

HEALTH_TIMEOUT_S: Final = 5.0

KEEPALIVE_S: Final = 15.0
"""Longest silence in the event stream."""

ROUTES = RouteTable()


@ROUTES.add("POST", "/rollout/task/submit", TokenRole.SUBMIT, body=PolarTask)
async def submit_task(request: ApiRequest) -> Response:
    """Accept one task in Polar's form."""
    wanted = await request.body(PolarTask)
    for param, message in wanted.refused(request.context.policy):
        raise ApiError(422, "not_permitted", f"{param}: {message}", param=param)
    try:
        submission = wanted.submission()
    except ValidationError as error:
        raise invalid(error, "the body") from None
    await submit(request, [check(request, submission)])
    return reply({"task_id": submission.task_id, "status": "running"})


@ROUTES.add("GET", "/rollout/task/{task_id}", TokenRole.READ, query=PolarTaskQuery)
async def show_task(request: ApiRequest) -> Response:
    """Return a task's counts until it is final, then all its results."""
    task = await task_row(request)
    results = is_final(task) or request.query(PolarTaskQuery).include == "results"
    status = await task_status(request.service, task, results=results)
    return await asyncio.to_thread(reply, status)


@ROUTES.add("DELETE", "/rollout/task/{task_id}", TokenRole.SUBMIT, query=PolarCancelQuery)
async def cancel_task(request: ApiRequest) -> Response:
    """Cancel a task; `register_if_missing` reserves an unknown id as a cancelled task."""
    task_id, caller = request.path("task_id"), request.caller
    register = request.query(PolarCancelQuery).register_if_missing in ("true", "1")
    if register and await request.queries.task(task_id) is None:
        try:
            await request.service.reserve(
                task_id, owner=caller.name, tenant=caller.tenant is not None
            )
        except ValidationError as error:
            raise invalid(error, "the task") from None
    await request.service.cancel_task((await task_row(request))["key"])
    return reply(await task_status(request.service, await task_row(request), results=False))


@ROUTES.add("GET", "/tasks", TokenRole.READ, query=PageQuery)
async def list_tasks(request: ApiRequest) -> Response:
    """List tasks, oldest first."""
    page = request.query(PageQuery)
    rows = await request.queries.tasks(after=page.cursor, limit=page.limit)
    return reply(page_json("tasks", rows, page, "seq", lambda row: polar_task(row, [], [])))


ROUTES.add("GET", "/tasks/{task_id}/sessions", TokenRole.READ, query=SamplesQuery)(list_sessions)


@ROUTES.add("GET", "/events", TokenRole.READ)
async def events(request: ApiRequest) -> Response:
    """Stream events from now on as server-sent events."""
    return StreamingResponse(_events(request), media_type="text/event-stream")


async def _events(request: ApiRequest) -> AsyncIterator[bytes]:
    with request.service.events.subscribe(request.caller.tenant) as subscriber:
        yield b": listening\n\n"
        while not request.service.stopping.is_set():
            event = await subscriber.next(KEEPALIVE_S)
            if event is None:
                yield b": still here\n\n"
            else:
                yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), one_line(encode(event)))
                await asyncio.sleep(0)


@ROUTES.add("GET", "/health", None)
async def health(request: ApiRequest) -> Response:
    """Return 200, or 503 if a part of the server has failed or nothing can be stored."""
    state = {"status": "ok", "version": __version__}
    if request.service.failure is not None:
        return reply(state | {"status": "failed"}, 503)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await request.service.check_stores()
    except (StateError, StoreError, TimeoutError) as error:
        return reply(state | {"status": "store_error", "detail": root_cause(error)}, 503)
    return reply(state)
