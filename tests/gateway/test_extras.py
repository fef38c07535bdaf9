"""An engine's extra data are aligned with their tokens, over pieces and tries."""

from hypothesis import given
from hypothesis import strategies as st

from bridle.gateway.sampling import Extras, first_of

TRIES = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.booleans()), max_size=4)


@given(TRIES)
def test_per_token_engine_data_is_aligned_to_tokens_across_chunks_and_retries(tries):
    """One engine tells each piece's own entries, another all of a try's at its end."""
    extras, at, expected = Extras(), 0, []
    for number, (sizes, by_piece) in enumerate(tries):
        begun, own = at, []
        for size in sizes:
            entries = [[number, at + place] for place in range(size)]
            own += entries
            extras.add({"mask": entries} if by_piece else {}, begun=begun, at=at, size=size)
            at += size
        if not by_piece:
            extras.add({"mask": own}, begun=begun, at=at, size=0)
        expected += own
        extras.end_try(at)
    assert extras.whole(at) == ({"mask": expected} if expected else {})
    assert extras.before(at) == []


def test_tokens_without_reported_data_have_none():
    extras = Extras()
    extras.add({"mask": [[1]]}, begun=0, at=1, size=1)
    extras.end_try(3)
    extras.add({"mask": [[4]]}, begun=3, at=4, size=1)
    extras.end_try(6)
    assert extras.whole(6) == {"mask": [None, [1], None, None, [4], None]}


def test_engine_data_not_per_token_is_kept_for_the_last_try_and_earlier_ones():
    extras = Extras()
    for at, value in ((2, "AA"), (5, "BB")):
        extras.add({"routed_experts": value}, begun=at - 2, at=at - 2, size=2)
        extras.end_try(at)
    assert extras.whole(5) == {"routed_experts": "BB"}
    assert extras.before(5) == [{"tokens": 2, "routed_experts": "AA"}]
    assert extras.whole(7) == {}
    assert len(extras.before(7)) == 2


def test_clearing_engine_data_of_a_restarted_call_leaves_none_of_its_first_try():
    extras = Extras()
    extras.add({"mask": [1, 2], "experts": "AA"}, begun=0, at=0, size=2)
    extras.end_try(2)
    extras.clear()
    assert (extras.whole(2), extras.before(3)) == ({}, [])


def test_clearing_engine_data_drops_that_of_the_try_under_way():
    extras = Extras()
    extras.add({"experts": "AA"}, begun=0, at=0, size=2)
    extras.clear()
    extras.end_try(0)
    assert (extras.whole(0), extras.before(1)) == ({}, [])


def test_cutting_a_reply_cuts_its_per_token_engine_data():
    extra = {"mask": [1, 2, 3], "experts": "AA", "other": [1]}
    assert first_of(extra, 3, 2) == {"mask": [1, 2], "experts": "AA", "other": [1]}
