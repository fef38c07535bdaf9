"""Tokens of reasoning are counted from the ids that were sampled."""

import pytest

from bridle.prompting.reply import count_thoughts
from bridle.prompting.tokenizer import PromptTokenizer

THOUGHT = "first I look, then I say"


class Unmarked(PromptTokenizer):
    """The same tokenizer, without knowing that reasoning has tokens of its own."""

    def __init__(self, whole: PromptTokenizer) -> None:
        super().__init__(whole.fast)
        self.added = {}


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (f"<think>\n{THOUGHT}\n</think>\n\nHello.", f"\n{THOUGHT}\n"),
        (f"{THOUGHT}</think>Hello.", THOUGHT),
        (f"<think>\n{THOUGHT}", f"\n{THOUGHT}"),
    ],
)
def test_tokens_between_the_think_marks_are_counted(tokens, text, inside):
    assert count_thoughts(tokens, tokens.encode(text), THOUGHT) == len(tokens.encode(inside))


def test_an_empty_reasoning_counts_0_tokens(tokens):
    ids = tokens.encode("<think>\n\n</think>\n\nHello.")
    assert count_thoughts(tokens, ids, None) == count_thoughts(tokens, ids, "\n") == 0


def test_without_marks_the_shortest_run_that_holds_the_text_is_counted(tokens):
    plain = Unmarked(tokens)
    ids = tokens.encode("<|im_start|>") + tokens.encode(THOUGHT) + tokens.encode("<|im_end|>Hello.")
    assert count_thoughts(plain, ids, THOUGHT) == len(tokens.encode(THOUGHT))
    assert count_thoughts(plain, ids, "not there") == len(tokens.encode("not there"))
