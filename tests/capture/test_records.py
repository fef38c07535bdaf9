"""An exchange checks its alignment once, when it is made."""

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.capture.records import no_ids, no_logprobs
from bridle.types import LogprobMode


def test_every_sampled_id_has_a_logprob():
    with pytest.raises(ValueError, match="exchange x0: 5 sampled ids but 4 logprobs"):
        MadeSession().call(output=5, logprobs=np.zeros(4, np.float32))


def test_without_logprobs_there_are_none():
    exchange = MadeSession().call(logprobs=no_logprobs(), logprob_mode=LogprobMode.NONE)
    assert len(exchange.output_ids) == 5
    with pytest.raises(ValueError, match="5 sampled ids but 5 logprobs"):
        MadeSession().call(logprob_mode=LogprobMode.NONE)


def test_what_was_kept_and_what_is_new_make_the_prompt():
    with pytest.raises(ValueError, match=r"kept 0 \+ new 10 ids is not the prompt's length 12"):
        MadeSession().call(new=10, prompt_length=12)


def test_empty_arrays_have_their_types():
    assert str(no_ids().dtype) == "int32"
    assert str(no_logprobs().dtype) == "float32"
    assert len(no_ids()) == len(no_logprobs()) == 0
