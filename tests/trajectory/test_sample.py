"""A trace's arrays are aligned, checked once."""

import dataclasses

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.trajectory import rebuild
from bridle.trajectory.sample import MaskReason


@pytest.mark.parametrize("name", ["loss_mask", "response_logprobs", "versions", "reasons"])
def test_a_trace_with_arrays_of_different_lengths_is_refused(name):
    made = MadeSession()
    made.call()
    (trace,) = rebuild(made.capture()).traces
    shorter = {name: getattr(trace, name)[:-1]}
    with pytest.raises(ValueError, match="s1/prefix_merging/0: response arrays of different"):
        dataclasses.replace(trace, **shorter)


def test_mask_reasons_fit_a_byte_and_have_names():
    assert max(MaskReason) < np.iinfo(np.uint8).max
    assert [reason.key for reason in MaskReason][:3] == ["trained", "prompt", "context"]
    assert list(MaskReason) == list(range(len(MaskReason)))
