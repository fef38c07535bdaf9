"""A model that has learned nothing, in a folder."""

import torch
import transformers

from bridle.config import builtin_tokenizer_dir


def untrained(folder):
    """A Qwen3 of a few hundred thousand parameters on the builtin tokenizer."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
        max_position_embeddings=1024, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
