from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridle.config import builtin_tokenizer_dir
from bridle.prompting.family import Family, make_family
from bridle.prompting.placeholders import PlaceholderFamily, suffix_of, with_placeholders
from bridle.prompting.tokenizer import PLACEHOLDER_CHARS, load_tokenizer

TOKENS = load_tokenizer(builtin_tokenizer_dir())
PLAIN = make_family("qwen3", TOKENS, thinking=None, history="exact")
REPLACED = with_placeholders(PLAIN, TOKENS)

texts = st.tuples(st.text(max_size=4), st.sampled_from([0, PLACEHOLDER_CHARS])).map(
    lambda drawn: drawn[0] + drawn[1] * "x " + drawn[0]
)
messages = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": TOKENS.escape(text), "tool_call_id": "c"},
        st.sampled_from(["user", "tool", "system"]),
        texts,
    ),
    min_size=1,
    max_size=4,
)
MARKS = ["<think>", "</think>", "<tool_call>", "<|im_end|>"]


def test_a_family_that_only_inserts_texts_renders_with_placeholders():
    assert isinstance(REPLACED, PlaceholderFamily)


@given(messages)
@settings(max_examples=40)
def test_a_prompt_is_the_same_with_placeholders(asked):
    wanted = PLAIN.render_ids(asked, tools=None, add_generation_prompt=True)
    assert REPLACED.render_ids(asked, tools=None, add_generation_prompt=True) == wanted


@example([{"role": "user", "content": ""}], ["a b c d e f g h", "\n", "<think>"])
@given(messages, st.lists(st.sampled_from(["a b c d e f g h", "\n", *MARKS]), max_size=5))
@settings(max_examples=60)
def test_a_suffix_is_the_same_with_placeholders(new, said):
    prompt = PLAIN.render_ids(
        [{"role": "user", "content": "u"}], tools=None, add_generation_prompt=True
    )
    sampled = TOKENS.encode("".join(said))
    plain = suffix_of(PLAIN, prompt, sampled, new, None)
    assert suffix_of(REPLACED, prompt, sampled, new, None) == plain


@dataclass
class Looks:
    """A family that does more with ids than to put them in their place."""

    how: str

    def get_stop_token_ids(self):
        return PLAIN.get_stop_token_ids()

    def render_ids(self, messages, *, tools, add_generation_prompt):
        if self.how == "never":
            raise ValueError("no")
        ids = PLAIN.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        match self.how:
            case "decodes":
                return TOKENS.encode(TOKENS.decode(ids))
            case "counts":
                return [*ids, len(ids)]
            case _:
                return ids

    def bridge_to_next_turn(self, prompt, sampled, new, *, tools):
        found = PLAIN.bridge_to_next_turn(prompt, sampled, new, tools=tools)
        if found is not None:
            found.token_ids.append(len(found.token_ids))
        return found


@pytest.mark.parametrize("how", ["decodes", "counts", "bridges", "never"])
def test_a_family_that_looks_at_ids_is_left_as_it_is(how):
    family = cast("Family", Looks(how))
    assert with_placeholders(family, TOKENS) is family


def test_a_family_that_drops_what_was_sampled_makes_no_suffix():
    class Drops(Looks):
        def bridge_to_next_turn(self, prompt, sampled, new, *, tools):
            found = PLAIN.bridge_to_next_turn(prompt, sampled, new, tools=tools)
            assert found is not None
            found.token_ids[:] = [0, *found.token_ids]
            return found

    family = with_placeholders(cast("Family", Drops("fine")), TOKENS)
    assert isinstance(family, PlaceholderFamily)
    new = [{"role": "user", "content": "u"}]
    assert family.suffix([1, 2], [3, 4], new, None) is None


def test_replies_are_parsed_and_ended_as_the_family_does():
    ids = TOKENS.encode("hello<|im_end|>")
    parsed = REPLACED.parse_response(ids, tools=None, prompt_ids=[])
    assert parsed.content == "hello"
    assert REPLACED.get_stop_token_ids() == list(PLAIN.get_stop_token_ids())


def test_long_texts_are_tokenised_normally_outside_of_placeholders():
    text = "y " * PLACEHOLDER_CHARS
    with TOKENS.placeholders() as texts:
        assert TOKENS.encode(text) == [-1]
    assert texts == [text]
    assert np.array(TOKENS.encode(text)).min() >= 0
