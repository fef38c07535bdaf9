"""The forest: token identity is checked, and what fails is left out by name."""

import dataclasses

import numpy as np
import pytest
from tests.capture.made import MadeSession, digest_of
from tests.trajectory.conversations import chain

from bridle.capture.records import no_ids
from bridle.trajectory.graph import Break, first_ids, grow, pieces


def grown(made):
    return grow("s1", made.exchanges)


def lost(graph):
    return {exchange.exchange_id: reason for exchange, reason in graph.lost}


def replace(made, number, **fields):
    made.exchanges[number] = dataclasses.replace(made.exchanges[number], **fields)


def test_a_chain_of_exchanges_yields_the_prompt_and_sampled_ids_of_each():
    made = chain(3)
    graph = grown(made)
    assert not graph.lost
    assert not graph.breaks
    assert [node.is_leaf for node in graph.nodes.values()] == [False, False, True]
    for exchange_id, node in graph.nodes.items():
        assert node.sound
        assert np.array_equal(first_ids(node, node.length), made.full(exchange_id))
        for take in (0, 1, 9, 10, 14):
            assert np.array_equal(first_ids(node, take), made.full(exchange_id)[:take])


def test_pieces_name_the_exchange_of_their_ids_and_whether_they_were_sampled():
    graph = grown(chain(2))
    found = [
        (p.node.exchange.exchange_id, p.is_output, len(p.ids))
        for p in pieces(graph.nodes["x1"], 27)
    ]
    assert found == [("x0", False, 10), ("x0", True, 5), ("x1", False, 10), ("x1", True, 2)]


@pytest.mark.parametrize("kept", [14, 10, 7, 15])
def test_a_child_that_keeps_a_part_of_its_parent_is_sound_and_reported_as_a_break(kept):
    made = chain(1)
    made.call("x0", kept=kept)
    graph = grown(made)
    node = graph.nodes["x1"]
    assert node.sound
    assert np.array_equal(first_ids(node, node.length), made.full("x1"))
    assert graph.nodes["x0"].is_leaf is (kept < 15)
    expected = () if kept == 15 else (Break("x1", kept, "parent_kept_in_part"),)
    assert graph.breaks == expected


def test_a_child_that_keeps_only_ids_of_an_earlier_ancestor_gets_that_parent():
    made = chain(3)
    made.call("x2", kept=12)
    graph = grown(made)
    parent = graph.nodes["x3"].parent
    assert parent is graph.nodes["x0"]
    assert np.array_equal(first_ids(graph.nodes["x3"], 22), made.prompts["x3"])


def test_an_exchange_whose_prompt_digest_differs_is_unsound_and_the_others_are_sound():
    made = chain(3)
    replace(made, 1, prompt_digest=digest_of([1, 2, 3]))
    graph = grown(made)
    assert [node.sound for node in graph.nodes.values()] == [True, False, True]
    assert graph.breaks == (Break("x1", 0, "digest_mismatch"),)


def test_changed_prompt_ids_make_all_descendants_unsound():
    made = chain(3)
    replace(made, 1, suffix_ids=made.exchanges[1].suffix_ids + 1)
    graph = grown(made)
    assert [node.sound for node in graph.nodes.values()] == [True, False, False]


def test_an_exchange_with_an_unknown_parent_is_lost_with_its_descendants():
    made = chain(3)
    del made.exchanges[0]
    graph = grown(made)
    assert lost(graph) == {"x1": "unknown_parent", "x2": "parent_lost"}
    assert Break("x1", 0, "unknown_parent") in graph.breaks
    assert not graph.nodes


def test_exchanges_in_a_parent_cycle_are_lost_with_their_descendants():
    made = chain(4)
    replace(made, 0, parent_id="x1", kept=4, suffix_ids=made.exchanges[0].suffix_ids[4:])
    assert lost(grown(made)) == {
        "x0": "cycle",
        "x1": "cycle",
        "x2": "parent_lost",
        "x3": "parent_lost",
    }


def test_an_exchange_that_is_its_own_parent_is_a_cycle():
    made = chain(1)
    replace(made, 0, parent_id="x0", kept=4, suffix_ids=made.exchanges[0].suffix_ids[4:])
    assert lost(grown(made)) == {"x0": "cycle"}


def test_an_exchange_that_keeps_ids_without_a_parent_is_lost():
    made = chain(1)
    replace(made, 0, kept=4, suffix_ids=made.exchanges[0].suffix_ids[4:])
    assert lost(grown(made)) == {"x0": "no_parent"}


def test_an_exchange_that_keeps_more_ids_than_its_parent_has_is_lost():
    made = chain(3)
    replace(made, 1, kept=16, suffix_ids=made.exchanges[1].suffix_ids[1:])
    assert lost(grown(made)) == {"x1": "kept_beyond_parent", "x2": "parent_lost"}


def test_an_exchange_that_keeps_no_ids_of_its_parent_is_a_root():
    made = chain(1)
    made.call("x0", kept=0)
    graph = grown(made)
    assert graph.nodes["x1"].parent is None
    assert graph.breaks == (Break("x1", 0, "nothing_kept"),)
    del made.exchanges[0]
    assert list(grown(made).nodes) == ["x1"]


def test_a_duplicate_exchange_id_counts_once_whatever_the_order():
    made = chain(2)
    twin = dataclasses.replace(made.exchanges[1], output_ids=made.exchanges[1].output_ids + 1)
    for exchanges in ([*made.exchanges, twin], [twin, *made.exchanges]):
        graph = grow("s1", exchanges)
        assert lost(graph) == {"x1": "duplicate"}
        assert np.array_equal(
            graph.nodes["x1"].exchange.output_ids,
            min(twin, made.exchanges[1], key=lambda e: e.output_ids.tobytes()).output_ids,
        )


def test_an_exchange_of_another_session_is_left_out():
    made = chain(1)
    assert [reason for _, reason in grow("other", made.exchanges).lost] == ["foreign_session"]


def test_a_missing_commit_number_is_reported():
    made = chain(3)
    made.call(None)
    del made.exchanges[2]
    assert grown(made).breaks == (Break("x3", 0, "missing_exchange"),)


def test_a_fork_is_reported_with_the_first_position_that_differs():
    made = chain(2)
    same = made.full("x1")[:12]
    made.call(None, new=[*same, -1, -1], continues="x1", root_reason="history_changed")
    made.call(None, continues="gone", root_reason="tools_changed")
    made.call(None, new=made.full("x1"), continues="x1")
    replace(made, 4, root_reason=None)
    assert grown(made).breaks == (
        Break("x2", 12, "history_changed"),
        Break("x3", 0, "unknown_continues"),
        Break("x4", 30, "forked"),
    )


def test_a_break_by_an_engine_prompt_has_the_captured_position():
    made = chain(1)
    result = {"position": 3, "reason": "engine_prompt"}
    made.call(None, continues="x0", root_reason="engine_prompt", extra={"break": result})
    made.call(None, continues=None, root_reason="engine_prompt", extra={"break": result})
    assert grown(made).breaks == (Break("x1", 3, "engine_prompt"), Break("x2", 3, "engine_prompt"))


def test_a_fork_of_a_lost_exchange_is_reported_without_a_position():
    made = chain(1)
    replace(made, 0, parent_id="gone", kept=4, suffix_ids=made.exchanges[0].suffix_ids[4:])
    made.call(None, continues="x0", root_reason="history_changed")
    assert Break("x1", 0, "history_changed") in grown(made).breaks


def test_an_exchange_without_any_id_is_sound():
    made = MadeSession()
    made.call(new=0, output=0, prompt_digest=b"")
    graph = grown(made)
    assert graph.nodes["x0"].sound
    assert np.array_equal(first_ids(graph.nodes["x0"], 0), no_ids())


def test_non_contiguous_id_arrays_have_the_same_digest():
    made = MadeSession()
    made.call(new=[5, 6, 7])
    wide = np.array([5, 0, 6, 0, 7, 0], dtype=np.int32)[::2]
    exchange = dataclasses.replace(made.exchanges[0], suffix_ids=wide)
    assert not grow("s1", [exchange]).breaks
