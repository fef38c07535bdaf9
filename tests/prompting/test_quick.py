"""tiktoken's ids are those of the tokenizers package, whatever the text; or it is not used."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.prompting.test_pieces import BACKEND, BACKENDS, GROUPED, O200K, WORDS, with_pattern
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from bridle.prompting.tokenizer import (
    CL100K,
    ONE_DIGIT,
    ids_of,
    quick_bpe,
    safe_decoder,
    safe_encoder,
)

TAKEN = {
    "one digit": BACKEND,
    "cl100k": with_pattern(CL100K),
    "nfc": with_pattern(ONE_DIGIT, normalizers.NFC()),
}
ENCODERS = {name: safe_encoder(backend, quick_bpe(backend)) for name, backend in TAKEN.items()}
CODE_POINTS = [*range(0xD800), *range(0xE000, 0x110000)]
COMMON = CODE_POINTS[:0x3000]


def test_the_fast_encoder_accepts_the_usual_test_tokenizers():
    assert all(quick_bpe(backend) for backend in TAKEN.values())


@pytest.mark.parametrize("name", TAKEN)
@given(
    text=st.one_of(
        st.text(),
        st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=60).map("".join),
        st.tuples(
            st.sampled_from(["a", " ", "\n", "'s", "==", "\u017f", "e\u0301"]), st.integers(0, 99)
        ).map(lambda pair: pair[0] * pair[1]),
    )
)
@example("don'\u017f <|im_end|> \u212a \ufdfa e\u0301\u0327")
@example("\x7f\x7f1 <|im_\x7f1start|>")
@settings(max_examples=150)
def test_any_text_has_the_ids_of_the_slow_encoder(name, text):
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert ENCODERS[name](text) == ids_of(TAKEN[name], text)


def differing(name, points):
    """Those characters beside which the two encoders split words otherwise."""
    text = "\n".join(f"a{chr(one)}1 {chr(one)}'{chr(one)}" for one in points)
    if ENCODERS[name](text) == ids_of(TAKEN[name], text):
        return []
    if len(points) == 1:
        return [hex(points[0])]
    middle = len(points) // 2
    return differing(name, points[:middle]) + differing(name, points[middle:])


@pytest.mark.parametrize("name", TAKEN)
def test_the_fast_encoder_splits_common_characters_like_the_slow_one(name):
    assert differing(name, COMMON) == []


@pytest.mark.long
@pytest.mark.parametrize("name", TAKEN)
def test_the_fast_encoder_splits_all_code_points_like_the_slow_one(name):
    found = [
        one
        for start in range(0, len(CODE_POINTS), 8192)
        for one in differing(name, CODE_POINTS[start : start + 8192])
    ]
    assert found == [], [unicodedata.name(chr(int(one, 16)), one) for one in found[:20]]


def changed(**fields):
    """The builtin tokenizer with another model."""
    made = Tokenizer.from_str(BACKEND.to_str())
    model = made.model
    pairs = [("a", "b"), ("ab", "c"), ("b", "c")]
    alphabet = [one for one in BACKEND.get_vocab(with_added_tokens=False) if len(one) == 1]
    tokens = [*alphabet, "ab", "abc", "bc"]
    vocab = {token: number for number, token in enumerate(tokens)}
    made.model = models.BPE(vocab=vocab | fields.pop("vocab", {}), merges=pairs, **fields)
    assert made.model is not model
    return made


@pytest.mark.parametrize(
    "backend",
    [
        with_pattern(O200K),
        with_pattern(GROUPED),
        with_pattern(ONE_DIGIT, normalizers.NFKC()),
        changed(vocab={"ab": 900}),  # made first, but of a later id
        changed(vocab={"xyz": 900}, ignore_merges=True),  # only ever looked up
    ],
    ids=["o200k", "grouped", "nfkc", "order", "looked up"],
)
def test_the_fast_encoder_declines_tokenizers_that_it_may_encode_differently(backend):
    assert quick_bpe(backend) is None
    assert safe_encoder(backend, None)("abc abc") == ids_of(backend, "abc abc")


def test_a_vocabulary_entry_that_no_merge_produces_is_never_encoded():
    backend = changed(vocab={"xyz": 900})
    quick = quick_bpe(backend)
    assert quick is not None
    assert quick.encode_ordinary("xyz abc") == ids_of(backend, "xyz abc")
    assert 900 not in quick.encode_ordinary("xyz")


def test_an_added_token_in_a_text_is_one_id():
    backend = Tokenizer.from_str(BACKEND.to_str())
    backend.add_tokens([AddedToken("Ω", normalized=True)])
    backend.normalizer = normalizers.NFC()
    encode = safe_encoder(backend, quick_bpe(backend))
    for text in ("one Ω two", "one \u2126 two"):  # the ohm sign is normalized to omega
        assert encode(text) == ids_of(backend, text)
        assert backend.token_to_id("Ω") in encode(text)


def test_all_other_test_tokenizers_give_the_same_ids_either_way():
    for backend in BACKENDS.values():
        encode = safe_encoder(backend, quick_bpe(backend))
        assert encode("It's 12345 日本語 e\u0301 {x}") == ids_of(
            backend, "It's 12345 日本語 e\u0301 {x}"
        )


DECODERS = {name: safe_decoder(backend, quick_bpe(backend)) for name, backend in TAKEN.items()}


@pytest.mark.parametrize("name", TAKEN)
@given(ids=st.lists(st.one_of(st.integers(0, 255), st.integers(0, BACKEND.get_vocab_size() + 9))))
@settings(max_examples=200)
def test_any_ids_have_the_text_of_the_slow_decoder(name, ids):
    """The first ids are single bytes, so that most lists hold parts of characters."""
    assert DECODERS[name](ids) == TAKEN[name].decode(ids, skip_special_tokens=False)


def test_ids_are_decoded_correctly_with_an_unsupported_decoder():
    backend = Tokenizer.from_str(BACKEND.to_str())
    backend.decoder = decoders.Fuse()
    ids = backend.encode("two words").ids
    assert safe_decoder(backend, quick_bpe(backend))(ids) == backend.decode(ids)
