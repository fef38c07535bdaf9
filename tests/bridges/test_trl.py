"""Rows for TRL from sessions; and a real `GRPOTrainer` that learns through a harness."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.bridges.by_hand import Player
from tests.training.made import session, trace

from bridle.bridges.base import RowCounts
from bridle.bridges.local import LocalSessions
from bridle.bridges.trl import EveryTrace, TrlRollouts, async_rows, session_reward
from bridle.config import Task
from bridle.errors import ConfigError, TrainingError
from bridle.node.local import NodeSettings


class Trainer(EveryTrace):
    """The attributes of a trainer that are read, in one process."""

    def __init__(self, step=0, steps_per_generation=1):
        self.state = SimpleNamespace(global_step=step)
        self.model = SimpleNamespace(state_dict=lambda: {"of": step}, training=True)
        self.accelerator = SimpleNamespace(unwrap_model=lambda given: given, num_processes=1)
        self.args = SimpleNamespace(steps_per_generation=steps_per_generation)


TASKS = [Task(task_id=name, instruction="go") for name in "ab"]


def test_every_trace_is_a_trl_row_and_first_traces_of_sessions_precede_others():
    first, second = trace([1, 2], [3, 4, 5], [1, 0, 1], logprobs=[-1, 0, -2]), trace([1], [9])
    other = session(0.0, trace([1], [7]))
    rollouts = TrlRollouts(Player(session(1.0, first, second), other), TASKS)

    rows = rollouts(["a", "b"], Trainer())

    assert rows == {
        "prompt_ids": [[1, 2], [1], [1]],
        "completion_ids": [[3, 4, 5], [7], [9]],
        "logprobs": [[-1.0, 0.0, -2.0], [-1.0], [-1.0]],
        "env_mask": [[1, 0, 1], [1], [1]],
        "session_reward": [1.0, 0.0],
    }
    assert rollouts.owners == [0, 1, 0]
    assert rollouts.weights == pytest.approx([2 / 3, 1, 1 / 3])
    assert rollouts.counts == RowCounts(sessions=2, rows=3, tokens=4)


def test_masked_rows_pad_a_batch_to_trl_s_steps_per_generation():
    session_of_three = session(1.0, trace([1], [2]), trace([1], [3]), trace([1], [4]))
    rollouts = TrlRollouts(Player(session_of_three), TASKS)
    rows = rollouts(["a"], Trainer(steps_per_generation=2))
    assert rows["env_mask"] == [[1], [1], [1], [0]]
    assert rollouts.weights[-1] == 0


def test_a_session_without_a_reward_or_traces_is_a_masked_trl_row():
    unknown, nothing = session(None, trace([1], [2, 3])), session(0.0)
    rollouts = TrlRollouts(Player(unknown, nothing), TASKS)

    rows = rollouts(["a", "b"], Trainer())

    assert rows["env_mask"] == [[0, 0], [0]]
    assert rows["session_reward"] == [None, 0.0]
    assert len(rows["prompt_ids"][1]) == len(rows["completion_ids"][1]) == 1
    assert rollouts.counts.left_out == {"unknown": 1, "empty": 1}


def test_a_trl_trainer_of_one_row_per_prompt_and_images_are_refused():
    seen = session(1.0, trace([1], [2], media=({"digest": "0" * 64},)))
    other = session(0.0, trace([1], [2]))
    rollouts = TrlRollouts(Player(seen), TASKS)
    with pytest.raises(
        ConfigError, match=r"Plain trains one row per prompt, .*: use `class Trainer"
    ):
        rollouts(["a"], type("Plain", (), {})())
    for bring in (
        lambda: rollouts(["a"], Trainer()),
        lambda: async_rows(0, [seen, other], version=1),
    ):
        with pytest.raises(TrainingError, match="images, whose pixels TRL would not get"):
            bring()


class Computed:
    """In place of TRL's trainer: one advantage per session."""

    def _generate_and_score_completions(self, inputs):
        return {"advantages": torch.tensor([1.0, -1.0])}


class Scoring(EveryTrace, Computed):
    def __init__(self, loss_type):
        self.loss_type = loss_type
        # Two traces of the first session, one of the second, and one that fills up the batch.
        self.rollout_func = TrlRollouts(Player(), TASKS)
        self.rollout_func.owners = [0, 1, 0, 0]
        self.rollout_func.weights = [0.75, 1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("loss_type", "advantages"),
    [
        # Mean of rows: 4 rows of 2 sessions, and each session weighs 1.
        ("grpo", [1.5, -2.0, 0.5, 0.0]),
        ("sapo", [1.5, -2.0, 0.5, 0.0]),
        # Sum of a row's tokens over the number of rows: of sessions.
        ("dr_grpo", [2.0, -2.0, 2.0, 2.0]),
        ("luspo", [2.0, -2.0, 2.0, 2.0]),
        # Mean of all tokens.
        ("dapo", [1.0, -1.0, 1.0, 1.0]),
    ],
)
def test_a_trl_row_has_the_advantage_of_its_session_as_the_loss_weighs_rows(loss_type, advantages):
    batch = Scoring(loss_type)._generate_and_score_completions([{}, {}])
    assert batch["advantages"].tolist() == advantages


def test_trl_rows_have_the_order_of_the_prompts():
    sessions = [session(float(n), trace([1], [n])) for n in range(3)]
    player = Player(*sessions)
    rows = TrlRollouts(player, TASKS)(["b", "a", "b"], Trainer())
    assert player.asked == [["b", "a", "b"]]
    assert rows["completion_ids"] == [[0], [1], [2]]


def test_weights_are_published_to_engines_once_per_trl_step():
    player = Player(*[session(1.0, trace([1], [2]))] * 3)
    rollouts = TrlRollouts(player, TASKS)
    for step in (0, 0, 1):
        rollouts(["a"], Trainer(step))
    assert player.weights == [({"of": 0}, 0), ({"of": 1}, 1)]


def test_the_trl_reward_function_returns_the_evaluator_s_rewards():
    assert session_reward(["a"], ["b"], session_reward=[np.float32(0.5), None]) == [0.5, None]


def test_the_trl_data_set_lists_task_ids_and_refuses_duplicates():
    assert TrlRollouts(Player(), TASKS).rows() == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ConfigError, match="same task_id"):
        TrlRollouts(Player(), [*TASKS, *TASKS])


@pytest.mark.train
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("default")  # trl and accelerate warn about this and that
def test_a_real_grpo_trainer_learns_through_a_harness(tmp_path, one_thread):
    from examples.demo.lookups import lookups
    from examples.demo.model import demo_model
    from examples.demo.policy import lookup_task
    from trl import GRPOConfig, GRPOTrainer

    from datasets import Dataset

    steps, groups, samples = 18, 8, 8
    tasks = [lookup_task(one, tmp_path / "files") for one in lookups(steps * groups, seed=30_000)]
    model = demo_model()
    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=groups * samples,
        num_generations=samples,
        max_steps=steps,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        beta=0.0,
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
        rollouts = TrlRollouts(sessions, tasks)
        learning = type("Trainer", (EveryTrace, GRPOTrainer), {})(
            model=str(model),
            args=config,
            train_dataset=Dataset.from_list(rollouts.rows()),
            reward_funcs=session_reward,
            rollout_func=rollouts,
        )
        learning.train()

    rewards = [one["reward"] for one in learning.state.log_history if "reward" in one]
    assert len(rewards) == steps
    assert rollouts.counts.sessions == steps * groups * samples
    first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert last > first + 0.05, rewards
