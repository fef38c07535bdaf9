"""The demo model's recipe, with few steps; whole it is run by `make demo`."""

import json

import pytest
import torch
import transformers
from examples.demo.recipe import SHORT, WHOLE, make_demo_model, recipe_digest

from bridle.errors import TrainingError
from bridle.training.sft import SftSettings


@pytest.fixture
def examples(tmp_path):
    """Examples with a common beginning of 5 ids that do not train."""
    path = tmp_path / "examples.jsonl"
    lines = [
        {
            "input_ids": [1, 2, 3, 4, 5, 100 + i, 7, 8, 2024],
            "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1, 1],
        }
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def few(settings: SftSettings) -> SftSettings:
    return settings.model_copy(update={"max_steps": 12, "warmup_steps": 1})


def test_the_demo_model_folder_has_weights_tokenizer_template_and_end_token(examples, tmp_path):
    result = []

    folder = make_demo_model(
        examples,
        tmp_path / "model",
        lambda name, done: result.append((name, done.step)),
        short=few(SHORT),
        whole=few(WHOLE),
    )

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert 0.6e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert result[-1] == ("as it is", 12)
    assert not list(tmp_path.glob("*.part"))


def test_the_demo_model_s_weights_do_not_depend_on_the_order_of_examples(examples, tmp_path):
    weights = []
    for name in ("a", "b"):
        lines = examples.read_text().splitlines(keepends=True)
        examples.write_text("".join(reversed(lines)))
        folder = make_demo_model(examples, tmp_path / name, short=few(SHORT), whole=few(WHOLE))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))

    assert torch.equal(*weights)


def test_invalid_examples_leave_no_demo_model_folder(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"input_ids": [1, 2, 99_999, 3], "loss_mask": [0, 0, 1, 1]}) + "\n")

    with pytest.raises(TrainingError, match="99999"):
        make_demo_model(bad, tmp_path / "model", short=few(SHORT), whole=few(WHOLE))

    assert not (tmp_path / "model").exists()


def test_the_recipe_digest_is_12_stable_alphanumeric_characters():
    assert recipe_digest() == recipe_digest()
    assert len(recipe_digest()) == 12
    assert recipe_digest().isalnum()
