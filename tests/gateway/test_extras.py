"""An engine's extra data are aligned with their tokens, over pieces and tries."""

from hypothesis import given
from hypothesis import strategies as st

from bridle.gateway.sampling import Extras, first_of

TRIES = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.booleans()), max_size=4)


@given(TRIES)
def test_every_entry_stands_at_its_own_token_whichever_chunk_brought_it(tries):
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


def test_what_is_of_no_token_is_the_last_try_s_and_the_others_are_kept():
    extras = Extras()
    for at, value in ((2, "AA"), (5, "BB")):
        extras.add({"routed_experts": value}, begun=at - 2, at=at - 2, size=2)
        extras.end_try(at)
    assert extras.whole(5) == {"routed_experts": "BB"}
    assert extras.before(5) == [{"tokens": 2, "routed_experts": "AA"}]
    assert extras.whole(7) == {}
    assert len(extras.before(7)) == 2


def test_a_call_that_begins_again_has_nothing_left_of_its_first_try():
    extras = Extras()
    extras.add({"mask": [1, 2], "experts": "AA"}, begun=0, at=0, size=2)
    extras.end_try(2)
    extras.clear()
    assert (extras.whole(2), extras.before(3)) == ({}, [])


def test_a_cut_leaves_the_entries_of_the_tokens_that_stand():
    extra = {"mask": [1, 2, 3], "experts": "AA", "other": [1]}
    assert first_of(extra, 3, 2) == {"mask": [1, 2], "experts": "AA", "other": [1]}
