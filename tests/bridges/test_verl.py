"""verl's shapes; with the real package in the suite `train`."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.bridges.by_hand import group, session, trace

from bridle.bridges.base import TaskTable, rows_of
from bridle.bridges.remote import ServerSessions
from bridle.bridges.verl import BridleAgentLoopManager, agent_loop_output, data_proto, scores_of
from bridle.config import Task, builtin_tokenizer_dir
from bridle.errors import ConfigError

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # verl, ray and tensordict warn about this and that

TASKS = [Task(task_id=name, instruction="go") for name in "ab"]


class Settings(dict):
    """As OmegaConf gives them."""

    __getattr__ = dict.__getitem__


def config(**custom):
    rollout = Settings(prompt_length=4, response_length=8, custom=custom)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))


class Player:
    def __init__(self, *sessions):
        self.sessions = list(sessions)
        self.asked = []

    def play(self, tasks):
        self.asked += [task.task_id for task in tasks]
        return [self.sessions.pop(0) for _ in tasks]


def test_missing_settings_are_named():
    with pytest.raises(ConfigError, match=r"custom\.bridle_server"):
        BridleAgentLoopManager.create(config(bridle_server="http://127.0.0.1:1"))


def test_a_manager_is_made_from_the_settings(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "instruction": "go"}\n')
    custom = {"bridle_server": "http://127.0.0.1:1", "bridle_tasks": str(tmp_path / "tasks.jsonl")}
    manager = BridleAgentLoopManager.create(config=config(**custom), llm_client=None)
    assert [task.task_id for task in manager._tasks] == ["a"]
    assert isinstance(manager._sessions, ServerSessions)
    manager._sessions.__exit__()


def test_token_rewards_stand_at_their_tokens_and_other_rewards_at_the_last():
    told = trace(token_rewards=np.array([0, 1, 0, 0, 0, 0, 2], np.float32))
    rows, _ = rows_of([group(session("s", 1.0, told, trace("t1", reward=0.5)))])
    assert [row.reward for row in rows] == [3.0, 0.5]
    assert scores_of(rows, 8).tolist() == [[0, 1, 0, 0, 0, 0, 2, 0], [0] * 6 + [0.5, 0]]


@pytest.mark.train
@pytest.mark.timeout(180)
def test_a_row_is_verls_agent_loop_output():
    (row, *_), _ = rows_of([group(session("s", 0.25, trace()))])
    told = agent_loop_output(row).as_dict()
    assert told["prompts"].tolist() == [1, 2, 3]
    assert told["responses"].tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert told["response_mask"].tolist() == [1, 1, 0, 0, 1, 1, 1]
    assert told["rollout_log_probs"].tolist() == [-0.5, -0.5, 0, 0, -0.5, -0.5, -0.5]
    assert told["rm_scores"].tolist() == [0] * 6 + [0.25]
    assert told["num_turns"] == 2
    assert told["extra_fields"]["min_global_steps"] == 3
    assert told["extra_fields"]["max_global_steps"] == 4


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_a_batch_is_the_one_that_verls_own_worker_makes():
    import torch
    from transformers import PreTrainedTokenizerFast
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    rows, _ = rows_of([group(session("s", 0.25, trace()), session("u", 1.0, trace()))])
    worker = object.__new__(AgentLoopWorker)  # without engines
    worker.rollout_config = SimpleNamespace(prompt_length=5, response_length=9)
    worker.tokenizer = PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    worker.processor = worker.reward_loop_worker_handles = None
    worker.distillation_enabled = False
    worker.mm_processor_kwargs = {}
    padded = [
        await worker._agent_loop_postprocess(agent_loop_output(row), False, raw_prompt="x")
        for row in rows
    ]
    wanted = worker._postprocess(padded)

    pad_id = worker.tokenizer.pad_token_id
    made = data_proto(rows, prompt_length=5, response_length=9, pad_id=pad_id)

    assert set(made.batch.keys()) == set(wanted.batch.keys())
    for name, tensor in wanted.batch.items():
        assert made.batch[name].dtype == tensor.dtype, name
        assert torch.equal(made.batch[name], tensor), name
    for name in ("__num_turns__", "min_global_steps", "max_global_steps"):
        assert made.non_tensor_batch[name].tolist() == wanted.non_tensor_batch[name].tolist()
    with pytest.raises(ValueError, match="do not fit"):
        data_proto(rows, prompt_length=2, response_length=9, pad_id=0)


@pytest.mark.train
@pytest.mark.timeout(180)
def test_the_manager_gives_one_row_per_row_of_the_batch_and_the_trainer_can_union_it():
    import torch
    from verl.protocol import DataProto

    names = ["a", "b", "a", "b"]
    given = {
        "extra_info": np.array([{"task_id": name} for name in names], dtype=object),
        "uid": np.array([f"u{name}" for name in names], dtype=object),
    }
    dummy = {"dummy_tensor": torch.zeros(4, 1)}
    prompts = DataProto.from_dict(tensors=dummy, non_tensors=given, meta_info={"global_steps": 7})
    player = Player(
        session("w", 1.0, trace()), session("x", 0.0, trace("long", prompt_ids=np.arange(5))),
        session("y", None, trace()), session("z", 1.0),
    )  # fmt: skip
    manager = BridleAgentLoopManager(config(), player, TaskTable(TASKS), 0)

    output = manager.generate_sequences(prompts)

    assert player.asked == names
    assert output.non_tensor_batch["session_id"].tolist() == ["w", "x", "y", "z"]
    assert output.batch["response_mask"].sum(-1).tolist() == [5, 0, 0, 0]
    assert output.batch["rm_scores"].sum(-1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert manager.counts.left_out == {"overlong": 1, "unknown": 1, "empty": 1}
    whole = prompts.union(output)
    assert len(whole) == 4
