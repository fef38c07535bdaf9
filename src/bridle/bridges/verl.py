"""verl: rollouts that are sessions of real harnesses.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class` names `BridleAgentLoopManager`; under
`actor_rollout_ref.rollout.custom` stand `bridle_server` (URL of `bridle serve`) and `bridle_tasks`
(task file). The data set's rows name tasks: `extra_info.task_id`. verl wants one sequence per row
of its batch, so a session gives its trace with the most tokens that train.

Shapes are those of verl 0.9 (`AgentLoopOutput`, and the `DataProto` of `AgentLoopWorker`). The
manager serves the trainer with `trainer.use_v1=False`; the other one takes its rollouts from a
queue that verl's own workers fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.bridges.base import Group, Row, RowCounts, Sessions, Shape, TaskTable, rows_of
from bridle.bridges.remote import ServerSessions
from bridle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt


def agent_loop_output(row: Row) -> Any:  # noqa: ANN401 - verl's own
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=row.prompt_ids.tolist(),
        response_ids=row.response_ids.tolist(),
        response_mask=row.mask.tolist(),
        response_logprobs=row.logprobs.tolist(),
        reward_score=row.reward,
        num_turns=len(row.trace.turn_ends),
        metrics=AgentLoopMetrics(),
        extra_fields=_extra(row),
    )


def _extra(row: Row) -> dict[str, Any]:
    oldest, newest = row.lags or (None, None)
    return {
        "min_global_steps": oldest,
        "max_global_steps": newest,
        "session_id": row.session.session_id,
        "status": str(row.session.status),
    }


def data_proto(
    rows: Sequence[Row], *, prompt_length: int, response_length: int, pad_id: int
) -> Any:  # noqa: ANN401 - verl's own
    """Rows as a `DataProto`: prompts padded on the left, responses on the right.

    Rows must fit (`Shape(max_prompt, max_response)`); raises `ValueError` otherwise.
    """
    import torch
    from verl.protocol import DataProto

    prompts = [_padded(row.prompt_ids, prompt_length, pad_id, left=True) for row in rows]
    responses = [_padded(row.response_ids, response_length, pad_id) for row in rows]
    given = [_padded(np.ones_like(r.prompt_ids), prompt_length, 0, left=True) for r in rows]
    said = [_padded(np.ones_like(row.response_ids), response_length, 0) for row in rows]
    attention = np.concatenate([np.stack(given), np.stack(said)], axis=1).astype(np.int64)
    tensors = {
        "prompts": np.stack(prompts).astype(np.int64),
        "responses": np.stack(responses).astype(np.int64),
        "response_mask": np.stack([_padded(r.mask, response_length, 0) for r in rows]).astype(
            np.int64
        ),
        "input_ids": np.concatenate([np.stack(prompts), np.stack(responses)], 1).astype(np.int64),
        "attention_mask": attention,
        "position_ids": np.clip(np.cumsum(attention, axis=1) - 1, 0, None),
        "rollout_log_probs": np.stack([_padded(r.logprobs, response_length, 0.0) for r in rows]),
        "rm_scores": scores_of(rows, response_length),
    }
    extra = [_extra(row) for row in rows]
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(array) for name, array in tensors.items()},
        non_tensors={
            "__num_turns__": np.array([len(row.trace.turn_ends) for row in rows], np.int32),
            **{name: np.array([one[name] for one in extra], dtype=object) for name in extra[0]},
        },
        meta_info={"reward_extra_keys": []},
    )


def scores_of(rows: Sequence[Row], length: int) -> npt.NDArray[np.float32]:
    """Rewards per token, shape (rows, length): token rewards, else the row's at its last token."""
    scores = np.zeros((len(rows), length), np.float32)
    for score, row in zip(scores, rows, strict=True):
        size = len(row.response_ids)
        if row.known and row.trace.token_rewards is not None:
            score[:size] = row.trace.token_rewards
        else:
            score[size - 1] = row.reward
    return scores


def _padded(values: Any, length: int, pad: float, *, left: bool = False) -> Any:  # noqa: ANN401 - arrays
    if len(values) > length:
        raise ValueError(f"{len(values)} values do not fit into {length}")
    padding = np.full(length - len(values), pad, dtype=values.dtype)
    return np.concatenate([padding, values] if left else [values, padding])


class BridleAgentLoopManager:
    """In the place of verl's `AgentLoopManager`."""

    def __init__(self, config: Any, sessions: Sessions, tasks: TaskTable, pad_id: int) -> None:  # noqa: ANN401 - verl's own
        """`config` is verl's whole config; `pad_id` stands where there is no token."""
        self._rollout = config.actor_rollout_ref.rollout
        self._sessions = sessions
        self._tasks = tasks
        self._pad_id = pad_id
        self.counts = RowCounts()
        """Of the last batch."""

    @classmethod
    def create(cls, config: Any, *_: object, **__: object) -> BridleAgentLoopManager:  # noqa: ANN401 - verl's own
        """Create a manager from verl's configuration; the engine clients and reward workers that
        verl passes are ignored.

        `ConfigError` for missing settings, or a task file that cannot be read.
        """
        from bridle.datasets.jsonl import load_tasks

        custom = config.actor_rollout_ref.rollout.get("custom") or {}
        server, tasks = custom.get("bridle_server"), custom.get("bridle_tasks")
        if not server or not tasks:
            raise ConfigError(
                "set actor_rollout_ref.rollout.custom.bridle_server and .bridle_tasks"
            )
        sessions = ServerSessions(server).__enter__()  # for as long as the process lives
        table = TaskTable(load_tasks(_path(tasks)))
        return cls(config, sessions, table, int(custom.get("pad_token_id") or 0))

    def generate_sequences(self, prompts: Any) -> Any:  # noqa: ANN401 - verl's own
        """A `DataProto` with one row for each row of `prompts`, in order."""
        given = prompts.non_tensor_batch
        names = [str(info["task_id"]) for info in given["extra_info"]]
        if isinstance(self._sessions, ServerSessions):
            self._sessions.set_version(int(prompts.meta_info.get("global_steps", 0)))
        played = self._sessions.play([self._tasks[name] for name in names])
        shape = Shape(self._rollout.prompt_length, self._rollout.response_length, one_each=True)
        # A group is what has one `uid`; without, what plays one task.
        keys = [str(key) for key in given.get("uid", names)]
        places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        groups = [Group(key, tuple(played[at] for at in of)) for key, of in places.items()]
        made, self.counts = rows_of(groups, shape)
        order = [at for of in places.values() for at in of]
        rows = [row for _, row in sorted(zip(order, made, strict=True), key=lambda one: one[0])]
        output = data_proto(
            rows,
            prompt_length=self._rollout.prompt_length,
            response_length=self._rollout.response_length,
            pad_id=self._pad_id,
        )
        output.non_tensor_batch.update(given)
        output.meta_info["timing"] = self.counts.json("agent_loop")
        return output


def _path(name: str) -> Path:
    from pathlib import Path

    return Path(name)
