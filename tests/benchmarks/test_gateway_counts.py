"""Counts of a turn in the gateway: they show what a busy machine's times hide.

A change that needs more calls says so by raising a number; one that saves calls lowers it.
"""

import pytest
from benchmarks.gateway_counts import calls_a_turn
from benchmarks.gateway_sessions import Way

COUNTED = {
    Way("chat"): 390,
    Way("anthropic"): 516,
    Way("responses"): 690,
    Way("google"): 621,
    Way("chat", "whole"): 435,
    Way("anthropic", "whole"): 596,
    Way("responses", "whole"): 840,
    Way("google", "whole"): 699,
    Way("chat", "live"): 872,
    Way("anthropic", "live"): 1_033,
    Way("responses", "live"): 1_277,
    Way("google", "live"): 1_136,
}
SLACK = 1.03
"""A busy machine reads a body in more pieces, and each takes some calls."""


def check(way: Way, counted: int, *, paced: bool = False) -> None:
    """Fail if each of some runs takes more calls than were counted."""
    most = round(SLACK * counted)
    for _ in range(4):
        counts = calls_a_turn(way, paced=paced)
        if counts.calls <= most:
            break
    assert counts.calls <= most, counts.names.most_common(20)


@pytest.mark.parametrize("way", COUNTED, ids=str)
def test_a_linear_gateway_turn_takes_no_more_function_calls_than_recorded(way):
    check(way, COUNTED[way])


def test_a_live_stream_of_single_tokens_takes_no_more_function_calls_than_recorded():
    check(Way("anthropic", "live"), 17_448, paced=True)


def test_function_calls_of_a_gateway_turn_do_not_grow_with_the_context():
    short, long = (calls_a_turn(Way("chat"), context=size).calls for size in (2_000, 16_000))
    assert abs(long - short) <= 0.05 * short, "eight times the context"
