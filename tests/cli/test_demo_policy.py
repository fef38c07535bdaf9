"""The demo's second part with a model that has learned nothing: all of it but the success."""

import io

import pytest
import torch
import transformers

from bridle.cli.demo_policy import policy_part, show_policy
from bridle.cli.output import console
from bridle.config import builtin_tokenizer_dir

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def untrained_model(tmp_path):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
        max_position_embeddings=1024, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        bos_token_id=None,
    )  # fmt: skip
    folder = tmp_path / "model"
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_every_session_is_accounted_for_and_the_rate_is_what_was_scored(untrained_model, tmp_path):
    part = policy_part(tmp_path / "policy", 3, untrained_model)
    written, before = io.StringIO(), console.file
    console.file = written
    try:
        rate = show_policy(part, untrained_model)
    finally:
        console.file = before

    assert len(part.sessions) == 3
    for line in part.sessions:
        assert line["status"] == "COMPLETED", line["error"]
        assert line["tokens_captured"] == line["tokens_trained"] + sum(
            line["tokens_excluded"].values()
        )
    assert rate == sum(line["reward"] for line in part.sessions) / 3
    assert "prefix_merging:" in written.getvalue()
    assert "per_request:" in written.getvalue()
