"""Counts of a turn in the gateway: they show what a busy machine's times hide.

A change that needs more calls says so by raising a number; one that saves calls lowers it.
"""

import pytest
from benchmarks.gateway_counts import calls_a_turn
from benchmarks.gateway_sessions import Way

COUNTED = {
    Way("chat"): 400,
    Way("anthropic"): 529,
    Way("responses"): 694,
    Way("google"): 633,
    Way("chat", "whole"): 445,
    Way("anthropic", "whole"): 605,
    Way("responses", "whole"): 844,
    Way("google", "whole"): 711,
    Way("chat", "live"): 1_034,
    Way("anthropic", "live"): 1_153,
    Way("responses", "live"): 1_387,
    Way("google", "live"): 1_356,
}
SLACK = 1.03
"""A busy machine reads a body in more pieces, and each takes some calls."""


@pytest.mark.parametrize("way", COUNTED, ids=str)
def test_a_linear_turn_takes_no_more_function_calls(way):
    most = round(SLACK * COUNTED[way])
    for _ in range(4):
        counts = calls_a_turn(way)
        if counts.calls <= most:
            break
    assert counts.calls <= most, counts.names.most_common(20)


def test_a_token_that_comes_alone_takes_no_more_function_calls_in_a_live_stream():
    counts = calls_a_turn(Way("anthropic", "live"), paced=True)
    assert counts.calls <= 17_500, counts.names.most_common(20)


def test_calls_of_a_turn_do_not_grow_with_the_context():
    short, long = (calls_a_turn(Way("chat"), context=size).calls for size in (2_000, 16_000))
    assert abs(long - short) <= 0.05 * short, "eight times the context"
