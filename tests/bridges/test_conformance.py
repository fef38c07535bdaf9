"""Each bridge trains exactly the tokens that it should, read out of its trainer's own tensors."""

import dataclasses

import numpy as np
import pytest
from tests.bridges.absent import absent, bare
from tests.bridges.samples import Sample

from bridle.bridges.base import rows_of
from bridle.bridges.nemo import response_of, train_batch
from bridle.bridges.slime import samples_of
from bridle.bridges.traces import openenv_trace, verifiers_trace
from bridle.bridges.trl import EveryTrace, TrlRollouts, async_rows, session_reward
from bridle.config import Task
from bridle.errors import TrainingError
from bridle.testing import TrainedRow, trainer_conformance, trainer_sessions

pytestmark = pytest.mark.filterwarnings("ignore")  # trainers warn about this and that

SMALLER = {"branches": 2, "compaction": 3, "subagents": 4}
"""Tokens in the traces that a trainer with one sequence per session cannot take."""


def sessions_of(groups):
    return [one for group in groups for one in group.sessions]


def scored(groups):
    return [one for one in sessions_of(groups) if one.reward is not None]


def padded(row, values):
    return [*([0] * len(row.prompt_ids)), *values.tolist()]


def our_rows(groups):
    for row in rows_of(groups)[0]:
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        yield TrainedRow(
            row.session.session_id, ids, padded(row, row.mask), padded(row, row.logprobs),
            padded(row, row.versions), row.weight,
        )  # fmt: skip


def test_rows_train_every_token_once_and_account_for_excluded_tokens():
    groups = trainer_sessions()
    result = trainer_conformance(groups, our_rows(groups))
    result.check()
    assert (result.captured, result.trained) == (78, 64)
    assert result.excluded == {"cut": 2, "broken": 3, "rejected": 2, "unknown": 7}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"mask": [1] * 12}, "extra"),
        ({"mask": [0] * 12}, "missing"),
        ({"input_ids": [9] * 12}, "extra"),
        ({"logprobs": [-9.0] * 12}, "wrong"),
        ({"logprobs": [float("nan")] * 12}, "wrong"),
        ({"weight": float("nan")}, "wrong"),
        ({"versions": [9] * 12}, "wrong"),
        ({"weight": 0.5}, "wrong"),
    ],
)
def test_trainer_conformance_finds_a_row_with_one_wrong_field(changes, fault):
    groups = trainer_sessions()
    first, *others = our_rows(groups)
    result = trainer_conformance(groups, [dataclasses.replace(first, **changes), *others])
    assert getattr(result, fault)
    with pytest.raises(AssertionError):
        result.check()


def test_trainer_conformance_finds_tokens_that_train_twice():
    groups = trainer_sessions()
    rows = [*our_rows(groups)]
    result = trainer_conformance(groups, [*rows, dataclasses.replace(rows[0], weight=None)])
    assert result.extra == {"plain": 7}


def test_slime_and_miles_samples_train_every_token():
    seen = trainer_sessions()
    groups = without_images(seen)
    templates = [[Sample(group_index=n, index=4 * n + m) for m in range(4)] for n in range(3)]
    with pytest.raises(TrainingError, match="images, whose pixels slime would not get"):
        samples_of(seen, templates)
    rows = []
    for sample in (one for of in samples_of(groups, templates)[0] for many in of for one in many):
        sample.validate()
        pad = [0] * (len(sample.tokens) - sample.response_length)
        mask, logprobs = [*pad, *sample.loss_mask], [*pad, *sample.rollout_log_probs]
        assert sample.remove_sample == (not any(mask))
        rows.append(TrainedRow(sample.metadata["session_id"], sample.tokens, mask, logprobs))
    trainer_conformance(groups, rows).check()


def without_images(groups):
    """The same sessions with no picture behind their tokens."""
    return [
        dataclasses.replace(group, sessions=tuple(
            dataclasses.replace(one, traces=tuple(
                dataclasses.replace(trace, media=()) for trace in one.traces))
            for one in group.sessions))
        for group in groups
    ]  # fmt: skip


class Groups:
    """Plays the groups that it was given once; a task is a group's."""

    def __init__(self, groups):
        self.waiting = {group.task_id: iter(group.sessions) for group in groups}
        self.played = []

    def play(self, tasks):
        self.played += [next(self.waiting[task.task_id]) for task in tasks]
        return self.played

    def update_weights(self, weights, version):
        pass

    def set_version(self, version):
        pass


class Noting(EveryTrace):
    """Notes what the loss is computed on, and whose session each row is."""

    seen: list

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"owner": batch["advantages"].new_tensor(self.rollout_func.owners).int()}

    def _compute_loss(self, model, inputs):
        self.seen.append({name: of.clone() for name, of in inputs.items() if of.ndim})
        return super()._compute_loss(model, inputs)  # type: ignore[misc]


@pytest.mark.train
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("loss_type", "steps"), [("grpo", 1), ("grpo", 3), ("dapo", 1)])
def test_trl_s_loss_includes_every_token_of_every_trace(tmp_path, loss_type, steps):
    from tests.training.made import tiny_model
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from bridle.config import builtin_tokenizer_dir
    from datasets import Dataset

    tokenizer = PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))

    groups = without_images(trainer_sessions())
    player = Groups(groups)
    tasks = [Task(task_id=group.task_id, instruction="go") for group in groups]
    rollouts = TrlRollouts(player, tasks)
    seen: list = []
    type("Trainer", (Noting, GRPOTrainer), {"seen": seen})(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=12 // steps, num_generations=4,
            gradient_accumulation_steps=steps, max_steps=1, loss_type=loss_type, beta=0.0,
            scale_rewards="none", learning_rate=0.0, bf16=False, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
            shuffle_dataset=False, log_completions=True,
        ),
        train_dataset=Dataset.from_list(rollouts.rows()),
        reward_funcs=session_reward,
        rollout_func=rollouts,
    ).train()  # fmt: skip
    means = {one.session_id: group.mean for group in groups for one in group.sessions}
    (size,) = {len(batch["owner"]) for batch in seen}
    rows = []
    for batch, at in ((batch, at) for batch in seen for at in range(size)):
        session = player.played[batch["owner"][at]]
        given, kept = batch["prompt_mask"][at].bool(), batch["completion_mask"][at].bool()
        ids = [
            *batch["prompt_ids"][at][given].tolist(),
            *batch["completion_ids"][at][kept].tolist(),
        ]
        pad = [0] * int(given.sum())
        mask = [*pad, *batch["tool_mask"][at][kept].tolist()]
        logprobs = [*pad, *batch["sampling_per_token_logps"][at][kept].tolist()]
        weight = None
        if any(mask):  # TRL averages rows: a session's advantage is shared out among its own
            share = batch["advantages"][at].item() / (session.reward - means[session.session_id])
            weight = share * 12 / (size * steps) if loss_type == "grpo" else None
            assert loss_type == "grpo" or share == pytest.approx(1)
        rows.append(TrainedRow(session.session_id, ids, mask, logprobs, weight=weight))
    trainer_conformance(groups, rows).check()


def test_trl_s_asynchronous_samples_train_every_token():
    groups = without_images(trainer_sessions())
    rows = []
    for group in groups:
        for session in group.sessions:
            # A sample names its group alone, so each session is compared with one of reward 9.
            other = dataclasses.replace(session, reward=9.0, traces=())
            rows += [
                TrainedRow(session.session_id, row.input_ids.tolist(), row.completion_mask.tolist(),
                           row.old_log_probs.tolist())
                for row in async_rows(0, [session, other], version=4)
            ]  # fmt: skip
    trainer_conformance(groups, rows).check()


@pytest.mark.parametrize("token_level", [True, False])
def test_nemo_rl_s_batch_trains_every_token_of_every_trace(token_level):
    groups = without_images(trainer_sessions())
    batch, own = train_batch(groups, pad_id=0, token_level_loss=token_level, rows_multiple=8)
    rows = []
    for at, row in enumerate(own):
        length, weight = int(batch["input_lengths"][at]), float(batch["sample_mask"][at])
        mask, ids, logprobs = (
            batch[name][at, :length].tolist()
            for name in ("token_mask", "input_ids", "generation_logprobs")
        )
        weight *= sum(mask) if token_level else 1
        rows.append(TrainedRow(row.session.session_id, ids, mask, logprobs, weight=weight))
    trainer_conformance(groups, rows).check()


def test_nemo_gym_s_response_trains_every_call_of_the_largest_trace():
    groups = without_images(trainer_sessions())
    rows = []
    for session in scored(groups):
        for item in response_of(session)["output"]:
            if "generation_token_ids" in item:
                given, ids = item["prompt_token_ids"], item["generation_token_ids"]
                pad = [0] * len(given)
                mask, logprobs = [*pad, *([1] * len(ids))], [*pad, *item["generation_log_probs"]]
                rows.append(TrainedRow(session.session_id, [*given, *ids], mask, logprobs))
    trainer_conformance(groups, rows).check(missing=SMALLER)


@pytest.mark.train
@pytest.mark.timeout(180)
def test_branches_of_the_verifiers_package_train_every_token():
    groups = trainer_sessions()
    rows = []
    with absent("prime_sandboxes", "tomli_w", "math_verify"):
        for session in scored(groups):
            for branch in verifiers_trace(session).branches:
                mask = branch.sampled_mask
                rows.append(TrainedRow(session.session_id, branch.token_ids, mask, branch.logprobs))
    trainer_conformance(groups, rows).check()


@pytest.mark.train
@pytest.mark.timeout(180)
def test_openenv_s_training_trace_trains_every_token():
    groups = trainer_sessions()
    harness = "openenv.core.harness"
    rows = []
    with bare("openenv", "openenv.core", harness, f"{harness}.capture"):
        for session in scored(groups):
            for turn in openenv_trace(session).turns:
                given = len(turn.prompt_token_ids)
                ids = [*turn.prompt_token_ids, *turn.completion_token_ids]
                logprobs = np.pad(turn.per_token_logps, (given, 0)).tolist()
                rows.append(TrainedRow(session.session_id, ids, turn.loss_mask, logprobs))
    trainer_conformance(groups, rows).check()
