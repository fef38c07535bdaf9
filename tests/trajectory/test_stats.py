"""The law numbers of hand-made sessions."""

import dataclasses

import pytest
from tests.capture.made import MadeSession
from tests.trajectory.conversations import chain

from bridle.trajectory import rebuild
from bridle.types import DeliveryState, Kind


def numbers(made, **expected):
    found = rebuild(made.capture()).metadata["stats"]
    return found if not expected else {name: found[name] for name in expected}


NOTHING = {
    "exchanges": 0,
    "roots": 0,
    "branches": 0,
    "traces": 0,
    "tokens_captured": 0,
    "tokens_trained": 0,
    "tokens_excluded": {},
    "stats_version": 2,
    "turns_shown": 0,
    "turns_verbatim": 0,
    "turns_rerendered": 0,
    "turns_foreign": 0,
    "turns_given": 0,
    "tokens_rerendered": 0,
    "merge_ratio": None,
    "merging": {"extending": 0, "showing": 0},
    "joins": 0,
    "rejected": {"exchanges": 0, "tokens": 0},
    "malformed_calls": 0,
    "drift": {},
    "habits": {},
    "ties": {},
    "breaks": [],
    "spliced": {"spans": 0, "tokens": 0},
    "unpaired": 0,
    "unknown": {},
    "unenforced": {},
    "overlong": 0,
    "truncated": None,
}
"""The numbers of a session without a call."""


def test_stats_of_an_append_only_session_show_one_trace_and_merge_ratio_1():
    counted = {
        "exchanges": 4,
        "roots": 1,
        "traces": 1,
        "tokens_captured": 20,
        "tokens_trained": 20,
        "turns_shown": 6,
        "turns_verbatim": 6,
        "merge_ratio": 1.0,
        "merging": {"extending": 3, "showing": 3},
        "drift": {"exact": 3},
    }
    assert numbers(chain(4)) == NOTHING | counted


def test_stats_of_an_empty_session_are_zero():
    assert numbers(MadeSession()) == NOTHING


def test_excluded_tokens_are_counted_by_reason():
    made = chain(2)
    made.call("x1", kind=Kind.SIDE, output=3)
    made.call("x1", state=DeliveryState.ABANDONED, output=7)
    made.call("x1", output=2, prompt_digest=b"wrong")
    found = numbers(made, tokens_captured=0, tokens_trained=0, tokens_excluded=0)
    assert found == {
        "tokens_captured": 22,
        "tokens_trained": 10,
        "tokens_excluded": {"abandoned": 7, "broken": 2, "kind": 3},
    }


def test_tokens_of_exchanges_whose_parent_is_missing_are_counted_as_broken():
    made = chain(3)
    del made.exchanges[0]
    expected = {
        "exchanges": 2,
        "roots": 0,
        "branches": 0,
        "tokens_captured": 10,
        "tokens_trained": 0,
        "tokens_excluded": {"broken": 10},
    }
    assert numbers(made, **expected) == expected


def test_mask_reasons_without_tokens_are_left_out_of_the_stats():
    made = chain(1)
    made.call("x0", kind=Kind.SIDE, output=0)
    made.call("x1", output=0)
    made.exchanges[2] = dataclasses.replace(made.exchanges[2], parent_id="gone")
    assert numbers(made)["tokens_excluded"] == {}


def test_branches_are_leaves_beyond_one_per_root():
    made = chain(2)
    made.call("x0")  # x0 has two children
    made.call("x0")  # three
    made.call(None, continues=None)
    made.call("x4", kept=12)  # x4 is a leaf of its own as well
    expected = {"roots": 2, "branches": 3, "traces": 5}
    assert numbers(made, **expected) == expected


def turns(verbatim=0, rerendered=0, foreign=0, given=0, tokens=0):
    return {"turns": {"verbatim": verbatim, "rerendered": rerendered, "foreign": foreign,
                      "given": given, "tokens_rerendered": tokens}}  # fmt: skip


def test_counts_of_shown_turns_are_summed_over_the_exchanges():
    made = MadeSession()
    made.call(extra=turns(given=1))
    made.call("x0", extra=turns(verbatim=1, given=1))
    made.call(None, continues="x1", extra=turns(rerendered=2, foreign=1, tokens=10))
    assert numbers(
        made, turns_shown=0, turns_verbatim=0, turns_rerendered=0, turns_foreign=0, turns_given=0,
        tokens_rerendered=0, merge_ratio=0,
    ) == {
        "turns_shown": 4, "turns_verbatim": 1, "turns_rerendered": 2, "turns_foreign": 1,
        "turns_given": 2, "tokens_rerendered": 10, "merge_ratio": 0.5,
    }  # fmt: skip


def test_only_agent_calls_that_show_a_sampled_turn_are_in_the_merge_ratio():
    made = chain(2)
    made.call(None, continues="x1", kind=Kind.SIDE, extra=turns(rerendered=1))
    made.call(None, continues=None, extra=turns(foreign=2))
    assert numbers(made)["merging"] == {"extending": 1, "showing": 1}


def test_a_capture_without_lineage_has_null_turn_counts():
    made = chain(3)
    made.exchanges = [dataclasses.replace(one, extra={}) for one in made.exchanges]
    unknown = dict.fromkeys(
        ("turns_shown", "turns_verbatim", "turns_rerendered", "turns_foreign", "turns_given",
         "tokens_rerendered", "merge_ratio", "merging")
    )  # fmt: skip
    assert numbers(made, **unknown) == unknown
    assert numbers(made)["tokens_trained"] == 15


@pytest.mark.parametrize(("forks", "ratio"), [(0, 1.0), (1, 0.75), (2, 0.6)])
def test_the_merge_ratio_is_the_share_of_calls_that_extend_a_sampled_turn(forks, ratio):
    made = chain(4)
    for _ in range(forks):
        made.call(None, continues="x3", root_reason="tools_changed")
    assert numbers(made)["merge_ratio"] == ratio


def test_drift_is_counted_by_class():
    made = chain(2)
    made.call("x1", extra={"drift": "rewritten_args"})
    made.call("x2", extra={"drift": "rewritten_args"})
    made.call("x3", extra={"drift": None})
    assert numbers(made)["drift"] == {"exact": 2, "rewritten_args": 2}


def test_breaks_are_reported_in_order_with_ids_and_decoded_texts():
    made = chain(2)
    made.call(None, continues="x1", root_reason="tools_changed", new=made.full("x1")[:4])
    made.call("x1", prompt_digest=b"wrong")
    old = made.full("x1")[4:20].tolist()
    first, second = numbers(made)["breaks"]
    assert first == {
        "exchange": "x2",
        "position": 4,
        "reason": "tools_changed",
        "ids": [old, []],
    }
    assert second == {"exchange": "x3", "position": 0, "reason": "digest_mismatch"}
    result = rebuild(made.capture(), decode=lambda ids: " ".join(map(str, ids)))
    first, second = result.metadata["stats"]["breaks"]
    assert first["texts"] == [" ".join(map(str, old)), ""]
    assert "texts" not in second
