"""Our own routes: batches, cancelling, groups with ack, trajectories, callbacks, the policy."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import orjson
from pydantic import ValidationError
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from bridle.config import ForkSpec
from bridle.errors import ConfigError, StoreError
from bridle.gateway.weights import SetPolicy
from bridle.lifecycle.opening import read_replay
from bridle.server import wire
from bridle.server.answering import (
    ARROW_TYPE,
    JSON_TYPE,
    MSGPACK_TYPE,
    PAGE,
    Asked,
    Refusal,
    ServerContext,
    accepted,
    invalid,
    packed_reply,
    reply,
    route,
)
from bridle.server.auth import Role
from bridle.server.polar_routes import (
    check,
    check_forks,
    is_tenant,
    list_sessions,
    session_json,
    task_row,
)
from bridle.server.results import session_result, trajectory
from bridle.server.schemas import BATCH, Ack, Batch, CancelBody, Fork, Reward, Submission
from bridle.server.states import DeliveryState, SessionState, TaskState, run_id
from bridle.server.views import is_final
from bridle.server.wire import Row
from bridle.trajectory.packed import packed_json
from bridle.trajectory.result import trajectory_json
from bridle.types import JSON

LONGEST_WAIT_S: Final = 60
"""Of `GET /v1/groups`."""

LOOK_AGAIN_S: Final = 2.0
"""How often a waiting `GET /v1/groups` looks for groups that another server ended."""

GROUPS: Final[dict[str, JSON]] = {
    "cursor": {"type": "integer", "minimum": 0, "maximum": 2**62, "default": 0},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
    "wait_s": {"type": "integer", "minimum": 0, "maximum": LONGEST_WAIT_S, "default": 0},
    "order": {"enum": ["done", "submitted", "priority"]},
    "include": {"enum": ["trajectories"]},
}

NEWEST: Final[dict[str, JSON]] = {
    "limit": PAGE["limit"],
    "offset": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "default": 0},
    "state": {"enum": list(SessionState)},
}


def routes(served: ServerContext) -> list[Route]:
    read, submit, admin = Role.READ, Role.SUBMIT, Role.ADMIN
    states: JSON = {"enum": list(TaskState)}
    deliveries: JSON = {"enum": list(DeliveryState)}
    return [
        route(served, "POST", "/v1/tasks", submit, submit_batch, body=Batch),
        route(served, "GET", "/v1/tasks", read, list_tasks, query={**PAGE, "state": states}),
        route(served, "POST", "/v1/tasks/cancel", submit, cancel_batch, body=CancelBody),
        route(
            served,
            "GET",
            "/v1/tasks/{task_id}",
            read,
            show_task,
            query={"wait_s": GROUPS["wait_s"]},
        ),
        route(served, "DELETE", "/v1/tasks/{task_id}", submit, cancel_task),
        route(served, "GET", "/v1/tasks/{task_id}/sessions", read, list_sessions, query=PAGE),
        route(served, "GET", "/v1/sessions", read, newest, query=NEWEST),
        route(served, "GET", "/v1/sessions/{session_id}", read, show_session),
        route(served, "DELETE", "/v1/sessions/{session_id}", submit, cancel_session),
        route(served, "POST", "/v1/sessions/{session_id}/reward", submit, give_reward, body=Reward),
        route(served, "POST", "/v1/sessions/{session_id}/fork", submit, fork_session, body=Fork),
        route(served, "GET", "/v1/sessions/{session_id}/trajectory", read, show_trajectory),
        route(served, "GET", "/v1/sessions/{session_id}/artifacts/{name:path}", read, artifact),
        route(served, "GET", "/v1/groups", read, groups, query=GROUPS),
        route(served, "POST", "/v1/groups/ack", read, ack, body=Ack),
        route(served, "GET", "/v1/callbacks", read, callbacks, query={**PAGE, "state": deliveries}),
        route(served, "POST", "/v1/callbacks/replay", admin, replay_all),
        route(served, "POST", "/v1/callbacks/{delivery_id}/replay", admin, replay),
        route(served, "GET", "/v1/status", read, status),
        route(served, "GET", "/metrics", Role.METRICS, metrics),
        route(served, "POST", "/v1/pause", admin, pause),
        route(
            served,
            "POST",
            "/v1/drain",
            admin,
            drain,
            query={"timeout_s": {"type": "integer", "minimum": 0, "maximum": 3600}},
        ),
        route(served, "POST", "/v1/resume", admin, resume),
        route(served, "GET", "/policy", read, show_policy),
        route(served, "POST", "/policy", admin, set_policy, body=SetPolicy),
    ]


# ---- tasks


async def submit_batch(asked: Asked) -> Response:
    """`POST /v1/tasks`: all tasks of the batch are accepted, or none."""
    batch = await asked.body(Batch)
    ids = [one.task_id for one in batch.tasks]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise Refusal(422, "invalid", f"task_id {twice!r} is there twice", param="tasks")
    checked = []
    for place, one in enumerate(batch.tasks):
        try:
            checked.append(check(asked, one))
        except Refusal as refusal:
            refusal.body["error"] |= {"task_id": one.task_id, "index": place}
            raise
    await asyncio.to_thread(check_forks, asked.caller, batch.tasks)
    fresh = await asked.service.submit(checked, owner=asked.caller.name, tenant=is_tenant(asked))
    told = [{"task_id": name, "new": new} for name, new in zip(ids, fresh, strict=True)]
    return reply({"tasks": told})


async def list_tasks(asked: Asked) -> Response:
    """`GET /v1/tasks`: a page of tasks in the order of their acceptance."""
    page, state = asked.page(), asked.choice("state", tuple(TaskState))
    rows = await asked.views.tasks(
        after=page.after, limit=page.limit, state=None if state is None else TaskState(state)
    )
    return reply(page.told("tasks", rows, "seq", wire.task_json))


async def show_task(asked: Asked) -> Response:
    """`GET /v1/tasks/{task_id}`: a task in counts; `wait_s` waits until it is final."""
    wait_s = asked.number("wait_s", 0, most=LONGEST_WAIT_S)
    service, deadline = asked.service, time.monotonic() + wait_s
    while True:
        ticket = service.groups.ticket()
        task = await task_row(asked)
        left_s = deadline - time.monotonic()
        if is_final(task) or left_s <= 0 or service.stopping.is_set():
            return reply(wire.task_json(task))
        await service.groups.after(ticket, min(left_s, LOOK_AGAIN_S))


async def cancel_task(asked: Asked) -> Response:
    """`DELETE /v1/tasks/{task_id}`: end it; of one that has ended nothing changes."""
    await asked.service.cancel_task((await task_row(asked))["key"])
    return reply(wire.task_json(await task_row(asked)))


async def cancel_batch(asked: Asked) -> Response:
    """`POST /v1/tasks/cancel`: end many; names those that are not known."""
    wanted = await asked.body(CancelBody)
    unknown = []
    for task_id in wanted.task_ids:
        task = await asked.views.task(task_id)
        if task is None or not await asked.service.cancel_task(task["key"]):
            unknown.append(task_id)
    return reply({"unknown": unknown})


# ---- sessions


async def _session(asked: Asked) -> Row:
    session_id = asked.path("session_id")
    row = await asked.views.session(session_id)
    if row is None:
        message = f"no session {session_id[:250]!r}; sessions are there once they have started"
        raise Refusal(404, "not_found", message, param="session_id")
    return row


async def newest(asked: Asked) -> Response:
    """`GET /v1/sessions`: sessions that were started, those of the newest task first."""
    state = asked.choice("state", tuple(SessionState))
    rows = await asked.views.newest(
        limit=asked.number("limit", 100, least=1, most=BATCH),
        offset=asked.number("offset", 0, most=2**31 - 1),
        state=None if state is None else SessionState(state),
    )
    told = [session_json(asked, row) | {"task_id": row["task_id"]} for row in rows]
    return reply({"sessions": told})


async def show_session(asked: Asked) -> Response:
    """`GET /v1/sessions/{session_id}`: where it stands, or its result without its trajectory."""
    row = await _session(asked)
    return reply(session_json(asked, row) | {"task_id": row["task_id"]})


async def cancel_session(asked: Asked) -> Response:
    """`DELETE /v1/sessions/{session_id}`: end it; of one that has ended nothing changes."""
    await asked.service.cancel_session((await _session(asked))["session_id"])
    row = await _session(asked)
    return reply(session_json(asked, row) | {"task_id": row["task_id"]})


async def give_reward(asked: Asked) -> Response:
    """`POST /v1/sessions/{session_id}/reward`: the last one counts, all are kept (`scores`).

    A group that nobody has acknowledged is told with it; `taken_at` says when one was.
    """
    session_id = (await _session(asked))["session_id"]
    given = await asked.body(Reward)
    given = given.model_copy(update={"by": given.by or asked.caller.name})
    await asked.service.give_reward(session_id, given)
    row = await _session(asked)
    told = session_json(asked, row) | {"task_id": row["task_id"]}
    return reply(told | {"taken_at": row["acked_at"]})


async def fork_session(asked: Asked) -> Response:
    """`POST /v1/sessions/{session_id}/fork`: accept a task whose sessions begin like this one.

    It is the session's task under another id, checked against the caller's permits once more.
    """
    row = await _session(asked)
    wanted = await asked.body(Fork)
    capture = asked.service.workers.capture
    if capture is None:
        message = "each node of a cluster captures in a file of its own: submit a task with `fork`"
        raise Refusal(409, "conflict", message)
    run = run_id(row["session_id"], max(1, row["attempt"]))
    fork = ForkSpec(capture=str(capture.absolute()), session=run, at=wanted.at)
    task = await asked.views.task(row["task_id"])
    assert task is not None
    own = {"task_id": wanted.task_id or f"{row['session_id']}.at{wanted.at}", "fork": None}
    given = orjson.loads(task["spec"]) | wanted.model_dump(exclude={"at"}) | own
    try:
        checked = check(asked, Submission.model_validate(given))
        async with asked.served.forking:  # each reads a whole session
            await asyncio.to_thread(read_replay, fork, capture.parent)
    except ValidationError as error:
        raise invalid(error) from None
    except ConfigError as error:
        raise Refusal(422, "invalid", str(error), param="at") from None
    except StoreError as error:
        raise Refusal(404, "not_found", f"its capture cannot be read: {error}") from None
    forked = checked.model_copy(update={"fork": fork})
    (new,) = await asked.service.submit([forked], owner=asked.caller.name, tenant=is_tenant(asked))
    return reply({"task_id": forked.task_id, "new": new})


async def show_trajectory(asked: Asked) -> Response:
    """`GET /v1/sessions/{session_id}/trajectory`: JSON, msgpack or Arrow, as `Accept` says."""
    kind = accepted(asked, (JSON_TYPE, MSGPACK_TYPE, ARROW_TYPE))
    row = await _session(asked)
    found = await trajectory(asked.service, row)
    if found is None:
        what = "has not ended" if row["ended_at"] is None else "has no trajectory, or not any more"
        raise Refusal(404, "not_found", f"session {row['session_id']!r} {what}")
    if kind == MSGPACK_TYPE:
        return await asyncio.to_thread(lambda: packed_reply(packed_json(found)))
    if kind == ARROW_TYPE:
        stream = await asyncio.to_thread(asked.service.files.codec.arrow, found)
        return Response(stream, media_type=ARROW_TYPE)
    return await asyncio.to_thread(lambda: reply(trajectory_json(found)))


ARTIFACT: Final = {
    "content-disposition": "attachment",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
}
"""Headers that keep a browser from showing or running a file that an agent wrote."""


async def artifact(asked: Asked) -> Response:
    """`GET /v1/sessions/{session_id}/artifacts/{name}`: a log, or a file that was kept."""
    row = await _session(asked)
    name = asked.path("name")
    run = run_id(row["session_id"], max(1, row["attempt"]))
    found = await asked.service.workers.artifact(run, name)
    if found is None:
        raise Refusal(404, "not_found", f"no artifact {name[:200]!r}", param="name")
    if isinstance(found, bytes):
        return Response(found, media_type="application/octet-stream", headers=ARTIFACT)
    return FileResponse(found, media_type="application/octet-stream", headers=ARTIFACT)


# ---- groups


async def groups(asked: Asked) -> Response:
    """`GET /v1/groups`: groups that have ended and are not acknowledged; waits for the first one.

    `cursor` is the last group seen. Without it a consumer that was restarted sees all that it did
    not acknowledge again, in order.
    """
    packed = accepted(asked, (JSON_TYPE, MSGPACK_TYPE)) == MSGPACK_TYPE
    with_trajectories = asked.choice("include", ("trajectories",)) is not None
    rows = await _wait_for_groups(asked)
    version = await asked.service.state.number("policy_version")
    told = []
    for row in rows:
        sessions = await asked.views.sessions(row["seq"])
        group = wire.group_json(
            row, [session_json(asked, one) for one in sessions], version=version
        )
        if with_trajectories:
            group["results"] = [
                await session_result(asked.service, one, packed=packed) for one in sessions
            ]
        told.append(group)
    place = "seq" if asked.query("order") == "submitted" else "done_seq"
    after = asked.number("cursor", 0, most=2**62)
    body = {"groups": told, "cursor": max([after, *(row[place] for row in rows)])}
    return await asyncio.to_thread(packed_reply if packed else reply, body)


async def _wait_for_groups(asked: Asked) -> list[Row]:
    after = asked.number("cursor", 0, most=2**62)
    limit = asked.number("limit", 10, least=1, most=100)
    wait_s = asked.number("wait_s", 0, most=LONGEST_WAIT_S)
    order = asked.choice("order", ("done", "submitted", "priority")) or "done"
    service, deadline = asked.service, time.monotonic() + wait_s
    while True:
        ticket = service.groups.ticket()
        rows = await asked.views.groups(after=after, limit=limit, order=order)  # type: ignore[arg-type]  # one of the three
        left_s = deadline - time.monotonic()
        if rows or left_s <= 0 or service.stopping.is_set():
            return list(rows)
        await service.groups.after(ticket, min(left_s, LOOK_AGAIN_S))


async def ack(asked: Asked) -> Response:
    """`POST /v1/groups/ack`: these groups, or all up to a cursor, have been dealt with."""
    wanted = await asked.body(Ack)
    count = await asked.service.ack(
        cursor=wanted.cursor, task_ids=wanted.task_ids, tenant=asked.caller.tenant
    )
    return reply({"acked": count})


# ---- callbacks


async def callbacks(asked: Asked) -> Response:
    """`GET /v1/callbacks`: a page of callbacks; `state=dead` are those that were given up."""
    page, state = asked.page(), asked.choice("state", tuple(DeliveryState))
    rows = await asked.views.callbacks(
        after=page.after, limit=page.limit, state=None if state is None else DeliveryState(state)
    )
    return reply(page.told("callbacks", rows, "seq", wire.callback_json))


async def replay(asked: Asked) -> Response:
    """`POST /v1/callbacks/{delivery_id}/replay`: send a dead one again."""
    delivery_id = asked.path("delivery_id")
    if not await asked.service.replay(delivery_id):
        message = f"no dead callback {delivery_id[:80]!r}"
        raise Refusal(404, "not_found", message, param="delivery_id")
    return reply({"replayed": 1})


async def replay_all(asked: Asked) -> Response:
    """`POST /v1/callbacks/replay`: send all dead ones again."""
    return reply({"replayed": await asked.service.replay(None)})


# ---- pace and policy


async def status(asked: Asked) -> Response:
    """`GET /v1/status`: how much there is of what."""
    return reply(await asked.service.status(asked.caller.tenant))


async def metrics(asked: Asked) -> Response:
    """`GET /metrics`: numbers of the server and of its nodes' gateways, as Prometheus text."""
    text = await asked.service.metrics.render(asked.service)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def pause(asked: Asked) -> Response:
    """`POST /v1/pause`: start no further session; running ones go on."""
    await asked.service.pause()
    return reply(await asked.service.status(asked.caller.tenant))


async def drain(asked: Asked) -> Response:
    """`POST /v1/drain`: pause, and answer when nothing runs or the time is over."""
    timeout_s = asked.number("timeout_s", 60, most=3600)
    await asked.service.pause()
    await asked.service.dispatcher.drained(timeout_s)
    return reply(await asked.service.status(asked.caller.tenant))


async def resume(asked: Asked) -> Response:
    """`POST /v1/resume`: start sessions again."""
    await asked.service.resume()
    return reply(await asked.service.status(asked.caller.tenant))


async def show_policy(asked: Asked) -> Response:
    """`GET /policy`: the version under which sessions start, and whether sampling is held."""
    return reply((await asked.service.status())["policy"])


async def set_policy(asked: Asked) -> Response:
    """`POST /policy`: a new version, a pause or hold of generation, new weights."""
    await asked.service.set_policy(await asked.body(SetPolicy))
    return reply((await asked.service.status())["policy"])
