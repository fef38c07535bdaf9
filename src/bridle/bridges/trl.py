"""TRL: sessions of real harnesses for `GRPOTrainer` and `AsyncGRPOTrainer`, every trace a row.

`docs/guides/training.md` shows both in use. `GRPOTrainer` takes one reward per prompt, and any
number of rows where `EveryTrace` gives each row the advantage of its session. A session without a
reward, or without a token that trains, is a row that trains nothing. Before each batch the
trainer's weights go into the engine, so the batch is sampled from the weights that it updates.

`TrlAsyncRollouts` is both of what `AsyncGRPOTrainer` takes: the *rollout worker* plays groups of
`num_generations` sessions in threads while the trainer trains, and the *weight transfer* puts the
trainer's parameters into the engine, which resumes calls in flight. A row is as old as its oldest
token that trains, so TRL's `max_staleness` bounds what it promises to. Sessions without a reward,
and groups whose rewards do not vary, give no rows; `counts` says how many. A trainer made as
`class Trainer(EveryGroupOnce, AsyncGRPOTrainer)` that was killed goes on from its checkpoint with
the groups that this has not trained.
"""

from __future__ import annotations

import itertools
import json
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bridle.bridges.base import (
    Row,
    RowCounts,
    SessionGroup,
    Sessions,
    Shape,
    TaskTable,
    blank_row,
    rows_of,
    warn_of_own_rewards,
)
from bridle.config import Task
from bridle.engines.base import Weights
from bridle.errors import ConfigError, TrainingError
from bridle.trajectory.credit import trace_advantages, trace_reward
from bridle.trajectory.sample import Trace, Trajectory, nothing_trains, refuse_images

REWARD = "session_reward"
"""Name of the field by which TRL hands sessions' rewards to reward functions."""

MEAN_OF_ROWS = frozenset({"grpo", "sapo"})
"""TRL's `loss_type`s that average over the tokens of each row, then over rows."""

SUM_OF_ROWS = frozenset({"dr_grpo", "luspo"})
"""Those that sum over the tokens of each row, then average over rows; all others average over the
tokens of the batch."""

STOP_S = 60.0
"""Time that `stop` waits for sessions that run."""

GIVE_UP = 64
"""Groups in a row without a row after which the trainer gets an error with the reasons."""


class TrainedSessions(Sessions, Protocol):
    """Sessions on an engine that takes a trainer's weights (`bridle.bridges.local`)."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Load `weights` into the engine as policy `version`; later tokens are sampled from
        them.
        """

    def set_version(self, version: int) -> None:
        """Set the policy version of later samples; the engine has its weights already."""


# ---- GRPOTrainer


def session_reward(
    prompts: Sequence[object], completions: Sequence[object], **fields: Sequence[Any]
) -> list[float | None]:
    """Return the rewards that the tasks' evaluators gave; `None` = not known.

    This is a reward function of TRL.
    """
    del prompts, completions
    return [None if reward is None else float(reward) for reward in fields[REWARD]]


class TrlRollouts:
    """A `rollout_func` over tasks; the prompts of the data set are their ids."""

    def __init__(self, sessions: TrainedSessions, tasks: Sequence[Task]) -> None:
        """`ConfigError` if two tasks have one id."""
        self._sessions = sessions
        self._tasks = TaskTable(tasks)
        self._published: int | None = None
        self.counts = RowCounts()
        self.owners: list[int] = []
        """For each row of the last batch, the place of its session's prompt."""
        self.weights: list[float] = []
        """Of each row in its session; 0 for rows that fill up the batch."""

    def rows(self) -> list[dict[str, str]]:
        """Return TRL's data set: one row per task, whose `prompt` is the task's id."""
        return [{"prompt": task.task_id} for task in self._tasks]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:  # noqa: ANN401 - TRL's
        """Play one session per prompt; the first trace of each, then the others.

        `ConfigError` for a trainer that takes one row per prompt, `TrainingError` for images.
        """
        if not isinstance(trainer, EveryTrace):
            raise ConfigError(
                f"{type(trainer).__name__} trains one row per prompt, but a session can have "
                "several traces: use `class Trainer(EveryTrace, GRPOTrainer)` "
                "(bridle.bridges.trl)"
            )
        self._publish(trainer)
        played = self._sessions.play([self._tasks[prompt] for prompt in prompts])
        rows = self._rows(played)
        room = _rows_per_process(trainer, len(rows))
        self.owners = [row.group for row in rows] + [0] * (room - len(rows))
        self.weights = [row.weight for row in rows] + [0.0] * (room - len(rows))
        traces = [row.trace for row in rows]
        traces += [blank_row(played[0])] * (room - len(rows)) if played else []
        return {
            "prompt_ids": [trace.prompt_ids.tolist() for trace in traces],
            "completion_ids": [trace.response_ids.tolist() for trace in traces],
            "logprobs": [trace.response_logprobs.tolist() for trace in traces],
            "env_mask": [trace.loss_mask.tolist() for trace in traces],
            REWARD: [session.reward for session in played],
        }

    def _rows(self, played: Sequence[Trajectory]) -> list[Row]:
        """Return all rows, the first of every session before the others."""
        for session in played:
            refuse_images("TRL", session)
            warn_of_own_rewards("trl", session)
        rows, counts = rows_of([SessionGroup("", (one,)) for one in played], Shape(blanks=True))
        self.counts += counts
        first = {row.group: row for row in reversed(rows)}
        return sorted(rows, key=lambda row: row is not first[row.group])

    def _publish(self, trainer: Any) -> None:  # noqa: ANN401 - TRL's
        step = int(trainer.state.global_step)
        if step != self._published:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self._sessions.update_weights(model.state_dict(), step)
            self._published = step


def _rows_per_process(trainer: Any, rows: int) -> int:  # noqa: ANN401 - TRL's
    """Return the number of rows of every process, the same in each, in equal parts for TRL's
    steps.
    """
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        rows = max(gather_object([rows]))
    parts = trainer.args.steps_per_generation if trainer.model.training else 1
    return -(-rows // parts) * int(parts)


class EveryTrace:
    """Mixin for `trl.GRPOTrainer` (1.16): a prompt may have any number of rows.

    TRL computes one advantage per session; each of its rows gets it, so that every session weighs 1
    where TRL averages over rows, and every token alike where TRL averages over tokens.
    """

    rollout_func: TrlRollouts
    loss_type: str

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Leave the texts of the first rows alone: TRL has rewards and a log for each prompt."""
        generated = list(super()._generate(prompts))  # type: ignore[misc]
        generated[3] = generated[3][: len(prompts)]
        return tuple(generated)

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        """Give each row its session's advantage."""
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        of_sessions = batch["advantages"]
        owners, weights = (
            self.rollout_func.owners,
            of_sessions.new_tensor(self.rollout_func.weights),
        )
        by_row = of_sessions[owners]
        if self.loss_type in MEAN_OF_ROWS:
            by_row = by_row * weights * len(owners) / len(inputs)
        elif self.loss_type in SUM_OF_ROWS:
            by_row = by_row * len(owners) / len(inputs)
        batch["advantages"] = by_row
        return dict(batch)


# ---- AsyncGRPOTrainer


@dataclass(frozen=True, slots=True, eq=False)
class AsyncRow:
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


def async_rows(
    group_id: int, sessions: Sequence[Trajectory], *, version: int, normalise: bool = True
) -> list[AsyncRow]:
    """Return the rows of a group for TRL's asynchronous trainer; none if its rewards do not vary.

    `version` is that of tokens whose own is not recorded. `TrainingError` for images.
    """
    advantages, _ = trace_advantages(sessions, "grpo" if normalise else "dr_grpo")
    if not any(map(any, advantages)):
        return []
    known = [float(one.reward) for one in sessions if one.reward is not None]
    metrics = {"reward_std": float(np.std(known))}
    for one in sessions:
        refuse_images("TRL", one)
    return [
        _row(trace, own, group_id, {"reward": trace_reward(trace, session), **metrics}, version)
        for session, of in zip(sessions, advantages, strict=True)
        if session.reward is not None
        for trace, own in zip(session.traces, of, strict=True)
        if trace.loss_mask.any()
    ]


def _row(
    trace: Trace, advantage: float, group_id: int, metrics: dict[str, float], version: int
) -> AsyncRow:
    before = len(trace.prompt_ids)
    trained = trace.versions[(trace.loss_mask == 1) & (trace.versions >= 0)]
    return AsyncRow(
        prompt=list(trace.prompt_messages or ()),
        completion=list(trace.response_messages or ()),
        input_ids=trace.ids.astype(np.int64),
        completion_mask=np.pad(trace.loss_mask.astype(np.int64), (before, 0)),
        old_log_probs=np.pad(trace.response_logprobs.astype(np.float32), (before, 0)),
        advantage=advantage,
        model_version=int(trained.min()) if len(trained) else version,
        group_id=group_id,
        metrics=metrics,
        enqueued_at=time.time(),
    )


def _from_json(fields: Mapping[str, Any]) -> AsyncRow:
    arrays = {
        "input_ids": np.array(fields["input_ids"], np.int64),
        "completion_mask": np.array(fields["completion_mask"], np.int64),
        "old_log_probs": np.array(fields["old_log_probs"], np.float32),
    }
    return AsyncRow(**{**fields, **arrays})


class TrlAsyncRollouts:
    """TRL's `rollout_worker` and `weight_transfer` over tasks; its prompts are their ids."""

    def __init__(
        self,
        sessions: TrainedSessions,
        tasks: Sequence[Task],
        *,
        num_generations: int = 8,
        groups_at_once: int = 4,
        queue_rows: int = 256,
        normalise: bool = True,
        seed: int = 0,
    ) -> None:
        """Keep the settings; start nothing yet. `ConfigError` if two tasks have one id.

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
        self._tasks = TaskTable(tasks)
        self._size = num_generations
        self._threads = [
            threading.Thread(target=self._play, name=f"bridle-group-{n}", daemon=True)
            for n in range(groups_at_once)
        ]
        self._normalise = normalise
        self._draws: Iterator[tuple[int, Task]] = enumerate(_epochs(list(self._tasks), seed))
        self._lock = threading.Lock()
        self._putting = threading.Lock()
        """Held while the rows of one group are put in the queue, so that they stand together."""
        self._drawn = 0
        self._playing: set[int] = set()
        self._queued: dict[int, list[AsyncRow]] = {}
        """Rows that were put in the queue and are not trained, by group, in the queue's order."""
        self._begun: int | None = None
        """The group of which some rows are trained and others not."""
        self._restored: list[AsyncRow] = []
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._barren: list[Trajectory] = []
        self._barren_groups = 0
        self._sent = 0
        self.version = 0
        """Of the policy that samples; TRL counts from 1."""
        self.counts = AsyncCounts()
        self.rollout_buffer: queue.Queue[AsyncRow] = queue.Queue(maxsize=queue_rows)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()

    def rows(self) -> list[dict[str, str]]:
        """Return TRL's data set: one row per task, whose `prompt` is the task's id.

        TRL counts epochs by its length.
        """
        return [{"prompt": task.task_id} for task in self._tasks]

    # ---- TRL's rollout worker

    def start(self) -> None:
        """Start the threads that run sessions and queue their rows."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start no further group, and wait for those in progress, at most `STOP_S` seconds."""
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
        """Raise the error that ended the sessions' threads, if one did.

        `TrainingError` if several groups in a row gave nothing to train on. A session has time
        limits of its own, so one that takes long is no fault.
        """
        del stale_after_s
        if self._failure is not None:
            raise self._failure
        if self._barren_groups >= GIVE_UP:
            raise TrainingError(nothing_trains(self._barren_groups, self._barren))

    # ---- TRL's weight transfer

    def init_weight_transfer(self) -> None:
        """Do nothing: the engine needs no preparation to take weights."""

    def pause(self) -> None:
        """Do nothing: the gateway holds its calls while weights are loaded."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Load parameters into the engine, under the version that TRL will name next."""
        self._sent = self.version + 1
        self._sessions.update_weights(dict(iterator), self._sent)

    def resume(self) -> None:
        """Do nothing: the gateway continues the calls that it held by itself."""

    def destroy(self) -> None:
        """Do nothing: there is nothing to release."""

    # ---- checkpoints

    def trained(self, rows: Mapping[int, int]) -> None:
        """Record how many more rows of these groups are trained, in the queue's order."""
        with self._lock:
            order = list(self._queued)
            newest = max(order.index(number) for number in rows)
            del self._queued[order[newest]][: rows[order[newest]]]
            # Of the groups before it in the queue, TRL has trained or dropped every row.
            self._begun = order[newest] if self._queued[order[newest]] else None
            for number in order[: newest + (self._begun is None)]:
                del self._queued[number]

    def save(self, path: Path) -> None:
        """Write the groups that the trainer has not trained yet, as part of its checkpoint."""
        with self._lock:
            rest = [] if self._begun is None else self._queued[self._begun]
            state = {
                "version": self.version,
                "drawn": self._drawn,
                "again": sorted({*self._playing, *self._queued} - {self._begun}),
                "rows": [asdict(row) for row in rest],
            }
        path.write_text(json.dumps(state, default=lambda array: array.tolist()))

    @property
    def dealt_with(self) -> int:
        """Number of groups that were drawn and need no further training: trained, dropped or
        useless.
        """
        with self._lock:
            return self._drawn - len({*self._playing, *self._queued})

    def load(self, path: Path) -> None:
        """Restore the groups from a checkpoint; to be called before `start`.

        Groups that were not trained are run again; of one that was trained in part, the other rows
        are given out.
        """
        state = json.loads(path.read_text())
        draws = list(itertools.islice(self._draws, state["drawn"]))
        self._draws = itertools.chain((draws[number] for number in state["again"]), self._draws)
        self._drawn, self.version = state["drawn"], state["version"]
        self._playing = set(state["again"])
        self._restored = [_from_json(row) for row in state["rows"]]
        if self._restored:
            self._begun = self._restored[0].group_id
            self._queued[self._begun] = list(self._restored)

    # ---- groups

    def _play(self) -> None:
        try:
            while not self._stopping.is_set() and self._barren_groups < GIVE_UP:
                with self._lock:
                    restored, self._restored = self._restored, []
                if restored:
                    self._give(restored[0].group_id, restored)
                with self._lock:
                    number, task = next(self._draws)
                    self._drawn = max(self._drawn, number + 1)
                    self._playing.add(number)
                version = self.version
                played = self._sessions.play([task] * self._size)
                made = async_rows(number, played, version=version, normalise=self._normalise)
                self._count(played, made)
                self._give(number, made)
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's thread
            self._failure = error

    def _count(self, played: Sequence[Trajectory], made: Sequence[AsyncRow]) -> None:
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

    def _give(self, number: int, rows: Sequence[AsyncRow]) -> None:
        """Put the rows of a group in the queue, together."""
        with self._putting:
            with self._lock:
                self._playing.discard(number)
                if rows:
                    self._queued[number] = list(rows)
            for row in rows:
                self._put(row)

    def _put(self, row: AsyncRow) -> None:
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(row, timeout=0.2)
            except queue.Full:
                continue
            return


def _epochs(tasks: list[Task], seed: int) -> Iterator[Task]:
    """Yield all tasks once, in an order of the seed's, then again in another."""
    drawn = random.Random(seed)  # noqa: S311 - an order
    while tasks:
        yield from drawn.sample(tasks, len(tasks))


STATE = "bridle-rollouts.json"
"""Name of the file in a checkpoint."""


class _TrainedGroups(set[int]):
    """TRL's set of the groups that it has trained, which also has the rows of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: deque[Counter[int]] = deque()

    def update(self, *groups: Iterable[int]) -> None:
        """Add the groups of the rows of one micro-batch; TRL's collator calls it for each."""
        for of in map(list, groups):
            self.batches.append(Counter(of))
            super().update(of)


class EveryGroupOnce:
    """Mixin for `trl.experimental.async_grpo.AsyncGRPOTrainer` (1.16): resumes `TrlAsyncRollouts`.

    TRL's checkpoint has the place of TRL's own rollout worker alone. This one has what was not
    trained of another's groups; the collator is a micro-batch ahead of the training.
    """

    rollout_worker: TrlAsyncRollouts
    accelerator: Any
    args: Any
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - TRL's
        super().__init__(*args, **kwargs)
        self._trained_groups = _TrainedGroups()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - TRL's
        """Train on a micro-batch, and report its rows as trained."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self.accelerator.is_main_process:
            self.rollout_worker.trained(self._trained_groups.batches.popleft())
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - TRL's
        if self.accelerator.is_main_process:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            self.rollout_worker.save(folder / STATE)
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - TRL's
        checkpoint = kwargs.get("resume_from_checkpoint")
        if checkpoint and self.accelerator.is_main_process:
            self.rollout_worker.load(Path(checkpoint, STATE))
            self.model_version = self.rollout_worker.version
            self._groups_before_resume = self.rollout_worker.dealt_with
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
