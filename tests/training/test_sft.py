"""Supervised training on token-exact examples."""

import json

import numpy as np
import pytest
import torch
import transformers

from bridle.config import builtin_tokenizer_dir
from bridle.errors import EngineError, TrainingError
from bridle.training.sft import Example, SftSettings, read_examples, train, train_folder


def model(seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def example(ids, mask=None) -> Example:
    mask = [0, *([1] * (len(ids) - 1))] if mask is None else mask
    return Example(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))


FAST = SftSettings(
    epochs=200, max_steps=150, learning_rate=1e-2, warmup_steps=5, batch_tokens=64, threads=1
)


def test_it_learns_what_trains_and_nothing_else():
    learner = model()
    examples = [example([2, 3, 4, 5], [0, 0, 1, 1]), example([2, 9, 10, 11], [0, 0, 1, 1])]

    result = train(learner, examples, FAST)

    with torch.no_grad():
        best = learner(torch.tensor([[2, 3, 4]])).logits[0].argmax(-1).tolist()
    assert result.losses[-1] < 0.1 < result.losses[0]
    assert best[1:] == [4, 5]
    assert not learner.training


def test_the_same_seed_gives_the_same_weights_and_padding_changes_nothing():
    examples = [example([2, 3, 4]), example([5, 6, 7, 8, 9, 10])]
    few = FAST.model_copy(update={"max_steps": 5})
    one, two, apart = model(), model(), model()

    train(one, examples, few)
    train(two, examples, few)
    train(apart, examples, few.model_copy(update={"seed": 1}))

    first, second, other = (
        torch.cat([p.flatten() for p in m.parameters()]) for m in (one, two, apart)
    )
    assert torch.equal(first, second)
    assert first.shape == other.shape


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "none of 0"),
        ([example([1, 2], [0, 0])], "none of 1"),
        ([example([1, 99])], "id 99 at position 1 is beyond"),
    ],
)
def test_what_cannot_be_trained_on_is_named_before_the_first_step(examples, message):
    with pytest.raises(TrainingError, match=message):
        train(model(), examples, FAST)


def test_a_loss_that_is_not_a_number_ends_it_with_the_last_good_weights():
    learner = model()
    wild = FAST.model_copy(update={"learning_rate": 1e30, "clip": 1e30, "warmup_steps": 0})

    with pytest.raises(TrainingError):
        train(learner, [example([2, 3, 4, 5])], wild)

    assert all(torch.isfinite(p).all() for p in learner.parameters())


def test_examples_are_read_from_lines_and_a_bad_one_is_named(tmp_path):
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


def test_traces_of_a_run_are_examples_too(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    columns = {"prompt_ids": [[1, 2]], "response_ids": [[3, 4]], "loss_mask": [[1, 0]]}
    pq.write_table(pa.table(columns), path)

    [read] = read_examples(path)

    assert read.input_ids.tolist() == [1, 2, 3, 4]
    assert read.loss_mask.tolist() == [0, 0, 1, 0]


def test_a_folder_is_trained_into_another_with_its_tokenizer(tmp_path):
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
