"""Counts of a turn in the gateway: they show what a busy machine's times hide.

A bound is what was counted and a few per cent. A change that needs more calls says so by raising
it; one that saves calls lowers it.
"""

import pytest
from benchmarks.gateway_counts import calls_a_turn
from benchmarks.gateway_sessions import Way

MOST = {
    Way("chat"): 566,
    Way("anthropic"): 656,
    Way("responses"): 816,
    Way("google"): 878,
    Way("chat", "whole"): 612,
    Way("anthropic", "whole"): 735,
    Way("responses", "whole"): 970,
    Way("google", "whole"): 956,
    Way("chat", "live"): 1_170,
    Way("anthropic", "live"): 1_300,
    Way("responses", "live"): 1_540,
    Way("google", "live"): 1_530,
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
