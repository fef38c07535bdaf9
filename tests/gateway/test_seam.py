"""A reply that goes on elsewhere is the reply that one engine would have given."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.gateway.sampling import rest, stopping
from bridle.prompting.prompt import PromptIds
from bridle.types import FinishReason, Sampling, VersionSpan

PROMPT = PromptIds.root(np.arange(3, dtype=np.int32))
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def ids_of(text):
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def text_of(ids):
    return "".join(map(chr, ids.tolist()))


def stopped(text, stops):
    """The text as an engine ends it: at the first letter that completes a stop string."""
    ends = [count for count in range(len(text) + 1) if text[:count].endswith(tuple(stops))]
    return text[: min(ends, default=len(text))]


async def pieces(text, size, versions=()):
    """The text as an engine streams it."""
    for start in range(0, max(len(text), 1), size):
        ids = ids_of(text[start : start + size])
        last = start + size >= len(text)
        finish = FinishReason.STOP if last else None
        yield GenerateChunk(
            ids, -np.ones(len(ids), np.float32), finish, versions=versions if last else ()
        )


async def seamed(before, after, stops, *, least=0, size=3, versions=()):
    aborted = []

    async def abort():
        aborted.append(1)

    chunks = stopping(
        pieces(after, size, versions),
        before=ids_of(before),
        stop=stops,
        least=least,
        decode=text_of,
        abort=abort,
    )
    return [chunk async for chunk in chunks], aborted


@given(st.text("abc", max_size=24), st.data(), STOPS, st.integers(1, 5))
async def test_a_resumed_reply_ends_at_the_same_stop_string_wherever_it_was_interrupted(
    text, data, stops, size
):
    whole = stopped(text, stops)
    cut = data.draw(st.integers(0, max(0, len(whole) - 1)))
    # What an engine gives that knows nothing of the text before the seam.
    after = stopped(text[cut:], stops)
    chunks, _ = await seamed(whole[:cut], after, stops, size=size)
    assert whole[:cut] + "".join(text_of(chunk.output_ids) for chunk in chunks) == whole
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert all(len(chunk.output_ids) == len(chunk.logprobs) for chunk in chunks)


async def test_a_stop_string_across_a_resume_is_ignored_before_min_tokens():
    chunks, _ = await seamed("xa", "bxab", ["ab"], least=3)
    assert "".join(text_of(chunk.output_ids) for chunk in chunks) == "bxab"
    chunks, _ = await seamed("xa", "bxab", ["ab"], least=2)
    assert [text_of(chunk.output_ids) for chunk in chunks] == ["b"]


async def test_a_stop_string_across_a_resume_aborts_the_engine_call_and_cuts_its_version_spans():
    spans = (VersionSpan(1, 0, 1), VersionSpan(2, 1, 6), VersionSpan(3, 6, 9))
    chunks, aborted = await seamed("xa", "bcdefghij", ["abc"], versions=spans)
    assert aborted == [1]
    assert chunks[-1].versions == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    assert chunks[-1].stop_text == "abc"


async def test_a_stop_string_across_a_resume_in_a_finished_reply_sends_no_abort():
    chunks, aborted = await seamed("xa", "bc", ["ab"], size=9)
    assert [text_of(chunk.output_ids) for chunk in chunks] == ["b"]
    assert aborted == []


def request(**sampling):
    return GenerateRequest("r", PROMPT, Sampling(**sampling), stream=True)


def test_the_first_try_sends_the_request_unchanged():
    asked = request(seed=3)
    assert rest(asked, PROMPT, ids_of(""), 0) is asked


def test_a_resumed_call_has_a_seed_derived_from_its_sampled_length():
    seeds = {rest(request(seed=3), PROMPT, ids_of("a" * n), n).sampling.seed for n in range(4)}
    assert len(seeds) == 4
    again = rest(request(seed=3), PROMPT, ids_of("aa"), 2).sampling.seed
    assert again in seeds


@pytest.mark.parametrize("seed", [None, 3])
def test_a_try_without_tokens_is_repeated_with_the_same_sampling(seed):
    again = rest(request(seed=seed, max_tokens=9, min_tokens=2), PROMPT, ids_of(""), 1)
    assert again.sampling == request(seed=seed, max_tokens=9, min_tokens=2).sampling
    assert again.prompt is PROMPT
    assert again.request_id != "r"


def test_a_constrained_call_is_never_streamed():
    asked = GenerateRequest("r", PROMPT, Sampling(), grammar={"json_schema": {}}, stream=True)
    assert not rest(asked, PROMPT, ids_of(""), 0).stream
