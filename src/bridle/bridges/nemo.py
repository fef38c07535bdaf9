"""NeMo Gym and NeMo RL: responses whose items carry their tokens, and an agent server.

NeMo RL trains on a Responses object in which the last item of each model call has
`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; each call's prompt must begin
with all tokens of the call before. A trace is exactly that. NeMo RL (checked at commit 7ea279a)
makes one training sequence of each rollout, so it takes the trace with the most tokens that train;
the reply counts the tokens of the others.

A call of which not every token trains has no token fields of its own: its tokens stand in the
prompt of the next call.

Routed experts go in the envelope of NeMo Gym 0.7.0 (`token_id_capture/staging/routes.py`), which
NeMo RL reads at commit 00420a1.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridle.bridges.base import Sessions, TaskTable, Turn, turns_of, warn_of_own_rewards
from bridle.trajectory.sample import Trace, Trajectory
from bridle.types import JSON


def response_of(trajectory: Trajectory, *, model: str = "policy") -> JSON:
    """A session as a Responses object with token fields; without any trace it has no output."""
    trained = [trace for trace in trajectory.traces if trace.loss_mask.any()]
    trace = max(trained, key=lambda one: int(one.loss_mask.sum()), default=None)
    return {
        "id": f"resp_{trajectory.session_id}",
        "object": "response",
        "created_at": 0.0,
        "model": model,
        "output": [] if trace is None else items_of(trace),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {"session_id": trajectory.session_id, "status": str(trajectory.status)},
    }


def items_of(trace: Trace) -> list[JSON]:
    """The output items along a trace: results as they were given, calls with their tokens."""
    items: list[JSON] = []
    for number, turn in enumerate(turns_of(trace)):
        items += [_given(message) for message in turn.given if message["role"] == "tool"]
        said = _said(turn.said, number)
        if trace.loss_mask[turn.start : turn.end].all():
            said[-1] |= _tokens(trace, turn)
        items += said
    return items


def _tokens(trace: Trace, turn: Turn) -> JSON:
    given = np.concatenate([trace.prompt_ids, trace.response_ids[: turn.start]])
    return {
        "prompt_token_ids": given.tolist(),
        "generation_token_ids": trace.response_ids[turn.start : turn.end].tolist(),
        "generation_log_probs": trace.response_logprobs[turn.start : turn.end].tolist(),
        **_experts(trace, turn),
    }


def _experts(trace: Trace, turn: Turn) -> JSON:
    """Rows of the call's prompt and output in NeMo Gym's envelope; -1 has the trainer choose."""
    if trace.routed_experts is None:
        return {}
    rows = trace.routed_experts[: len(trace.prompt_ids) + turn.end]
    text = base64.b64encode(rows.astype("<i2").tobytes()).decode()
    return {"routed_experts": f"nrlre1:int16:{'x'.join(map(str, rows.shape))}:{text}"}


def _given(message: JSON) -> JSON:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)
    return {
        "type": "function_call_output",
        "call_id": str(message.get("tool_call_id") or ""),
        "output": text,
    }


def _said(messages: Sequence[JSON], number: int) -> list[JSON]:
    """A call's items: reasoning, text, function calls; an empty text where they are unknown."""
    items: list[JSON] = []
    for message in messages:
        if reasoning := message.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
        if content := message.get("content"):
            items.append(_message(str(content), number))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            items.append(
                {
                    "type": "function_call",
                    "call_id": str(call.get("id") or ""),
                    "name": function["name"],
                    "arguments": function["arguments"],
                }
            )
    return items or [_message("", number)]


def _message(text: str, number: int) -> JSON:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def verify_response(trajectory: Trajectory, create_params: JSON) -> JSON:
    """Build the reply of a NeMo Gym agent server to `/run`.

    A session whose reward is not known is masked (`mask_sample`), with how it ended. There is one
    reward per session: a warning names a session whose traces have their own. `tokens_left_out`
    counts those of all traces but the largest; NeMo RL logs every number of a reply.
    """
    warn_of_own_rewards("nemo", trajectory)
    known = trajectory.reward is not None
    tokens = sorted(int(trace.loss_mask.sum()) for trace in trajectory.traces)
    return {
        "responses_create_params": create_params,
        "response": response_of(trajectory),
        "reward": trajectory.reward if trajectory.reward is not None else 0.0,
        "mask_sample": not known,
        "failure_reason": None if known else f"{trajectory.status}: {trajectory.error or ''}",
        "tokens_left_out": sum(tokens[:-1]),
    }


def agent_class(sessions: Sessions, tasks: TaskTable) -> type[Any]:
    """The class of an agent server whose rollouts are sessions; `.run_webserver()` starts one.

    A rollout's row names its task: `{"responses_create_params": {...}, "task_id": "..."}`. Needs
    the package `nemo-gym`.
    """
    import asyncio

    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from pydantic import ConfigDict, create_model

    extra = ConfigDict(extra="allow", populate_by_name=True)
    Run = create_model("BridleRunRequest", __base__=BaseRunRequest, task_id=(str, ...))  # noqa: N806 - a class
    Answer = type("BridleVerifyResponse", (BaseVerifyResponse,), {"model_config": extra})  # noqa: N806 - a class

    class BridleAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
        """Drives Bridle; the harness brings its own tools and model calls."""

        async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
            """A single model call is not what an agent does."""
            raise NotImplementedError("ask /run: a session is played as a whole")

        async def run(self, body: Run) -> Answer:  # type: ignore[valid-type]
            """Play one session of the row's task."""
            (played,) = await asyncio.to_thread(sessions.play, [tasks[body.task_id]])  # type: ignore[attr-defined]
            params = body.responses_create_params.model_dump(mode="json", exclude_unset=True)  # type: ignore[attr-defined]
            return Answer.model_validate(verify_response(played, params))  # type: ignore[attr-defined, no-any-return]

    # FastAPI reads the types of a route from its annotations.
    BridleAgent.run.__annotations__ = {"body": Run, "return": Answer}
    BridleAgent.responses.__annotations__ = {
        "body": NeMoGymResponseCreateParamsNonStreaming,
        "return": NeMoGymResponse,
    }
    return BridleAgent
