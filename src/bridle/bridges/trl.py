"""TRL: a `rollout_func` for `GRPOTrainer` whose rollouts are sessions of real harnesses.

    with LocalSessions(f"embedded:{model_dir}", folder) as sessions:
        rollouts = TrlRollouts(sessions, tasks)
        trainer = GRPOTrainer(
            model=model_dir,
            args=GRPOConfig(...),
            train_dataset=Dataset.from_list(rollouts.rows()),
            reward_funcs=session_reward,
            rollout_func=rollouts,
        )
        trainer.train()

TRL wants one row per prompt, so a session gives its trace with the most tokens that train; `rows`
says how many sessions had more. (Trainers that take any number of rows lose nothing.) A session
that has none, or whose reward is not known, is a row that does not train: its mask is 0 throughout,
and its reward `None`. Before each batch the trainer's weights go into the engine, so the batch is
sampled from the weights that it updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bridle.config import Task
from bridle.engines.base import Weights
from bridle.errors import ConfigError
from bridle.trajectory.credit import trace_reward
from bridle.trajectory.sample import Trace, Trajectory

REWARD = "session_reward"
"""Name of the field by which TRL hands sessions' rewards to reward functions."""


class Sessions(Protocol):
    """Interface for running sessions (`bridle.bridges.local.LocalSessions`)."""

    def play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """One session per entry, in order."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Sample from these from here on."""


class Trainer(Protocol):
    """Attributes of `trl.GRPOTrainer` that are used here."""

    @property
    def state(self) -> Any:  # noqa: ANN401 - transformers' own
        """With `global_step`."""

    @property
    def accelerator(self) -> Any:  # noqa: ANN401 - accelerate's own
        """With `unwrap_model`."""

    @property
    def model(self) -> Any:  # noqa: ANN401 - torch's own
        """The policy, perhaps wrapped."""


@dataclass(slots=True)
class Counts:
    """Counts of the sessions so far."""

    sessions: int = 0
    without_trace: int = 0
    """Sessions of which nothing trains."""
    with_more: int = 0
    """Sessions of which only the largest trace was given."""
    tokens_left: int = 0
    """Tokens that would train in the traces that were not given."""


def session_reward(
    prompts: Sequence[object], completions: Sequence[object], **fields: Sequence[Any]
) -> list[float | None]:
    """A reward function of TRL: what the task's evaluator said; `None` = not known."""
    del prompts, completions
    return [None if reward is None else float(reward) for reward in fields[REWARD]]


class TrlRollouts:
    """A `rollout_func` over tasks; the prompts of the data set are their ids."""

    def __init__(self, sessions: Sessions, tasks: Sequence[Task]) -> None:
        """`ConfigError` if two tasks have one id."""
        self._sessions = sessions
        self._tasks = {task.task_id: task for task in tasks}
        self._published: int | None = None
        self.counts = Counts()
        if len(self._tasks) != len(tasks):
            raise ConfigError("two tasks have one task_id")

    def rows(self) -> list[dict[str, str]]:
        """The data set: one row per task, `prompt` is its id."""
        return [{"prompt": task_id} for task_id in self._tasks]

    def __call__(self, prompts: Sequence[str], trainer: Trainer) -> dict[str, list[Any]]:
        """One session per prompt; the fields that TRL wants, `env_mask` and the rewards."""
        self._publish(trainer)
        played = self._sessions.play([self._tasks[prompt] for prompt in prompts])
        rows = [self._row(session) for session in played]
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def _publish(self, trainer: Trainer) -> None:
        step = int(trainer.state.global_step)
        if step != self._published:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self._sessions.update_weights(model.state_dict(), step)
            self._published = step

    def _row(self, session: Trajectory) -> Mapping[str, Any]:
        traces = sorted(session.traces, key=_trained, reverse=True)
        best = traces[0] if traces and _trained(traces[0]) else None
        counts = self.counts
        counts.sessions += 1
        counts.without_trace += best is None
        counts.with_more += len(traces) > 1
        counts.tokens_left += sum(map(_trained, traces[1:]))
        reward = None
        if best is not None and session.reward is not None:
            reward = trace_reward(best, session)
        return {**_fields(best, trains=reward is not None), REWARD: reward}


def _trained(trace: Trace) -> int:
    return int(trace.loss_mask.sum())


def _fields(trace: Trace | None, *, trains: bool) -> dict[str, Any]:
    """A trace as a row; TRL has no empty rows, so no trace is one token that does not train."""
    if trace is None:
        return {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0]}
    mask = trace.loss_mask.tolist()
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "completion_ids": trace.response_ids.tolist(),
        "logprobs": trace.response_logprobs.tolist(),
        "env_mask": mask if trains else [0] * len(mask),
    }
