"""Supervised training on token-exact examples."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.embedded.models import CONFIGS
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bridle.config import builtin_tokenizer_dir
from bridle.errors import EngineError, TrainingError
from bridle.training.sft import (
    SftSettings,
    TrainingSequence,
    _all_batches,
    read_examples,
    train,
    train_folder,
)


def model(seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def example(ids, mask=None) -> TrainingSequence:
    mask = [0, *([1] * (len(ids) - 1))] if mask is None else mask
    return TrainingSequence(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))


FAST = SftSettings(
    epochs=200, max_steps=150, learning_rate=1e-2, warmup_steps=5, batch_tokens=64, threads=1
)


def test_sft_learns_the_tokens_of_the_loss_mask():
    learner = model()
    examples = [example([2, 3, 4, 5], [0, 0, 1, 1]), example([2, 9, 10, 11], [0, 0, 1, 1])]

    result = train(learner, examples, FAST)

    with torch.no_grad():
        best = learner(torch.tensor([[2, 3, 4]])).logits[0].argmax(-1).tolist()
    assert result.losses[-1] < 0.1 < result.losses[0]
    assert best[1:] == [4, 5]
    assert not learner.training


def test_any_nonzero_loss_mask_value_trains():
    few = FAST.model_copy(update={"max_steps": 3})
    ours, theirs = (
        train(model(), [example([2, 3, 4, 5], mask)], few).losses
        for mask in ([0, 0, 1, 1], [0, 0, 255, 255])
    )
    assert ours == theirs


def test_sft_weights_are_determined_by_the_seed():
    examples = [example([2, 3, 4]), example([5, 6, 7, 8, 9, 10])]
    few = FAST.model_copy(update={"max_steps": 5, "batch_tokens": 6})
    one, two, apart = model(), model(), model()

    train(one, examples, few)
    train(two, examples, few)
    train(apart, examples, few.model_copy(update={"seed": 1}))

    first, second, other = (
        torch.cat([p.flatten() for p in m.parameters()]) for m in (one, two, apart)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "none of the 0"),
        ([example([1, 2], [0, 0])], "none of the 1"),
        ([example([1, 99])], "id 99 at position 1 is beyond"),
    ],
)
def test_sft_refuses_invalid_examples_before_the_first_step(examples, message):
    with pytest.raises(TrainingError, match=message):
        train(model(), examples, FAST)


def test_sft_with_share_prefix_gives_the_same_losses_and_weights():
    examples = [example([2, 3, 4, 5, i, i + 1], [0, 0, 0, 0, 0, 1]) for i in range(10, 40)]
    steps = {"max_steps": 4, "batch_tokens": 64, "learning_rate": 1e-3}
    plain, shared = model(), model()

    one = train(plain, examples, FAST.model_copy(update={**steps, "batch_tokens": 6 * 30}))
    other = train(
        shared,
        examples,
        FAST.model_copy(update={**steps, "batch_tokens": 4 + 2 * 30, "share_prefix": True}),
    )

    assert np.allclose(one.losses, other.losses, atol=1e-5)
    pairs = zip(plain.parameters(), shared.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-4


def test_sft_examples_without_a_common_prefix_train_alike_with_share_prefix():
    examples = [example([i, i + 1, i + 2]) for i in range(5, 15)]
    one = train(model(), examples, FAST.model_copy(update={"max_steps": 3}))
    other = train(model(), examples, FAST.model_copy(update={"max_steps": 3, "share_prefix": True}))
    assert one.losses == other.losses


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=60),
    st.integers(1, 100),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_every_sft_epoch_has_each_example_once_in_batches_within_batch_tokens(
    lengths, batch_tokens, epochs, seed
):
    ones: list[Any] = [SimpleNamespace(trace=SimpleNamespace(size=length)) for length in lengths]
    settings = SftSettings(epochs=epochs, batch_tokens=batch_tokens, seed=seed)
    batches = list(_all_batches(ones, 0, settings))
    seen = [i for batch in batches for i in batch]
    per_epoch = [seen[k : k + len(lengths)] for k in range(0, len(seen), len(lengths))]
    assert len(per_epoch) == epochs
    assert all(sorted(epoch) == list(range(len(lengths))) for epoch in per_epoch)
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= batch_tokens or len(batch) == 1


def test_sft_weighs_every_trained_token_equally_across_batches():
    """One short answer against two long ones: what is learned is one in three, not one in two."""
    short = [example([2, 3], [0, 1])] * 32
    long = [example([2, 4, *[5] * 20], [0, 1, *[1] * 20])] * 64
    learner = model()
    steps = {"max_steps": 300, "batch_tokens": 44, "learning_rate": 3e-3, "clip": 1e9}

    train(learner, [*short, *long], FAST.model_copy(update=steps))

    with torch.no_grad():
        chance = learner(torch.tensor([[2]])).logits[0, -1].softmax(-1)[3].item()
    assert 0.2 < chance < 0.45


def test_sft_cuts_long_examples_and_leaves_out_those_without_targets():
    examples = [
        example([2, 3, 4, 5, 99], [0, 1, 0, 0, 1]),
        example([2, 3, 4, 5, 99], [0, 0, 0, 0, 1]),
    ]
    result = train(model(), examples, FAST.model_copy(update={"max_length": 4, "max_steps": 2}))
    assert result.tokens == 2


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.5, 0.01), ("cosine", 0.5, 0.0)],
)
def test_the_sft_learning_rate_warms_up_and_then_follows_its_schedule(schedule, middle, last):
    settings = SftSettings(
        schedule=schedule, warmup_steps=4, epochs=104, learning_rate=1e-4, threads=1
    )
    rates = []
    reading = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"] / 1e-4)
    )
    try:
        train(model(), [example([2, 3])], settings)
    finally:
        reading.remove()
    assert len(rates) == 104
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[54] == pytest.approx(middle, abs=0.01)
    assert rates[-1] == pytest.approx(last, abs=0.01)


def test_sft_restores_torch_s_random_state_and_reports_every_step():
    learner, reply = model(), []
    before = torch.get_rng_state()

    train(
        learner, [example([2, 3])], FAST.model_copy(update={"max_steps": 3}), progress=reply.append
    )

    assert torch.equal(torch.get_rng_state(), before)
    assert [(d.step, d.steps, d.tokens) for d in reply] == [(1, 3, 1), (2, 3, 2), (3, 3, 3)]


@pytest.mark.parametrize(("asked", "used"), [(None, 1), (2, 2)])
def test_sft_of_a_very_small_model_uses_one_thread_by_default(asked, used):
    settings = FAST.model_copy(update={"max_steps": 1, "threads": asked})
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        train(
            model(), [example([2, 3])], settings,
            progress=lambda _: seen.append(torch.get_num_threads()),
        )  # fmt: skip
        assert (seen, torch.get_num_threads()) == ([used], 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mamba"])
def test_sft_lowers_the_loss_of_other_architectures(name):
    torch.manual_seed(0)
    learner = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    result = train(learner, [example([2, 3, 4, 5])], FAST.model_copy(update={"max_steps": 20}))
    assert result.losses[-1] < result.losses[0] / 2


def test_a_nan_sft_loss_raises_and_leaves_finite_weights():
    learner = model()
    wild = FAST.model_copy(update={"learning_rate": 1e30, "clip": 1e30, "warmup_steps": 0})

    with pytest.raises(
        TrainingError, match=r"not a number .* a learning rate below 1e\+30 may help"
    ):
        train(learner, [example([2, 3, 4, 5])], wild)

    assert all(torch.isfinite(p).all() for p in learner.parameters())


def test_sft_examples_are_read_from_json_lines_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1], "more": 1}) + "\n")
    [read] = read_examples(path)
    assert read.input_ids.tolist() == [1, 2]
    assert read.loss_mask.tolist() == [0, 1]

    for line in ("{", "[]", '{"input_ids": [1]}', '{"input_ids": [1], "loss_mask": [0, 1]}'):
        path.write_text(line + "\n")
        with pytest.raises(TrainingError, match="1"):
            read_examples(path)
    with pytest.raises(TrainingError, match=r"gone\.jsonl"):
        read_examples(tmp_path / "gone.jsonl")


def test_sft_examples_are_read_from_parquet_traces(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    columns = {"prompt_ids": [[1, 2]], "response_ids": [[3, 4]], "loss_mask": [[1, 0]]}
    pq.write_table(pa.table(columns), path)

    [read] = read_examples(path)

    assert read.input_ids.tolist() == [1, 2, 3, 4]
    assert read.loss_mask.tolist() == [0, 0, 1, 0]


def test_sft_of_a_model_folder_writes_another_folder_with_the_tokenizer(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    model().save_pretrained(before)
    tokenizer.save_pretrained(before)

    result = train_folder(
        before, [example([2, 3, 4])], after, FAST.model_copy(update={"max_steps": 3})
    )

    assert len(result.losses) == 3
    assert (after / "tokenizer.json").is_file()
    with pytest.raises(EngineError):
        train_folder(tmp_path / "gone", [example([2, 3])], after, FAST)


def test_a_failed_sft_of_a_folder_writes_the_last_good_weights(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    model().save_pretrained(before)
    transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir()).save_pretrained(
        before
    )
    wild = FAST.model_copy(update={"learning_rate": 1e30, "clip": 1e30, "warmup_steps": 0})

    with pytest.raises(TrainingError, match="not a number"):
        train_folder(before, [example([2, 3, 4, 5])], after, wild)

    kept = transformers.AutoModelForCausalLM.from_pretrained(after)
    assert all(torch.isfinite(p).all() for p in kept.parameters())
