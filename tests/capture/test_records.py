"""An exchange checks its alignment once, when it is made."""

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.capture.records import no_ids, no_logprobs
from bridle.types import LogprobMode


def test_an_exchange_with_fewer_logprobs_than_sampled_ids_is_refused():
    with pytest.raises(ValueError, match="exchange x0: 5 sampled ids but 4 logprobs"):
        MadeSession().call(output=5, logprobs=np.zeros(4, np.float32))


def test_an_exchange_of_logprob_mode_none_must_have_no_logprobs():
    exchange = MadeSession().call(logprobs=no_logprobs(), logprob_mode=LogprobMode.NONE)
    assert len(exchange.output_ids) == 5
    with pytest.raises(ValueError, match="5 sampled ids but 5 logprobs"):
        MadeSession().call(logprob_mode=LogprobMode.NONE)


def test_a_prompt_length_other_than_kept_plus_new_ids_is_refused():
    with pytest.raises(ValueError, match=r"kept 0 \+ new 10 ids is not the prompt's length 12"):
        MadeSession().call(new=10, prompt_length=12)


def test_empty_arrays_have_their_types():
    assert str(no_ids().dtype) == "int32"
    assert str(no_logprobs().dtype) == "float32"
    assert len(no_ids()) == len(no_logprobs()) == 0
