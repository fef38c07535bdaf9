"""TRL: sessions of real harnesses for `AsyncGRPOTrainer`, any number of rows for each.

    with LocalSessions(f"embedded:{model_dir}", folder) as sessions:
        rollouts = TrlAsyncRollouts(sessions, tasks, num_generations=8)
        trainer = AsyncGRPOTrainer(
            model=model_dir,
            args=AsyncGRPOConfig(..., token_budget=4096),
            train_dataset=Dataset.from_list(rollouts.rows()),
            rollout_worker=rollouts,
            weight_transfer=rollouts,
        )
        trainer.train()

One object is both of what TRL takes: the *rollout worker* plays groups of `num_generations`
sessions in threads while the trainer trains, and the *weight transfer* puts the trainer's
parameters into the engine, which resumes calls in flight. A group's advantages are taken over its
sessions, and each trace of a session is a row with its session's. A row is as old as its oldest
token that trains, so TRL's `max_staleness` bounds what it promises to. Sessions without a reward,
and groups whose rewards do not vary, give no rows; `counts` says how many.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bridle.config import Task
from bridle.engines.base import Weights
from bridle.errors import ConfigError, TrainingError
from bridle.trajectory.credit import trace_advantages, trace_reward
from bridle.trajectory.sample import Trace, Trajectory

STOP_S = 60.0
"""How long `stop` waits for sessions that run."""

GIVE_UP = 64
"""Groups in a row without a row after which the trainer is told what became of them."""


class Sessions(Protocol):
    """Interface for running sessions (`bridle.bridges.local.LocalSessions`)."""

    def play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """One session per entry, in order; may be called from several threads."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Sample from these from here on."""

    def set_version(self, version: int) -> None:
        """The engine has the weights of this version already."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trace for TRL; the fields of its `RolloutSample`."""

    prompt: list[Mapping[str, Any]]
    completion: list[Mapping[str, Any]]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    """1 = trains; shape as `input_ids`."""
    old_log_probs: npt.NDArray[np.float32]
    """Of the tokens that train, else 0; shape as `input_ids`."""
    advantage: float
    model_version: int
    """Of its oldest token that trains."""
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None
    """Unix seconds."""


@dataclass(slots=True)
class AsyncCounts:
    """Counts of the groups so far."""

    groups: int = 0
    flat: int = 0
    """Groups whose rewards do not vary: of no use."""
    rows: int = 0
    sessions: Counter[str] = field(default_factory=Counter)
    """By status."""


def rows_of(
    group_id: int, sessions: Sequence[Trajectory], *, version: int, normalise: bool = True
) -> list[Row]:
    """The rows of a group; none if its rewards do not vary.

    `version` is that of tokens which do not tell theirs.
    """
    rewards = [float("nan") if one.reward is None else float(one.reward) for one in sessions]
    advantages = trace_advantages(sessions, "grpo" if normalise else "dr_grpo")
    if not any(map(any, advantages)):
        return []
    known = [reward for reward in rewards if not np.isnan(reward)]
    metrics = {"reward_std": float(np.std(known))}
    return [
        _row(trace, own, group_id, {"reward": trace_reward(trace, session), **metrics}, version)
        for session, of in zip(sessions, advantages, strict=True)
        if session.reward is not None
        for trace, own in zip(session.traces, of, strict=True)
        if trace.loss_mask.any()
    ]


def _row(
    trace: Trace, advantage: float, group_id: int, metrics: dict[str, float], version: int
) -> Row:
    before = len(trace.prompt_ids)
    trained = trace.versions[(trace.loss_mask == 1) & (trace.versions >= 0)]
    return Row(
        prompt=list(trace.prompt_messages or ()),
        completion=list(trace.response_messages or ()),
        input_ids=np.concatenate([trace.prompt_ids, trace.response_ids]).astype(np.int64),
        completion_mask=np.pad(trace.loss_mask.astype(np.int64), (before, 0)),
        old_log_probs=np.pad(trace.response_logprobs.astype(np.float32), (before, 0)),
        advantage=advantage,
        model_version=int(trained.min()) if len(trained) else version,
        group_id=group_id,
        metrics=metrics,
        enqueued_at=time.time(),
    )


class TrlAsyncRollouts:
    """TRL's `rollout_worker` and `weight_transfer` over tasks; its prompts are their ids."""

    def __init__(
        self,
        sessions: Sessions,
        tasks: Sequence[Task],
        *,
        num_generations: int = 8,
        groups_at_once: int = 4,
        queue_rows: int = 256,
        normalise: bool = True,
        seed: int = 0,
    ) -> None:
        """Nothing is started. `ConfigError` if two tasks have one id.

        Args:
            sessions: What plays.
            tasks: Drawn once per epoch, in an order of the seed's.
            num_generations: Sessions of a group.
            groups_at_once: How many groups are played at a time.
            queue_rows: Rows that wait for the trainer at most; then no further group begins.
            normalise: Advantages over the group's deviation, or not.
            seed: Of the order.
        """
        self._sessions = sessions
        self._tasks = {task.task_id: task for task in tasks}
        self._size = num_generations
        self._threads = [
            threading.Thread(target=self._play, name=f"bridle-group-{n}", daemon=True)
            for n in range(groups_at_once)
        ]
        self._normalise = normalise
        self._draws = enumerate(_epochs(list(self._tasks.values()), seed))
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._barren: list[Trajectory] = []
        self._barren_groups = 0
        self._sent = 0
        self.version = 0
        """Of the policy that samples; TRL counts from 1."""
        self.counts = AsyncCounts()
        self.rollout_buffer: queue.Queue[Row] = queue.Queue(maxsize=queue_rows)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        if len(self._tasks) != len(tasks):
            raise ConfigError("two tasks have one task_id")

    def rows(self) -> list[dict[str, str]]:
        """The data set: one row per task, `prompt` is its id. TRL counts epochs by its length."""
        return [{"prompt": task_id} for task_id in self._tasks]

    # ---- TRL's rollout worker

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no further group, and wait for those that run."""
        self._stopping.set()
        until = time.monotonic() + STOP_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def update_model_version(self, model_version: int) -> None:
        """Set the weight version of later samples."""
        if model_version != self._sent:
            self._sessions.set_version(model_version)
        self.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the play; `TrainingError` if groups in a row gave nothing to train on.

        A session has time limits of its own, so one that takes long is no fault.
        """
        del stale_after_s
        if self._failure is not None:
            raise self._failure
        if self._barren_groups >= GIVE_UP:
            raise TrainingError(self._nothing())

    # ---- TRL's weight transfer

    def init_weight_transfer(self) -> None:
        """Nothing: the engine takes weights as it is."""

    def pause(self) -> None:
        """Nothing: the gateway holds its calls while weights are loaded."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Put parameters into the engine, as the version that TRL will name next."""
        self._sent = self.version + 1
        self._sessions.update_weights(dict(iterator), self._sent)

    def resume(self) -> None:
        """Nothing: calls that were held went on."""

    def destroy(self) -> None:
        """Nothing is held."""

    # ---- groups

    def _play(self) -> None:
        try:
            while not self._stopping.is_set() and self._barren_groups < GIVE_UP:
                with self._lock:
                    number, task = next(self._draws)
                version = self.version
                played = self._sessions.play([task] * self._size)
                made = rows_of(number, played, version=version, normalise=self._normalise)
                self._count(played, made)
                for row in made:
                    self._put(row)
        except BaseException as error:  # noqa: BLE001 - told to the trainer's thread
            self._failure = error

    def _count(self, played: Sequence[Trajectory], made: Sequence[Row]) -> None:
        with self._lock:
            self.counts.groups += 1
            self.counts.flat += not made
            self.counts.rows += len(made)
            self.counts.sessions.update(str(one.status) for one in played)
            if made or any(one.reward for one in played):
                self._barren, self._barren_groups = [], 0
            else:
                self._barren += played
                self._barren_groups += 1
        known = [one.reward for one in played if one.reward is not None]
        if known:
            self.metrics_queue.put({"rollout/reward": float(np.mean(known))})

    def _put(self, row: Row) -> None:
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(row, timeout=0.2)
            except queue.Full:
                continue
            return

    def _nothing(self) -> str:
        status = Counter(str(one.status) for one in self._barren)
        errors = Counter(one.error for one in self._barren if one.error)
        example = f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
        return (
            f"{self._barren_groups} groups in a row give nothing to train on: of "
            f"{len(self._barren)} sessions {dict(status)}{example}"
        )


def _epochs(tasks: list[Task], seed: int) -> Iterator[Task]:
    """All tasks once, in an order of the seed's, then again in another."""
    drawn = random.Random(seed)  # noqa: S311 - an order
    while tasks:
        yield from drawn.sample(tasks, len(tasks))
