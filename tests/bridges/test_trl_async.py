"""Rows for TRL's asynchronous trainer from groups; and a real `AsyncGRPOTrainer` that learns."""

import queue
import threading
import time
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.training.made import session, trace

from bridle.bridges.local import LocalSessions
from bridle.bridges.trl import GIVE_UP, AsyncRow, TrlAsyncRollouts, async_rows
from bridle.config import Task
from bridle.errors import ConfigError, EngineError, TrainingError
from bridle.node.local import NodeSettings

TASKS = [Task(task_id=name, instruction="go") for name in "abc"]


class Players:
    """Plays groups of one kind, and notes what it is asked for."""

    def __init__(self, *group):
        self.group = group or (session(1.0, trace([1], [2])), session(0.0, trace([1], [3])))
        self.asked = []
        self.weights = []
        self.versions = []
        self.gate = threading.Event()
        self.gate.set()
        self.fault = None

    def play(self, tasks):
        self.asked.append([task.task_id for task in tasks])
        self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        return list(self.group)

    def update_weights(self, weights, version):
        self.weights.append((dict(weights), version))

    def set_version(self, version):
        self.versions.append(version)


@contextmanager
def playing(players, **settings):
    rollouts = TrlAsyncRollouts(players, TASKS, num_generations=2, **settings)
    rollouts.start()
    try:
        yield rollouts
    finally:
        players.gate.set()
        rollouts.stop()


def until(condition):
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_trained_trace_is_an_async_row_with_its_session_s_advantage():
    many = session(
        1.0,
        trace([1, 2], [3, 4, 5], [1, 0, 1], logprobs=[-1, 0, -2], version=[4, 0, 3]),
        trace([1], [9], version=5),
        trace([1], [8], [0]),
    )
    few, unknown = session(0.0, trace([1], [7], version=4)), session(None, trace([1], [6]))

    first, second, third = async_rows(11, [many, few, unknown], version=9)

    assert first.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.completion_mask.tolist() == [0, 0, 1, 0, 1]
    assert first.old_log_probs.tolist() == [0, 0, -1, 0, -2]
    assert [row.advantage for row in (first, second, third)] == [1.0, 1.0, -1.0]
    assert [row.model_version for row in (first, second, third)] == [3, 5, 4]
    assert {row.group_id for row in (first, second, third)} == {11}
    assert first.metrics == {"reward": 1.0, "reward_std": 0.5}
    assert first.enqueued_at is not None


def test_async_rows_of_traces_with_their_own_rewards_have_their_own_advantages():
    def played(helper):
        own = trace([1], [3], reward=helper, metadata={"kind": "subagent", "agent": "helper"})
        return session(1.0, trace([1], [2], metadata={"kind": "agent"}), own)

    rows = async_rows(0, [played(0.0), played(1.0)], version=3)
    assert [row.advantage for row in rows] == [0.0, -1.0, 0.0, 1.0]
    assert [row.metrics["reward"] for row in rows] == [1.0, 0.0, 1.0, 1.0]


def test_a_flat_group_has_no_rows_and_unknown_token_versions_default_to_the_group_s():
    one = session(1.0, trace([1], [2], version=-1))
    assert async_rows(0, [one, one], version=3) == []
    [row, _] = async_rows(0, [one, session(0.0, trace([1], [2], version=-1))], version=3)
    assert row.model_version == 3
    half = async_rows(0, [one, one, one, session(0.0, trace([1], [2]))], version=3, normalise=False)
    assert [row.advantage for row in half] == [0.25, 0.25, 0.25, -0.75]


def test_rollouts_run_while_the_trainer_reads_rows_with_each_task_once_per_epoch():
    players = Players()
    with playing(players, groups_at_once=1) as rollouts:
        rows = [rollouts.rollout_buffer.get(timeout=10) for _ in range(12)]
    assert [row.group_id for row in rows] == [n for n in range(6) for _ in range(2)]
    drawn = [one[0] for one in players.asked]
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["a", "b", "c"]
    assert all(one[0] == one[1] for one in players.asked)
    assert rollouts.metrics_queue.get_nowait() == {"rollout/reward": 0.5}
    assert rollouts.counts.sessions["COMPLETED"] == 2 * rollouts.counts.groups
    assert rollouts.rows() == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]


def test_a_checkpoint_gives_the_rest_of_a_group_and_plays_again_what_was_not_trained(tmp_path):
    path = tmp_path / "rollouts.json"
    with playing(Players(), groups_at_once=1, queue_rows=6) as rollouts:
        taken = [rollouts.rollout_buffer.get(timeout=10) for _ in range(4)]
        until(rollouts.rollout_buffer.full)
        rollouts.trained({0: 2, 1: 1})
        rollouts.save(path)
    again = TrlAsyncRollouts(Players(), TASKS, num_generations=2, groups_at_once=1)
    again.load(path)
    assert again.dealt_with == 1
    again.start()
    try:
        given = [again.rollout_buffer.get(timeout=10) for _ in range(5)]
    finally:
        again.stop()
    assert [row.group_id for row in taken] == [0, 0, 1, 1]
    assert [row.group_id for row in given] == [1, 2, 2, 3, 3]
    assert given[0].input_ids.tolist() == taken[3].input_ids.tolist()
    assert given[0].advantage == taken[3].advantage


def test_a_full_row_queue_pauses_rollouts_and_stop_ends_their_threads():
    players = Players()
    with playing(players, groups_at_once=2, queue_rows=3) as rollouts:
        until(rollouts.rollout_buffer.full)
        until(lambda: rollouts.counts.groups >= 3)
        assert rollouts.counts.groups <= 4
    assert not [one for one in threading.enumerate() if one.name.startswith("bridle-group")]
    assert rollouts.rollout_buffer.qsize() == 3


def test_transferred_weights_get_the_version_that_the_trainer_sets_next():
    players = Players()
    rollouts = TrlAsyncRollouts(players, TASKS)
    rollouts.init_weight_transfer()
    for step in (1, 2):
        rollouts.pause()
        rollouts.send_weights(iter([("w", step)]))
        rollouts.resume()
        rollouts.update_model_version(step)
    rollouts.destroy()
    assert players.weights == [({"w": 1}, 1), ({"w": 2}, 2)]
    assert (players.versions, rollouts.version) == ([], 2)


def test_the_policy_version_is_set_when_another_backend_transfers_the_weights():
    players = Players()
    rollouts = TrlAsyncRollouts(players, TASKS)
    rollouts.update_model_version(1)
    assert (players.versions, rollouts.version) == ([1], 1)


def test_a_rollout_failure_is_raised_by_the_trainer_s_health_check():
    players = Players()
    players.fault = EngineError("the engine is gone")
    with playing(players) as rollouts:

        def failed():
            try:
                rollouts.check_health(60)
            except EngineError as error:
                return "is gone" in str(error)
            return False

        until(failed)


@pytest.mark.parametrize(
    ("one", "result"),
    [
        (session(None, status="ERROR", error="no such program"), "ERROR.*no such program"),
        (session(0.0), "COMPLETED"),
    ],
)
def test_groups_without_rows_end_the_training_with_the_session_outcomes(one, result):
    players = Players(one, one)
    with playing(players) as rollouts:
        until(lambda: rollouts.counts.groups >= GIVE_UP)
        with pytest.raises(TrainingError, match=f"groups in a row .*{result}"):
            rollouts.check_health(60)
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get_nowait()


def test_groups_of_equal_full_reward_do_not_fail_the_health_check():
    players = Players(session(1.0, trace([1], [2])), session(1.0, trace([1], [2])))
    with playing(players) as rollouts:
        until(lambda: rollouts.counts.groups >= GIVE_UP + 4)
        rollouts.check_health(60)
        assert rollouts.counts.flat == rollouts.counts.groups


def test_async_rollouts_refuse_two_tasks_of_one_id():
    with pytest.raises(ConfigError, match="same task_id"):
        TrlAsyncRollouts(Players(), [*TASKS, *TASKS])


# ---- the real package


def tree_attention(module, query, key, value, attention_mask, **tree):
    """Compute as TRL's kernel does: each segment sees its own path from the root, and no other."""
    del attention_mask
    groups = module.num_key_value_groups
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    at, kept = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    sees = torch.full((query.shape[2], query.shape[2]), float("-inf"))
    for segment, (start, end) in enumerate(pairwise(at)):
        path = tree["tree_kv_index"][kept[segment] : kept[segment + 1]]
        for row in range(start, end):
            sees[row, path[: len(path) - (end - 1 - row)]] = 0
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees, scale=tree["scaling"]
    )
    return found.transpose(1, 2), None


@contextmanager
def without_a_gpu():
    """TRL asks a GPU for its name and takes its attention from a hub: both are given here."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    asked = async_grpo_trainer.get_peak_flops_per_device
    registered = async_grpo_trainer.register_tree_attention

    def register():
        registered()
        AttentionInterface.register(packing.TREE_ATTENTION, tree_attention)

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_grpo_trainer.register_tree_attention = register
    try:
        yield
    finally:
        async_grpo_trainer.get_peak_flops_per_device = asked
        async_grpo_trainer.register_tree_attention = registered


@pytest.mark.train
@pytest.mark.filterwarnings("default")  # trl and accelerate warn about this and that
def test_async_rows_have_the_fields_of_trl_s_samples_and_pass_its_collator():
    import accelerate
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        RolloutQueueDataset,
        TokenBudgetBatcher,
    )
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    accelerate.PartialState(cpu=True)
    assert [one.name for one in fields(AsyncRow)] == [one.name for one in fields(RolloutSample)]

    group = (
        session(1.0, trace([1, 2], [3, 4], version=2), trace([1, 2], [5], version=2)),
        session(0.0, trace([1, 2], [3, 6], version=0)),
    )
    sink = {name: [] for name in ("sample/dropped_stale_total", "batch/dropped_oversize_total")}
    metrics = _Sink(sink)
    with playing(Players(*group), groups_at_once=1) as rollouts:
        data = RolloutQueueDataset(
            rollouts.rollout_buffer, lambda: 3, rollouts.check_health, 60, metrics, max_staleness=2
        )
        rows = next(iter(TokenBudgetBatcher(data, 1, 9, metrics)))
    batch = DataCollatorForRollout(0, 1, metrics=metrics)([rows])

    assert metrics["sample/dropped_stale_total"]  # the session of version 0
    assert batch["input_ids"].shape[1] < 9  # the common beginning stands there once
    assert set(batch["advantages"].flatten().tolist()) == {1.0}
    wanted = torch.full_like(batch["old_log_probs"], -1.0)
    assert torch.equal(batch["old_log_probs"], wanted)


class _Sink(dict):
    """The trainer's metric sink: a list for every name."""

    def __missing__(self, name):
        self[name] = []
        return self[name]


@pytest.mark.train
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # trl and accelerate warn about this and that
def test_a_real_async_grpo_trainer_learns_through_a_harness(tmp_path, one_thread):
    from examples.demo.lookups import lookups
    from examples.demo.model import demo_model
    from examples.demo.policy import lookup_task
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from datasets import Dataset

    steps, groups, samples = 18, 8, 8
    tasks = [lookup_task(one, tmp_path / "files") for one in lookups(400, seed=30_000)]
    model = demo_model()
    config = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=groups * samples,
        token_budget=0,
        num_generations=samples,
        max_steps=steps,
        max_staleness=2,
        learning_rate=4e-4,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=0,
    )
    node = NodeSettings(run_slots=16, keep_logs="failed")
    with LocalSessions(f"embedded:{model}", tmp_path / "run", node=node) as sessions:
        rollouts = TrlAsyncRollouts(
            sessions, tasks, num_generations=samples, groups_at_once=2, queue_rows=64
        )
        with without_a_gpu():
            learning = AsyncGRPOTrainer(
                model=str(model),
                args=config,
                train_dataset=Dataset.from_list(rollouts.rows()),
                rollout_worker=rollouts,
                weight_transfer=rollouts,
            )
            learning.train()

    result = [one for one in learning.state.log_history if "loss" in one]
    assert len(result) == steps
    assert rollouts.version == steps + 1
    assert all(abs(one["ratio"] - 1) < 0.2 for one in result)
    rewards = [one["rollout/reward"] for one in result if one.get("rollout/reward") is not None]
    first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert last > first + 0.05, rewards
