from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.fakes import chunk
from tests.engines.recording import InstantEngine

from bridle.engines.base import RETRYABLE, CutError, Versioned, join_chunks
from bridle.errors import EngineError
from bridle.testing import scripted_engine
from bridle.types import FinishReason


def test_a_cut_is_an_engine_error_that_can_be_tried_again():
    with pytest.raises(EngineError) as caught:
        raise CutError("half")
    assert caught.value.retryable
    assert caught.value.status is None


def test_an_engine_with_set_version_is_versioned():
    assert isinstance(scripted_engine([{}]), Versioned)
    assert not isinstance(InstantEngine(), Versioned)


def test_client_error_statuses_are_not_retryable_and_429_and_5xx_are():
    assert not RETRYABLE & {400, 401, 403, 404, 413, 422}
    assert {429, 500, 502, 503, 504} <= RETRYABLE


def broken_after(chunks):
    yield from chunks
    raise EngineError("broken")


TOKENS = st.lists(st.integers(0, 9), max_size=3).map(chunk)
SPECIAL = st.sampled_from(
    [
        replace(chunk([1]), prompt_ids_json=b"[1]"),
        replace(chunk([2]), extra={"a": [1]}),
        chunk([3], FinishReason.STOP),
    ]
)


@given(st.lists(TOKENS | SPECIAL, max_size=8))
def test_joined_chunks_have_the_same_tokens_and_lose_nothing_else(chunks):
    found = []
    with pytest.raises(EngineError, match="broken"):
        found.extend(join_chunks(broken_after(chunks)))
    for field in ("output_ids", "logprobs"):
        values = [
            [one for reply in side for one in getattr(reply, field)] for side in (found, chunks)
        ]
        assert values[0] == values[1]
    special = [[one for one in side if one.extra or one.prompt_ids_json or one.finish_reason]
               for side in (found, chunks)]  # fmt: skip
    assert special[0] == special[1]


def test_adjacent_chunks_with_only_tokens_are_joined_into_one():
    last = chunk([4], FinishReason.STOP)
    found = list(join_chunks([chunk([1]), chunk([2, 3]), last]))
    assert [one.output_ids.tolist() for one in found] == [[1, 2, 3], [4]]
    assert (found[0].first, found[1]) == (1, last)
