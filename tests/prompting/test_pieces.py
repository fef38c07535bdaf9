"""Long texts have the ids that they have whole, and are given up where no context holds them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bridle.config import builtin_tokenizer_dir
from bridle.errors import ContextOverflowError, RenderError
from bridle.prompting import tokenizer
from bridle.prompting.tokenizer import (
    PIECE,
    WHOLE,
    Allowance,
    chars_per_token,
    count_against,
    load_tokenizer,
    takes_pieces,
    tokenised,
)

TOKENS = load_tokenizer(builtin_tokenizer_dir())
BACKEND = TOKENS.fast.backend_tokenizer
ADDED = re.compile("|".join(map(re.escape, TOKENS.added)))
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GROUPED = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\p{L}+|\s+|[^\s\p{L}\p{N}]+"


def with_pattern(pattern: str, normalizer=None) -> Tokenizer:
    """The builtin vocabulary behind another family's splitting into words."""
    made = Tokenizer.from_str(BACKEND.to_str())
    split = pre_tokenizers.Split(pre_tokenizers_regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def pre_tokenizers_regex(pattern: str):
    from tokenizers import Regex

    return Regex(pattern)


BACKENDS = {
    "builtin": BACKEND,
    "cl100k": with_pattern(CL100K),
    "o200k": with_pattern(O200K),
    "digits in groups from the right": with_pattern(GROUPED),
    "nfc": with_pattern(CL100K, normalizers.NFC()),
}
WORDS = st.sampled_from(
    [
        "the",
        "we're",
        "IT'S",
        "don",
        "'",
        "12345678",
        "\n",
        "  ",
        "\t",
        " ",
        "<|im_end|>",
        "é",
        "e\u0301",
        "日本語",
        "👩‍💻",
        "{",
        "}",
        "(x)",
        "=",
        ",",
        "a_b",
        "   \n",
        "''re",
        "\r\n",
        "%%%",
    ]
)


@pytest.mark.parametrize("name", list(BACKENDS))
@settings(max_examples=25, deadline=None)
@given(words=st.lists(WORDS, min_size=5, max_size=40), shift=st.integers(0, 200))
def test_a_text_tokenised_in_pieces_has_the_ids_of_the_whole(name, words, shift):
    backend = BACKENDS[name]
    text = "x" * shift + "".join(words) * 20
    whole = tokenizer.ids_of(backend, text)
    assert takes_pieces(backend)
    parts = list(tokenizer._pieces(backend, text, ADDED, piece=300))
    assert "".join(parts) == text
    assert [id_ for part in parts for id_ in tokenizer.ids_of(backend, part)] == whole


@pytest.mark.parametrize("name", list(BACKENDS))
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=400), st.lists(WORDS).map("".join)))
def test_a_token_stands_for_no_more_characters_than_the_bound(name, text):
    backend = BACKENDS[name]
    assert len(text) <= chars_per_token(backend) * len(tokenizer.ids_of(backend, text))


def test_tokenising_stops_for_a_text_longer_than_any_context():
    text = "some words in a row, " * (WHOLE // 16)
    with pytest.raises(ContextOverflowError) as refused, count_against(Allowance(1000)):
        TOKENS.encode(text)
    piece = len(TOKENS.encode(text[:PIECE]))
    assert 2000 < refused.value.prompt_tokens <= piece + 2000


def test_texts_of_one_prompt_count_together_against_the_context():
    texts = [f"{number} some words in a row, " + "and more " * 400 for number in range(3)]
    with count_against(Allowance(1000)):
        TOKENS.encode(texts[0])
        with pytest.raises(ContextOverflowError):
            list(map(TOKENS.encode, texts))


def test_tokenising_ends_when_its_allowance_is_stopped():
    allowance = Allowance(1 << 30)
    allowance.stopped = True
    with count_against(allowance), pytest.raises(ContextOverflowError):
        TOKENS.encode("some words " * PIECE)


def test_a_very_long_text_without_word_breaks_is_refused():
    with pytest.raises(RenderError, match=f"more than {WHOLE} characters without a break"):
        TOKENS.encode("a" * (WHOLE + PIECE))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, None),
        (normalizers.Lowercase(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        (None, pre_tokenizers.Metaspace()),
        (None, pre_tokenizers.Split(" ", "isolated")),
        (
            None,
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(pre_tokenizers_regex(r"(?<=\s)\w+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        ),
    ],
)
def test_tokenizers_with_look_behind_or_added_prefixes_take_no_pieces(normalizer, pre_tokenizer):
    made = Tokenizer(models.BPE(vocab=BACKEND.get_vocab(with_added_tokens=False), merges=[]))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    assert not takes_pieces(made)
    assert chars_per_token(made) == float("inf")


def test_a_short_text_is_not_taken_apart():
    sizes = tokenised(BACKEND, "some words", added=ADDED, encode=lambda text: [len(text)])
    assert sizes == [len("some words")]
