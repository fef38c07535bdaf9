"""Rows -> JSON: as Polar's clients read it, and as ours do. Pure.

Polar knows no CANCELLED: in its shapes a cancelled session or task shows as ERROR or `failed`, with
`cause` telling the truth beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from bridle.server.schemas import Terms
from bridle.server.states import FINAL_TASKS, TaskState
from bridle.types import JSON

Row = Mapping[Any, Any]


def polar_status(task: Row) -> str:
    """`running`, `completed` or `failed`."""
    state = TaskState(task["state"])
    if state not in FINAL_TASKS:
        return "running"
    return "completed" if state is TaskState.COMPLETED else "failed"


def polar_state(status: str) -> str:
    """A session's status by a name that Polar's clients know."""
    return {"CANCELLED": "ERROR", "QUEUED": "REGISTERED"}.get(status, status)


def polar_task(task: Row, results: list[JSON], paths: list[str]) -> JSON:
    """Polar's `TaskStatus`; of a task that is not final without `results`, unless they were asked
    for.
    """
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


def session_result(session: Row, trajectory: JSON | None, *, polar: bool) -> JSON:
    """A final session's `SessionResult`; `trajectory` is that of its file, `None` = it has none."""
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
    """A session without its trajectory; `stage` is what a running one is doing."""
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
        "harness": result.get("harness"),
        "harness_version": result.get("harness_version"),
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
    terms = Terms.model_validate_json(task["terms"])
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
    """A group that has ended, with what is missing in it and how far behind it is."""
    sampled = [one["version_min"] for one in sessions if one["version_min"] is not None]
    return task_json(task) | {
        "sessions": sessions,
        "missing": [
            {name: one[name] for name in ("session_id", "sample_index", "status", "error")}
            | {"cause": one["cause"]}
            for one in sessions
            if not one["usable"]
        ],
        "version_lag": max(0, version - min(sampled)) if sampled else None,
    }


def callback_json(row: Row) -> JSON:
    names = (
        *("seq", "delivery_id", "task_id", "session_id", "url", "state", "tries", "next_at"),
        *("made_at", "ended_at", "error"),
    )
    return {name: row[name] for name in names}
