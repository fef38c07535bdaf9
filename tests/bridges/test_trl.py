"""Rows for TRL from sessions; and a real `GRPOTrainer` that learns through a harness."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.training.made import session, trace

from bridle.bridges.local import LocalSessions
from bridle.bridges.trl import Counts, TrlRollouts, session_reward
from bridle.config import Task
from bridle.errors import ConfigError
from bridle.lifecycle.manager import NodeSettings


class Player:
    """Gives prepared sessions, and notes what it is asked for."""

    def __init__(self, *sessions):
        self.sessions = list(sessions)
        self.asked = []
        self.weights = []

    def play(self, tasks):
        self.asked.append([task.task_id for task in tasks])
        return [self.sessions.pop(0) for _ in tasks]

    def update_weights(self, weights, version):
        self.weights.append((weights, version))


def trainer(step):
    model = SimpleNamespace(state_dict=lambda: {"of": step})
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step),
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda given: given),
    )


TASKS = [Task(task_id=name, instruction="go") for name in "ab"]


def test_a_session_is_a_row_of_its_largest_trace():
    small, large = trace([1], [9]), trace([1, 2], [3, 4, 5], [1, 0, 1], logprobs=[-1, 0, -2])
    rollouts = TrlRollouts(Player(session(1.0, small, large)), TASKS)

    rows = rollouts(["a"], trainer(0))

    assert rows == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3, 4, 5]],
        "logprobs": [[-1.0, 0.0, -2.0]],
        "env_mask": [[1, 0, 1]],
        "session_reward": [1.0],
    }
    assert rollouts.counts == Counts(sessions=1, with_more=1, tokens_left=1)


def test_the_reward_of_the_largest_trace_is_its_own_where_it_has_one():
    small, large = trace([1], [9]), trace([1], [3, 4], reward=0.25)
    rows = TrlRollouts(Player(session(1.0, small, large)), TASKS)(["a"], trainer(0))
    assert rows["session_reward"] == [0.25]


def test_a_session_that_cannot_train_is_a_row_that_does_not():
    unknown, nothing = session(None, trace([1], [2, 3])), session(0.0)
    rollouts = TrlRollouts(Player(unknown, nothing), TASKS)

    rows = rollouts(["a", "b"], trainer(0))

    assert rows["env_mask"] == [[0, 0], [0]]
    assert rows["session_reward"] == [None, None]
    assert len(rows["prompt_ids"][1]) == len(rows["completion_ids"][1]) == 1
    assert rollouts.counts.without_trace == 1


def test_rows_come_in_the_order_of_the_prompts_one_for_each():
    sessions = [session(float(n), trace([1], [n])) for n in range(3)]
    player = Player(*sessions)
    rows = TrlRollouts(player, TASKS)(["b", "a", "b"], trainer(0))
    assert player.asked == [["b", "a", "b"]]
    assert rows["completion_ids"] == [[0], [1], [2]]


def test_weights_are_published_when_they_have_changed():
    player = Player(*[session(1.0, trace([1], [2]))] * 3)
    rollouts = TrlRollouts(player, TASKS)
    for step in (0, 0, 1):
        rollouts(["a"], trainer(step))
    assert player.weights == [({"of": 0}, 0), ({"of": 1}, 1)]


def test_a_reward_function_repeats_what_the_evaluator_said():
    assert session_reward(["a"], ["b"], session_reward=[np.float32(0.5), None]) == [0.5, None]


def test_the_data_set_names_tasks_and_two_of_one_id_are_refused():
    assert TrlRollouts(Player(), TASKS).rows() == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ConfigError, match="one task_id"):
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
        learning = GRPOTrainer(
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
