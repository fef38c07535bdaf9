"""verifiers: sessions as records of `verifiers.v1` traces (`WireTrace`), one branch per trace.

A node's ids are what its message adds. The ids of a prompt stand on its last message, those
between two turns on the last message that was given, and the sampled ones on the turn itself, so
that a branch's ids, mask and logprobs are those of the trace.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridle.bridges.base import Turn, turns_of, warn_of_own_rewards
from bridle.experts import complete_rows
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON, SessionStatus


def trace_record(trajectory: Trajectory, *, experts: bool = False) -> JSON:
    """Return a session in the fields of `verifiers.v1.trace.WireTrace`, as its `model_validate`
    takes.

    It has one reward per session: a warning names a session whose traces have their own. With
    `experts` nodes have their routed experts, which are arrays; without, all is plain JSON.
    """
    warn_of_own_rewards("verifiers", trajectory)
    nodes: list[JSON] = []
    for trace in trajectory.traces:
        first = len(nodes)
        _add(trace, nodes)
        if experts:
            _add_experts(trace, nodes[first:])
    done = trajectory.status == SessionStatus.COMPLETED
    reward = None if trajectory.reward is None else {"score": trajectory.reward}
    error = {"type": str(trajectory.status), "message": trajectory.error or ""}
    task_id = str(trajectory.metadata.get("task_id") or "")
    return {
        "id": trajectory.session_id,
        "task": {"type": "bridle", "data": {"id": task_id}, "key": task_id},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": nodes,
        "rewards": {"bridle": reward},
        "is_completed": True,
        "ok": done,
        "is_timeout": trajectory.status == SessionStatus.TIMEOUT,
        "stop_condition": "agent_completed" if done else "error",
        "errors": [] if done else [error],
    }


def verifiers_trace(trajectory: Trajectory) -> Any:  # noqa: ANN401 - verifiers' own
    """Return a session as verifiers' own `WireTrace`."""
    from verifiers.v1.trace import WireTrace

    return WireTrace.model_validate(trace_record(trajectory, experts=True))


def _add_experts(trace: Trace, nodes: list[JSON]) -> None:
    """Give each node the rows of its ids, the last id those before it: it needs some.

    None where one is not known, as verifiers does (0.4.0, `v1/graph.py`).
    """
    rows = complete_rows(trace.routed_experts)
    if rows is None or not len(rows):
        return
    kind = np.uint8 if int(rows.max()) < 256 else np.uint16
    left = np.concatenate([rows, rows[-1:]]).astype(kind)
    for node in nodes:
        size = len(node["token_ids"])
        if size:
            node["routed_experts"], left = left[:size], left[size:]


def _add(trace: Trace, nodes: list[JSON]) -> None:
    """Add one branch: the prompt's messages, then turn by turn."""
    parent: int | None = None
    tools = [_tool(tool) for tool in trace.tools or ()]

    def add(message: JSON, ids: list[int], **fields: Any) -> None:  # noqa: ANN401 - JSON
        nonlocal parent
        node: JSON = {
            "parent": parent,
            "message": message,
            "token_ids": ids,
            "mask": [False] * len(ids),
        }
        if parent is None and tools:
            node["tools"] = tools
        nodes.append(node | fields)
        parent = len(nodes) - 1

    waiting = trace.prompt_ids.tolist()
    before = 0
    shown = [_message(message) for message in trace.prompt_messages]
    for turn in turns_of(trace):
        waiting += trace.response_ids[before : turn.start].tolist()
        shown += [_message(message) for message in turn.given]
        for number, message in enumerate(shown, start=1):
            add(message, waiting if number == len(shown) else [])
        scaffold = [] if shown else waiting
        _said(trace, turn, scaffold, add)
        waiting, shown, before = [], [], turn.end


def _said(trace: Trace, turn: Turn, scaffold: list[int], add: Any) -> None:  # noqa: ANN401 - a function
    ids = trace.response_ids[turn.start : turn.end].tolist()
    mask = trace.loss_mask[turn.start : turn.end] == 1
    logprobs = trace.response_logprobs[turn.start : turn.end][mask].tolist()
    first, *others = [_message(message) for message in turn.said] or [_empty()]
    add(
        first,
        [*scaffold, *ids],
        mask=[False] * len(scaffold) + mask.tolist(),
        logprobs=logprobs,
        sampled=True,
    )
    for message in others:
        add(message, [], sampled=True)


def _empty() -> JSON:
    return {"role": "assistant", "content": ""}


def _message(message: JSON) -> JSON:
    shown = {name: value for name, value in message.items() if name != "tool_calls"}
    if message["role"] == "developer":
        shown["role"] = "system"
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {
                "id": str(call.get("id") or ""),
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        ]
    if message["role"] == "assistant" and isinstance(message.get("content"), list):
        shown["content"] = "".join(part.get("text", "") for part in message["content"])
    return shown


def _tool(tool: JSON) -> JSON:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
    }
