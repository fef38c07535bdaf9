"""The demo model: a small Qwen3 that Bridle makes itself, from demonstrations and nothing else.

Supervised on the token-exact examples of a weak demonstrator, in two steps: first without what all
of them begin with (the tool's schema, which is most of the tokens and none of the task), then as
they are. The same examples, in whatever order they were collected, give the same model on the same
machine.
"""

from __future__ import annotations

import hashlib
import inspect
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridle.config import builtin_tokenizer_dir
from bridle.training import forward, sft
from bridle.training.sft import SftProgress, SftSettings, TrainingSequence, read_examples, train

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

SEED = 0

SHORT = SftSettings(
    epochs=100,
    max_steps=400,
    batch_tokens=1024,
    learning_rate=1.5e-3,
    seed=SEED,
    threads=1,
)
"""Without the common beginning: about 50 tokens an example, 0.06 s a step on one core.

It cannot be left out: the same time spent on whole examples alone gives a model that reads the
right file half as often."""

WHOLE = SftSettings(
    epochs=100,
    max_steps=300,
    batch_tokens=1024,
    share_prefix=True,
    learning_rate=1e-3,
    seed=SEED,
    threads=1,
)
"""As they are: about 220 tokens an example, 176 of them computed once a batch; 0.08 s a step.

Both together take 49 s on one core. With seeds 0, 1, 2 the model then succeeds in 14 to 17 % of
1,024 fresh tasks at temperature 1 (the demonstrator: 15 %), calls a file in 69 %, and answers what
it has read in all; at most 0.3 % of its answers are malformed. At temperature 0 it succeeds in
84 to 87 %: the right file is its likeliest choice, but seldom its choice."""


def recipe_digest() -> str:
    """Changes whenever another model would come out: the recipe, its code, torch, the tokenizer."""
    parts = [
        inspect.getsource(forward),
        inspect.getsource(sft),
        inspect.getsource(sys.modules[__name__]),
        torch.__version__,
        (builtin_tokenizer_dir() / "tokenizer.json").read_text(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def make_demo_model(
    examples: Path,
    folder: Path,
    report: Callable[[str, SftProgress], None] = lambda *_: None,
    *,
    short: SftSettings = SHORT,
    whole: SftSettings = WHOLE,
) -> Path:
    """Train the model on `examples` (`bridle export --format sft`) and write it to `folder`.

    `folder` appears whole or not at all. `report` is called with the step's name and its progress.
    Raises `TrainingError` for examples that cannot be used.
    """
    import transformers

    given = sorted(read_examples(examples), key=lambda example: example.input_ids.tobytes())
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
    end_id = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    model = _untrained(len(tokenizer), end_id, int(tokenizer.pad_token_id))
    start = _common_beginning(given)
    cut = [TrainingSequence(e.input_ids[start:], e.loss_mask[start:]) for e in given]
    train(model, cut, short, progress=lambda done: report("without the schema", done))
    train(model, given, whole, progress=lambda done: report("as it is", done))
    transformers.utils.logging.disable_progress_bar()
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    transformers.GenerationConfig(eos_token_id=end_id).save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    return aside.rename(folder)


def _untrained(vocab_size: int, end_id: int, pad_id: int) -> Qwen3ForCausalLM:
    """0.93 million parameters, half of them embeddings; the same for the same seed."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return transformers.Qwen3ForCausalLM(config)


def _common_beginning(examples: Sequence[TrainingSequence]) -> int:
    """Count the ids that all examples begin with, as far as none of them trains."""
    first = examples[0]
    length = min(len(first.input_ids), int(first.loss_mask.argmax()))
    for example in examples[1:]:
        length = min(length, len(example.input_ids), int(example.loss_mask.argmax()))
        same = example.input_ids[:length] == first.input_ids[:length]
        length = length if same.all() else int(same.argmin())
    return length
