"""NeMo Gym and NeMo RL: an agent server with responses, and NeMo RL's batch with all traces.

NeMo RL trains on a Responses object in which the last item of each model call has
`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; each call's prompt must begin
with all tokens of the call before. A trace is exactly that. NeMo RL (checked at commit 7ea279a)
makes one training sequence of each rollout, so it takes the trace with the most tokens that train;
the reply counts all others. A call of which not every token trains has no token fields of its own:
its tokens stand in the prompt of the next call.

`train_batch` makes the batch of NeMo RL's policy and loss (`ClippedPGLossDataDict` at 7ea279a)
from groups instead, with all traces of all sessions.

Routed experts go in the envelope of NeMo Gym 0.7.0 (`token_id_capture/staging/routes.py`), which
NeMo RL reads at commit 00420a1.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.bridges.base import (
    Row,
    SessionGroup,
    Sessions,
    Shape,
    TaskTable,
    Turn,
    rows_of,
    turns_of,
    warn_of_own_rewards,
)
from bridle.errors import TrainingError
from bridle.experts import stack_rows
from bridle.trajectory.credit import trace_advantages
from bridle.trajectory.sample import Trace, Trajectory, refuse_images
from bridle.types import JSON

if TYPE_CHECKING:
    import torch


def train_batch(
    groups: Sequence[SessionGroup],
    *,
    pad_id: int,
    token_level_loss: bool = True,
    normalise: bool = True,
    shape: Shape | None = None,
    rows_multiple: int = 1,
    length_multiple: int = 1,
) -> tuple[dict[str, torch.Tensor], list[Row]]:
    """Return a NeMo RL batch with all traces that train, and the row behind each sequence.

    The batch lacks `prev_logprobs` and `reference_policy_logprobs`, which the policy computes.
    `sample_mask` has weights by which each session counts once, under NeMo RL's setting
    `loss_fn.token_level_loss` as given here. Advantages are those of the group, over its deviation
    with `normalise`. Empty rows follow up to a multiple of `rows_multiple` (the data-parallel
    size); lengths are padded to a multiple of `length_multiple`. `TrainingError` where nothing
    trains, for images, and for experts of several models.
    """
    import torch

    rows = [row for row in rows_of(groups, shape)[0] if row.mask.any()]
    if not rows:
        raise TrainingError("no trace in these groups of sessions has a token to train on")
    for row in rows:
        refuse_images("NeMo RL", row.session)
    kind = "grpo" if normalise else "dr_grpo"
    advantages = {
        (group, sample, trace.trace_id): own
        for group, one in enumerate(groups)
        for sample, found in enumerate(trace_advantages(one.sessions, kind)[0])
        for trace, own in zip(one.sessions[sample].traces, found, strict=True)
    }
    lengths = [row.trace.size for row in rows]
    count = -(-len(rows) // rows_multiple) * rows_multiple
    size = count, -(-max(lengths) // length_multiple) * length_multiple
    fields: dict[str, Any] = {
        "input_ids": np.full(size, pad_id, np.int64),
        "input_lengths": np.ones(count, np.int64),
        "token_mask": np.zeros(size, np.int64),
        "sample_mask": np.zeros(count, np.float32),
        "generation_logprobs": np.zeros(size, np.float32),
        "advantages": np.zeros(size, np.float32),
    }
    # -1, where one is not known, has NeMo RL's own router choose.
    given = [row.trace.routed_experts for row in rows] + [None] * (count - len(rows))
    experts = stack_rows(given, size[1])
    if experts is not None:
        fields["routed_experts"] = experts
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        response = slice(len(row.prompt_ids), length)
        fields["input_ids"][at, :length] = row.trace.ids
        fields["input_lengths"][at] = length
        fields["token_mask"][at, response] = row.mask
        fields["sample_mask"][at] = row.weight / (row.mask.sum() if token_level_loss else 1)
        fields["generation_logprobs"][at, response] = row.logprobs
        fields["advantages"][at] = advantages[row.group, row.sample, row.trace.trace_id]
    return {name: torch.from_numpy(values) for name, values in fields.items()}, rows


def response_of(trajectory: Trajectory, *, model: str = "policy") -> JSON:
    """Return a session as an object of the Responses API with NeMo's token fields.

    Where no call trains, it ends with one given and one more token, because NeMo RL fails on a
    response without any. `TrainingError` for images.
    """
    refuse_images("NeMo RL", trajectory)
    trace = max(trajectory.traces, key=_tokens_of_calls, default=None)
    output = [] if trace is None else items_of(trace)
    if trace is None or not _tokens_of_calls(trace):
        blank = {
            "prompt_token_ids": [0],
            "generation_token_ids": [0],
            "generation_log_probs": [0.0],
        }
        output.append(_message("", len(output)) | blank)
    return {
        "id": f"resp_{trajectory.session_id}",
        "object": "response",
        "created_at": 0.0,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {"session_id": trajectory.session_id, "status": str(trajectory.status)},
    }


def _tokens_of_calls(trace: Trace) -> int:
    """Return the number of tokens in calls of which every token trains."""
    return sum(turn.end - turn.start for turn in turns_of(trace) if _trains(trace, turn))


def _trains(trace: Trace, turn: Turn) -> bool:
    return turn.end > turn.start and bool(trace.loss_mask[turn.start : turn.end].all())


def items_of(trace: Trace) -> list[JSON]:
    """Return the output items of a Responses object along a trace: tool results, and calls with
    tokens.
    """
    items: list[JSON] = []
    for number, turn in enumerate(turns_of(trace)):
        items += [_given(message) for message in turn.given if message["role"] == "tool"]
        said = _said(turn.said, number)
        if _trains(trace, turn):
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
    """Return rows of the call's prompt and output in NeMo Gym's envelope; -1 has the trainer
    choose.
    """
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
    """Return a call's items: reasoning, text, function calls.

    An empty text where they are unknown.
    """
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
    """Return the reply of a NeMo Gym agent server to `/run`.

    A session whose reward is not known, or of which no call trains, is masked: `mask_sample` is
    NeMo Gym's place for that, `instance_config` NeMo RL's. There is one reward per session: a
    warning names a session whose traces have their own. `tokens_left_out` counts the tokens that
    train and are not in the response; NeMo RL logs every number of a reply.
    """
    warn_of_own_rewards("nemo", trajectory)
    known = trajectory.reward is not None
    tokens = sum(int(trace.loss_mask.sum()) for trace in trajectory.traces)
    given = max(map(_tokens_of_calls, trajectory.traces), default=0)
    masked = not known or not given
    return {
        "responses_create_params": create_params,
        "response": response_of(trajectory),
        "reward": trajectory.reward if trajectory.reward is not None else 0.0,
        "mask_sample": masked,
        "instance_config": {"mask_sample": masked},
        "failure_reason": None if known else f"{trajectory.status}: {trajectory.error or ''}",
        "tokens_left_out": tokens - given,
    }


def agent_class(sessions: Sessions, tasks: TaskTable) -> type[Any]:
    """Return a NeMo Gym agent server class whose rollouts are sessions; `.run_webserver()` starts
    one.

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
            """Refuse: a single model call is not what an agent does."""
            raise NotImplementedError(
                "this agent makes no single model calls (/responses): call its /run, which plays "
                "a whole session"
            )

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
