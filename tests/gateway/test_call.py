"""A call's stages, and requests kept as deltas."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.gateway.call import NEXT, Call, SpanList, Stage, common_prefix
from bridle.types import DeliveryState


def a_call() -> Call:
    return Call("e1", "s1", started_at=0.0, clock_start=0.0, question_key=b"")


def test_a_call_enters_its_stages_in_order_and_sets_its_events_at_the_end():
    call = a_call()
    for stage in (Stage.SAMPLING, Stage.COMMITTING):
        call.enter(stage)
        assert call.in_flight
    call.enter(Stage.COMMITTED)
    assert not call.in_flight
    assert call.began.is_set()
    assert call.done.is_set()


@pytest.mark.parametrize("stage", [Stage.COMMITTING, Stage.COMMITTED, Stage.PLACED])
def test_no_stage_is_skipped_or_entered_twice(stage):
    with pytest.raises(AssertionError):
        a_call().enter(stage)


def test_a_call_may_fail_until_it_is_committed():
    assert {stage for stage in Stage if Stage.FAILED in NEXT[stage]} == {
        Stage.PLACED,
        Stage.SAMPLING,
        Stage.COMMITTING,
    }


def test_a_superseded_reply_was_delivered_and_a_cut_one_was_not():
    call = a_call()
    assert not call.delivered
    for state in DeliveryState:
        call.delivery = state
        wanted = state in {DeliveryState.DELIVERED, DeliveryState.SUPERSEDED}
        assert call.delivered is wanted


digest_lists = st.lists(st.binary(min_size=1, max_size=1), max_size=6).map(tuple)


@given(left=digest_lists, right=digest_lists)
def test_the_common_prefix_of_two_sequences_is_the_longest_one(left, right):
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert left[length : length + 1] != right[length : length + 1] or length == len(left) == len(
        right
    )


@given(data=st.data())
def test_a_message_list_stored_as_deltas_is_restored_whole_for_every_branch(data):
    made: list[tuple[SpanList, tuple[bytes, ...]]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        base = data.draw(st.sampled_from([None, *made]))
        digests = data.draw(digest_lists)
        if base is not None:
            digests = base[1][: data.draw(st.integers(0, len(base[1])))] + digests
        made.append((SpanList(None if base is None else base[0], digests), digests))
        for span_list, wanted in made:
            assert span_list.whole() == wanted
            assert span_list.kept + len(span_list.new) == len(wanted)


def test_only_the_tip_of_a_conversation_holds_its_whole_list():
    tracemalloc.start()
    try:
        tip = SpanList(None, (b"0",))
        spans = [tip]
        for turn in range(1, 1000):
            tip = SpanList(tip, (*tip.whole(), b"%d" % turn))
            spans.append(tip)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 500_000, "4 MB where each holds its own"
    assert (len(spans), len(tip.whole())) == (1000, 1000)


def test_a_delta_record_names_its_base_only_if_it_shares_messages_with_it():
    base = SpanList(None, (b"a", b"b"))
    record = SpanList(base, (b"a", b"c")).record(b"{}", "e1", None)
    assert (record.base, record.kept_spans, record.spans) == ("e1", 1, (b"c",))
    record = SpanList(base, (b"x",)).record(b"{}", "e1", b"tools")
    assert (record.base, record.kept_spans, record.spans) == (None, 0, (b"x",))
