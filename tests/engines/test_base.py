import pytest

from bridle.engines.base import RETRYABLE, CutError, Versioned
from bridle.errors import EngineError
from bridle.testing import instant_engine, scripted_engine


def test_a_cut_is_an_engine_error_that_can_be_tried_again():
    with pytest.raises(EngineError) as caught:
        raise CutError("half")
    assert caught.value.retryable
    assert caught.value.status is None


def test_who_can_be_told_a_version_is_seen_by_its_method():
    assert isinstance(scripted_engine([{}]), Versioned)
    assert not isinstance(instant_engine(), Versioned)


def test_a_refused_call_is_not_tried_again_and_an_overloaded_one_is():
    assert not RETRYABLE & {400, 401, 403, 404, 413, 422}
    assert {429, 500, 502, 503, 504} <= RETRYABLE
