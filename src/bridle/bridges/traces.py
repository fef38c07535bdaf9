"""Sessions in the trace formats of others: ATIF, OpenEnv and verifiers.

ATIF is the Agent Trajectory Interchange Format (v1.8) of Harbor: that of its RFC 0001 and of the
package `atif` 1.8.0, which validates what is written here (tests). One document per session: its
first conversation is the trajectory, the others stand in `subagent_trajectories`. Every turn of the
model is a step of source `agent` whose `metrics` hold the exact prompt ids, completion ids and
logprobs; results of its calls are its `observation`. Model messages that were given and not sampled
(examples, an earlier context) are `is_copied_context`.

OpenEnv has a session as `TrainingTrace`, version 1: a turn per model call with the whole prompt,
the sampled ids, their logprobs and a mask over both. A call that lies on several traces stands
there once, where it trains.

verifiers has records of `verifiers.v1` traces (`WireTrace`), one branch per trace. A node's ids are
what its message adds. The ids of a prompt stand on its last message, those between two turns on the
last message that was given, and the sampled ones on the turn itself, so that a branch's ids, mask
and logprobs are those of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bridle.bridges.base import Turn, turns_of, warn_of_own_rewards
from bridle.bridges.examples import Example, write_lines
from bridle.capture.records import SessionCapture
from bridle.experts import complete_rows
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON, SessionStatus

SCHEMA = "ATIF-v1.8"


def write_atif(
    path: str | Path, sessions: Iterable[tuple[SessionCapture, Trajectory, Sequence[Example]]]
) -> int:
    """Write each session that has an example as one line of ATIF JSON; return how many.

    Raises `BridleError`.
    """
    return write_lines(path, (document(*one) for one in sessions if one[2]))


def document(capture: SessionCapture, trajectory: Trajectory, examples: Sequence[Example]) -> JSON:
    """Return a session as ATIF; `examples` are its conversations, at least one."""
    kept = capture.session.metadata
    names = {exchange.exchange_id: _model(exchange.request.head) for exchange in capture.exchanges}
    agent: JSON = {
        "name": str(kept.get("harness") or "unknown"),
        "version": str(kept.get("harness_version") or "unknown"),
    }
    if model := next((name for name in names.values() if name), None):
        agent["model_name"] = model
    times = {exchange.exchange_id: exchange.started_at for exchange in capture.exchanges}
    whole, *others = [_conversation(one, agent, times) for one in examples]
    whole["session_id"] = trajectory.session_id
    whole["extra"] = {
        "task_id": trajectory.metadata.get("task_id"),
        "status": str(trajectory.status),
        "reward": trajectory.reward,
        "error": trajectory.error,
    }
    if others:
        whole["subagent_trajectories"] = others
    return whole


def _model(head: bytes) -> str | None:
    try:
        name = orjson.loads(head).get("model")
    except (ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def _conversation(example: Example, agent: JSON, times: dict[str, float]) -> JSON:
    tools = {} if example.tools is None else {"tool_definitions": [*example.tools]}
    steps = _Steps()
    for message in example.prompt_messages:
        steps.add(message, copied=True)
    turns = [] if example.trace is None else turns_of(example.trace)
    has_messages = bool(turns) and all(turn.said for turn in turns)
    prompt = completion = 0
    if has_messages:
        for turn in turns:
            for message in turn.given:
                steps.add(message)
            metrics = _metrics(example, turn)
            prompt += metrics["prompt_tokens"]
            completion += metrics["completion_tokens"]
            steps.add(_merged(turn.said), metrics=metrics, at=times.get(turn.exchange_id))
    else:
        for message in example.response_messages:
            steps.add(message)
    final = {"total_steps": len(steps.steps)}
    if has_messages:
        final |= {"total_prompt_tokens": prompt, "total_completion_tokens": completion}
    return {
        "schema_version": SCHEMA,
        "trajectory_id": example.trace_id,
        "agent": {**agent, **tools},
        "steps": steps.steps,
        "final_metrics": final,
    }


def _metrics(example: Example, turn: Turn) -> JSON:
    """Return token counts and ids of a call; logprobs only if all its tokens train."""
    trace = example.trace
    assert trace is not None
    given = np.concatenate([trace.prompt_ids, trace.response_ids[: turn.start]]).tolist()
    sampled = trace.response_ids[turn.start : turn.end].tolist()
    metrics: JSON = {
        "prompt_tokens": len(given),
        "completion_tokens": len(sampled),
        "prompt_token_ids": given,
        "completion_token_ids": sampled,
    }
    mask = trace.loss_mask[turn.start : turn.end]
    if mask.all():
        metrics["logprobs"] = trace.response_logprobs[turn.start : turn.end].tolist()
    else:
        metrics["extra"] = {"loss_mask": mask.tolist()}
    return metrics


class _Steps:
    def __init__(self) -> None:
        self.steps: list[JSON] = []

    def add(
        self,
        message: JSON,
        *,
        copied: bool = False,
        metrics: JSON | None = None,
        at: float | None = None,
    ) -> None:
        """Add one message of OpenAI Chat."""
        role = message["role"]
        if role == "tool" and self.steps and self.steps[-1]["source"] == "agent":
            self._observe(message)
            return
        step: JSON = {"step_id": len(self.steps) + 1, "message": _content(message.get("content"))}
        if role == "assistant":
            step |= {"source": "agent"} | _agent_fields(message)
            step |= {"metrics": metrics, "llm_call_count": 1} if metrics else {}
            step |= {"is_copied_context": True} if copied else {}
        else:
            step["source"] = "system" if role in ("system", "developer") else "user"
        if at is not None:
            step["timestamp"] = datetime.fromtimestamp(at, UTC).isoformat()
        self.steps.append(step)

    def _observe(self, message: JSON) -> None:
        """Add a result to the step that called."""
        step = self.steps[-1]
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        result: JSON = {"content": _content(message.get("content"))}
        if message.get("tool_call_id") in calls:
            result["source_call_id"] = message["tool_call_id"]
        step.setdefault("observation", {"results": []})["results"].append(result)


def _agent_fields(message: JSON) -> JSON:
    fields: JSON = {}
    if reasoning := message.get("reasoning_content"):
        fields["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [
            {
                "tool_call_id": str(call.get("id") or f"call_{number}"),
                "function_name": call["function"]["name"],
                "arguments": _arguments(call["function"]["arguments"]),
            }
            for number, call in enumerate(calls)
        ]
    return fields


def _arguments(text: str | None) -> JSON:
    """Return an object; what the model wrote that is none stands under `arguments`."""
    try:
        value: Any = orjson.loads(text or "{}")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _content(content: object) -> str | list[JSON]:
    """Return text, or parts; a part that the format does not know is its JSON as text."""
    if not isinstance(content, list):
        return str(content or "")
    return [_part(part) for part in content]


def _part(part: JSON) -> JSON:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    url = (part.get("image_url") or {}).get("url") or ""
    media_type = url.partition(":")[2].partition(";")[0]
    if media_type in ("image/jpeg", "image/png", "image/gif", "image/webp"):
        return {"type": "image", "source": {"media_type": media_type, "path": url}}
    return {"type": "text", "text": orjson.dumps(part).decode()}


def _merged(said: Sequence[JSON]) -> JSON:
    if len(said) == 1:
        return said[0]
    texts = [m["content"] for m in said if isinstance(m.get("content"), str) and m["content"]]
    reasons = [m["reasoning_content"] for m in said if m.get("reasoning_content")]
    calls = [call for m in said for call in m.get("tool_calls") or ()]
    merged: JSON = {"role": "assistant", "content": "\n".join(texts)}
    merged |= {"reasoning_content": "\n".join(reasons)} if reasons else {}
    return merged | ({"tool_calls": calls} if calls else {})


# ---- OpenEnv


def training_trace(trajectory: Trajectory) -> JSON:
    """Return a session as JSON with the fields of `openenv.core.harness.training.TrainingTrace`."""
    turns: dict[str, JSON] = {}
    for trace in trajectory.traces:
        for turn in turns_of(trace):
            mask = trace.loss_mask[turn.start : turn.end]
            if turn.exchange_id in turns and not mask.any():
                continue
            given = np.concatenate([trace.prompt_ids, trace.response_ids[: turn.start]])
            versions = trace.versions[turn.start : turn.end]
            turns[turn.exchange_id] = {
                "node_id": turn.exchange_id,
                "prompt_token_ids": given.tolist(),
                "completion_token_ids": trace.response_ids[turn.start : turn.end].tolist(),
                "per_token_logps": trace.response_logprobs[turn.start : turn.end].tolist(),
                "loss_mask": [0] * len(given) + mask.tolist(),
                "response": {"messages": [*turn.said]},
                "metadata": {
                    "trace_id": trace.trace_id,
                    "reward": trace.reward,
                    "versions": sorted(set(versions[versions >= 0].tolist())),
                },
            }
    return {"schema_version": 1, "turns": list(turns.values())}


def openenv_trace(trajectory: Trajectory) -> Any:  # noqa: ANN401 - OpenEnv's own
    """Return a session as OpenEnv's own `TrainingTrace`; raises its validator's error."""
    from openenv.core.harness.training import TrainingTrace

    return TrainingTrace.model_validate(training_trace(trajectory))


# ---- verifiers


def trace_record(trajectory: Trajectory, *, experts: bool = False) -> JSON:
    """Return a session as JSON with the fields of `verifiers.v1.trace.WireTrace`, for its
    `model_validate`.

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
    first, *others = [_message(message) for message in turn.said] or [
        {"role": "assistant", "content": ""}
    ]
    add(
        first,
        [*scaffold, *ids],
        mask=[False] * len(scaffold) + mask.tolist(),
        logprobs=logprobs,
        sampled=True,
    )
    for message in others:
        add(message, [], sampled=True)


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
