"""Counts of a turn in the gateway: they show what a busy machine's times hide.

A bound is what was counted and a few per cent. A change that needs more calls says so by raising
it; one that saves calls lowers it.
"""

import pytest
from benchmarks.gateway_counts import calls_a_turn
from benchmarks.gateway_sessions import Way

MOST = {
    Way("chat"): 450,
    Way("anthropic"): 543,
    Way("responses"): 706,
    Way("google"): 770,
    Way("chat", "whole"): 499,
    Way("anthropic", "whole"): 624,
    Way("responses", "whole"): 862,
    Way("google", "whole"): 850,
    Way("chat", "live"): 1_085,
    Way("anthropic", "live"): 1_215,
    Way("responses", "live"): 1_460,
    Way("google", "live"): 1_450,
}


@pytest.mark.parametrize("way", MOST, ids=str)
def test_a_linear_turn_takes_no_more_function_calls(way):
    # On a busy machine a body comes in more pieces, and each piece takes some calls.
    for _ in range(4):
        counts = calls_a_turn(way)
        if counts.calls <= MOST[way]:
            return
    pytest.fail(f"{counts.calls} calls, more than {MOST[way]}: {counts.names.most_common(20)}")


def test_a_token_that_comes_alone_takes_no_more_function_calls_in_a_live_stream():
    counts = calls_a_turn(Way("anthropic", "live"), paced=True)
    assert counts.calls <= 17_500, counts.names.most_common(20)


def test_calls_of_a_turn_do_not_grow_with_the_context():
    short, long = (calls_a_turn(Way("chat"), context=size).calls for size in (2_000, 16_000))
    assert abs(long - short) <= 0.05 * short, "eight times the context"
