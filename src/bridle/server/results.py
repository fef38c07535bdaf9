"""Rows of the database as the JSON of the HTTP API, and results with their trajectories.

Polar has no cancelled state: in its shapes a cancelled session is ERROR and a cancelled task
`failed`; `cause` has the reason.
"""

from __future__ import annotations

import asyncio

import orjson

from bridle.capture.records import Outcome
from bridle.errors import StoreError
from bridle.server.schemas import GroupOptions
from bridle.server.service import Service
from bridle.server.tables import FINAL_TASKS, Row, TaskState
from bridle.trajectory import with_outcome
from bridle.trajectory.result import packed_json, trajectory_json
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


async def trajectory(service: Service, session: Row) -> Trajectory | None:
    """Read a session's trajectory with its latest reward; `None` = there is none any more."""
    if session["file"] is None:
        return None
    try:
        found = await service.files.read(session["file"])
        return await asyncio.to_thread(_with_reward, found, orjson.loads(session["result"]))
    except StoreError:
        row = await service.queries.session(session["session_id"])
        if row is not None and row["file"] is None:  # retention removed it meanwhile
            return None
        raise


def _with_reward(found: Trajectory, result: JSON) -> Trajectory:
    if not (scores := result.get("scores")):
        return found
    outcome = Outcome(
        found.session_id,
        result["status"],
        scores[-1]["at"],
        result["reward"],
        error=result["error"],
        trace_rewards=scores[-1]["trace_rewards"],
    )
    return with_outcome(found, outcome)


async def session_result(
    service: Service, session: Row, *, polar: bool = False, packed: bool = False
) -> JSON:
    """Return a final session's result with its trajectory; `packed` = arrays as bytes (msgpack)."""
    found = await trajectory(service, session)
    form = packed_json if packed else trajectory_json
    read = None if found is None else await asyncio.to_thread(form, found)
    return result_json(session, read, polar=polar)


async def task_status(service: Service, task: Row, *, results: bool) -> JSON:
    """Return Polar's `TaskStatus`, with the results of ended sessions if `results`."""
    rows = await service.queries.sessions(task["seq"], final=True) if results else []
    ended = [await session_result(service, row, polar=True) for row in rows]
    paths = [f"{service.files.root}/{row['file']}" for row in rows if row["file"]]
    return polar_task(task, ended, paths)


def polar_status(task: Row) -> str:
    """Return `running`, `completed` or `failed`."""
    state = TaskState(task["state"])
    if state not in FINAL_TASKS:
        return "running"
    return "completed" if state is TaskState.COMPLETED else "failed"


def polar_state(status: str) -> str:
    """Return the name that Polar's clients know for a session's status."""
    return {"CANCELLED": "ERROR", "QUEUED": "REGISTERED"}.get(status, status)


def polar_task(task: Row, results: list[JSON], paths: list[str]) -> JSON:
    return {
        "task_id": task["task_id"],
        "status": polar_status(task),
        "results": results,
        "result_paths": paths,
        "total_sessions": task["target"],
        "completed_sessions": task["ended"],
        "state": task["state"],
        "usable_sessions": task["usable"],
        "stopped": task["stopped"],
    }


def result_json(session: Row, trajectory: JSON | None, *, polar: bool) -> JSON:
    """Return a final session's `SessionResult`; without a `trajectory` it has an empty one."""
    result: JSON = orjson.loads(session["result"])
    status = polar_state(result["status"]) if polar else result["status"]
    if trajectory is None:
        trajectory = {
            "status": result["status"],
            "metadata": {"removed": session["file_bytes"] is not None},
            "traces": [],
            "error": result["error"],
            "session_id": session["session_id"],
            "reward": result["reward"],
        }
    if polar:
        trajectory = trajectory | {"status": polar_state(trajectory["status"])}
    return result | {"status": status, "trajectory": trajectory, "attempt": session["attempt"]}


def session_json(session: Row, stage: str | None) -> JSON:
    """Return a session without its trajectory; `stage` is that of a running one."""
    result: JSON = {} if session["result"] is None else orjson.loads(session["result"])
    return {
        "session_id": session["session_id"],
        "sample_index": session["sample_index"],
        "status": stage or session["state"],
        "attempt": session["attempt"],
        "usable": bool(session["usable"]),
        "cause": result.get("cause"),
        "error": result.get("error"),
        "reward": result.get("reward"),
        "scores": result.get("scores", []),
        "fork": (result.get("metadata") or {}).get("fork"),
        "harness": result.get("harness"),
        "harness_version": result.get("harness_version"),
        "runtime": result.get("runtime"),
        "contains": result.get("contains"),
        "timing": result.get("timing") or {},
        "artifacts": [path.split("/", 2)[-1] for path in (result.get("logs") or {}).values()],
        "started_at": session["started_at"],
        "ended_at": session["ended_at"],
        "version_started": session["version_started"],
        "version_min": session["version_min"],
        "version_max": session["version_max"],
        "has_trajectory": session["file"] is not None,
        "earlier": orjson.loads(session["earlier"]) if session["earlier"] else [],
    }


def task_json(task: Row) -> JSON:
    terms = GroupOptions.model_validate_json(task["terms"])
    return {
        "task_id": task["task_id"],
        "seq": task["seq"],
        "state": task["state"],
        "stopped": task["stopped"],
        "priority": task["priority"],
        "samples": task["samples"],
        "total_sessions": task["target"],
        "started_sessions": task["expanded"],
        "ended_sessions": task["ended"],
        "usable_sessions": task["usable"],
        "owner": task["owner"],
        "version_submitted": task["version"],
        "submitted_at": task["submitted_at"],
        "started_at": task["started_at"],
        "ended_at": task["ended_at"],
        "cursor": task["done_seq"],
        "acked_at": task["acked_at"],
        "terms": terms.model_dump(mode="json"),
    }


def group_json(task: Row, sessions: list[JSON], *, version: int) -> JSON:
    """Return an ended group, its unusable sessions (`missing`) and its lag behind `version`."""
    sampled = [one["version_min"] for one in sessions if one["version_min"] is not None]
    names = ("session_id", "sample_index", "status", "error", "cause")
    return task_json(task) | {
        "sessions": sessions,
        "missing": [{name: one[name] for name in names} for one in sessions if not one["usable"]],
        "version_lag": max(0, version - min(sampled)) if sampled else None,
    }


def callback_json(row: Row) -> JSON:
    names = (
        *("seq", "delivery_id", "task_id", "session_id", "url", "state", "tries", "next_at"),
        *("made_at", "ended_at", "error"),
    )
    return {name: row[name] for name in names}
