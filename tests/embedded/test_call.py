import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bridle.config import builtin_tokenizer_dir
from bridle.embedded.call import BatchedCall, StopStrings, Uniforms, common_prefix
from bridle.types import FinishReason, Sampling, VersionSpan


def call(prompt=(5, 6), *, limit=8, stop_ids=(), **sampling) -> BatchedCall:
    return BatchedCall(
        "r",
        np.array(prompt, dtype=np.int32),
        Sampling(**sampling),
        limit=limit,
        stop_ids=frozenset(stop_ids),
        decode=lambda ids: "".join(chr(i) for i in ids),
        mailbox=None,
    )


@pytest.fixture(scope="module")
def decode():
    tokenizer = AutoTokenizer.from_pretrained(builtin_tokenizer_dir())
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=30), st.text(min_size=1, max_size=4), st.lists(st.integers(1, 3)))
@example("ab\N{SNOWMAN}cd", "\N{SNOWMAN}c", [1, 1])
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop, cuts):
    """Text comes in pieces of bytes, as a byte-level tokenizer cuts it."""
    raw = (text + stop + "z").encode()
    pieces, at = [], 0
    for cut in [*cuts, *[2] * len(raw)]:
        pieces.append(raw[at : at + cut])
        at += cut
    stops = StopStrings(
        (stop,), lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace")
    )
    seen = b""
    for i, piece in enumerate(pieces):
        seen += piece
        found = stops.push(i)
        expected = stop in seen.decode("utf-8", "ignore")
        if found or expected:
            break
    assert found == stop
    assert expected


def test_a_stop_string_that_spans_tokens_is_found_with_a_byte_level_tokenizer(decode):
    tokenizer = AutoTokenizer.from_pretrained(builtin_tokenizer_dir())
    ids = tokenizer.encode("Observation: the end of it", add_special_tokens=False)
    stops = StopStrings(("end of", "never"), decode)
    hits = [(i, hit) for i, token in enumerate(ids) if (hit := stops.push(token))]
    assert hits[0][1] == "end of"
    assert decode(ids[: hits[0][0]]).count("end of") == 0


def test_the_earliest_of_several_stop_strings_in_the_text_is_reported():
    stops = StopStrings(("cd", "bc"), lambda ids: "abcd"[: len(ids)] if ids else "")
    assert [stops.push(0) for _ in range(1)] == [None]
    whole = StopStrings(("cd", "bc"), lambda ids: "abcde" if ids == [1] else "")
    assert whole.push(1) == "bc"


def test_special_tokens_can_be_stop_strings(decode):
    tokenizer = AutoTokenizer.from_pretrained(builtin_tokenizer_dir())
    ids = tokenizer.encode("yes<|im_start|>", add_special_tokens=False)
    stops = StopStrings(("<|im_start|>",), decode)
    assert [stops.push(i) for i in ids][-1] == "<|im_start|>"


def test_random_draws_of_a_call_depend_on_its_seed_only():
    one, same, other = Uniforms(7), Uniforms(7), Uniforms(8)
    drawn = [one.next() for _ in range(200)]
    assert drawn == [same.next() for _ in range(200)]
    assert drawn != [other.next() for _ in range(200)]
    assert all(0 <= u < 1 for u in drawn)
    assert Uniforms(None).next() != Uniforms(None).next()
    Uniforms(-3).next()


def test_a_stop_token_ends_a_call_and_is_in_its_output():
    c = call(stop_ids=[9])
    c.append(8, -1.0, 0)
    assert c.finish is None
    c.append(9, -2.0, 0)
    assert c.finish is FinishReason.STOP
    assert c.chunk().output_ids.tolist() == [8, 9]


def test_a_call_ends_at_its_token_limit_with_finish_reason_length():
    c = call(limit=2)
    c.append(1, 0.0, 0)
    c.append(1, 0.0, 0)
    assert c.finish is FinishReason.LENGTH


def test_stop_tokens_and_strings_do_not_end_a_call_before_min_tokens():
    c = call(limit=4, stop_ids=[65], stop=("B",), min_tokens=3)
    assert c.suppressed == {65}
    c.append(66, 0.0, 0)
    c.append(66, 0.0, 0)
    assert c.finish is None
    c.append(66, 0.0, 0)
    assert c.finish is FinishReason.STOP
    assert c.stop_text == "B"
    assert c.suppressed == frozenset()


def test_chunks_have_every_token_once_and_version_spans_have_no_gap():
    c = call(limit=700)
    got, logprobs = [], []
    for i in range(700):
        c.append(i, -float(i), i // 300)
        if i % 97 == 0:
            assert c.has_unsent()
            chunk = c.chunk()
            assert chunk.versions == ()
            got += chunk.output_ids.tolist()
            logprobs += chunk.logprobs.tolist()
            assert not c.has_unsent()
    last = c.chunk()
    assert got + last.output_ids.tolist() == list(range(700))
    assert logprobs + last.logprobs.tolist() == [-float(i) for i in range(700)]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.versions == (
        VersionSpan(0, 0, 300),
        VersionSpan(1, 300, 600),
        VersionSpan(2, 600, 700),
    )


def test_penalties_count_the_sampled_tokens():
    c = call(frequency_penalty=0.5)
    for token in (3, 4, 3):
        c.append(token, 0.0, 0)
    assert c.counts == {3: 2, 4: 1}
    assert call().counts is None


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix_is_the_longest(a, b):
    n = common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
