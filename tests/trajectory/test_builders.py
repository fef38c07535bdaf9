"""Paths become traces, and each sampled token trains once."""

import numpy as np
import pytest
from tests.capture.made import MadeSession
from tests.trajectory.conversations import chain

from bridle.trajectory import DEFAULT_TRAIN
from bridle.trajectory.builders import (
    assemble,
    mark,
    mask_all,
    per_request,
    prefix_merging,
    shorten,
)
from bridle.trajectory.graph import grow
from bridle.trajectory.sample import MaskReason
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode, VersionSpan


def built(made, builder=prefix_merging):
    """Traces by the exchange they end with."""
    graph = grow("s1", made.exchanges)
    marks = mark(graph, made.exchanges, made.deliveries, DEFAULT_TRAIN)
    plans = builder(graph, marks)
    return {plan.leaf.exchange.exchange_id: assemble(plan, marks, "t") for plan in plans}


def by_turn(trace):
    """Exchange id -> names of the reasons of its sampled tokens."""
    found = {}
    for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
        start = end
        while start > 0 and trace.reasons[start - 1] != MaskReason.PROMPT:
            start -= 1
        found[exchange_id] = [MaskReason(r).key for r in dict.fromkeys(trace.reasons[start:end])]
    return found


def test_an_append_only_session_is_one_trace():
    made = chain(3)
    traces = built(made)
    assert list(traces) == ["x2"]
    trace = traces["x2"]
    assert np.array_equal(trace.prompt_ids, made.prompts["x0"])
    assert np.array_equal(trace.response_ids, made.full("x2")[10:])
    assert trace.loss_mask.tolist() == ([1] * 5 + [0] * 10) * 2 + [1] * 5
    assert trace.turn_ends == (5, 20, 35)
    assert np.array_equal(trace.response_logprobs[15:20], made.exchanges[1].logprobs)
    assert (trace.finish_reason, trace.logprob_mode) == ("stop", "processed")


def test_per_request_gives_each_exchange_its_whole_prompt():
    made = chain(3)
    traces = built(made, per_request)
    assert list(traces) == ["x0", "x1", "x2"]
    for exchange_id, trace in traces.items():
        assert np.array_equal(trace.prompt_ids, made.prompts[exchange_id])
        assert np.array_equal(trace.response_ids, made.outputs[exchange_id])
        assert trace.loss_mask.all()
        assert trace.exchange_ids == (exchange_id,)


def test_shared_turns_of_branches_train_on_the_path_with_more_sampled_tokens():
    made = chain(2)
    made.call("x1", output=4)
    made.call("x1", output=6)
    traces = built(made)
    assert by_turn(traces["x3"]) == {"x0": ["trained"], "x1": ["trained"], "x3": ["trained"]}
    assert by_turn(traces["x2"]) == {"x0": ["context"], "x1": ["context"], "x2": ["trained"]}
    assert not traces["x2"].response_logprobs[:20].any()


def test_equal_paths_are_ordered_by_the_digest_of_their_ids():
    owners = set()
    for seed in range(8):
        made = MadeSession(seed=seed)
        made.call()
        made.call("x0")
        made.call("x0")
        graph = grow("s1", made.exchanges)
        first = min(("x1", "x2"), key=lambda name: graph.nodes[name].path_digest)
        assert by_turn(built(made)[first])["x0"] == ["trained"]
        owners.add(first)
    assert owners == {"x1", "x2"}


def test_shared_turns_of_three_branches_train_once():
    made = chain(1)
    made.call("x0")  # x1
    made.call("x1", output=9)  # x2: the longest path
    made.call("x1")  # x3
    made.call("x0")  # x4
    turns = {end: by_turn(trace) for end, trace in built(made).items()}
    assert turns == {
        "x2": {"x0": ["trained"], "x1": ["trained"], "x2": ["trained"]},
        "x3": {"x0": ["context"], "x1": ["context"], "x3": ["trained"]},
        "x4": {"x0": ["context"], "x4": ["trained"]},
    }


def test_a_branch_from_mid_reply_trains_the_kept_tokens_and_the_rest_stays_a_trace():
    made = MadeSession()
    made.call(output=6)
    made.call("x0", kept=12, output=20)  # keeps two of the six sampled ids
    traces = built(made)
    assert set(traces) == {"x0", "x1"}
    long = traces["x1"]
    assert long.exchange_ids == ("x0", "x1")
    assert long.turn_ends == (2, 32)
    assert long.loss_mask.tolist() == [1] * 2 + [0] * 10 + [1] * 20
    rest = traces["x0"]
    assert rest.loss_mask.tolist() == [0] * 2 + [1] * 4
    assert rest.reasons[:2].tolist() == [MaskReason.CONTEXT] * 2


def test_a_path_whose_tokens_all_train_elsewhere_gives_no_trace():
    made = MadeSession()
    made.call(output=4, logprobs=np.array([-1, -1, np.nan, np.nan], np.float32))
    made.call("x0", kept=12)  # keeps the two that train
    traces = built(made)
    assert list(traces) == ["x1"]
    assert traces["x1"].loss_mask.sum() == 7


def test_a_token_without_a_logprob_is_masked_as_unpaired_in_a_branch_from_mid_reply():
    made = MadeSession()
    made.call(output=6, logprobs=np.array([-1, np.nan, -1, -1, -1, -1], np.float32))
    made.call("x0", kept=14, output=9)
    trace = built(made)["x1"]
    assert trace.reasons[:4].tolist() == [0, MaskReason.UNPAIRED, 0, 0]
    assert trace.response_logprobs[:4].tolist() == [-1, 0, -1, -1]


def test_a_superseded_reply_is_in_no_trace():
    made = chain(2)
    made.deliver("x1", DeliveryState.SUPERSEDED)
    made.call("x0", new=made.exchanges[1].suffix_ids, started_at=2000.0)
    made.call("x2")
    traces = built(made)
    assert list(traces) == ["x3"]
    assert traces["x3"].exchange_ids == ("x0", "x2", "x3")


def test_an_abandoned_reply_is_in_no_trace_and_its_context_trains_on_another_path():
    made = chain(1)
    made.call("x0", output=100, state=DeliveryState.ABANDONED)
    made.call("x0")
    traces = built(made)
    assert list(traces) == ["x2"]
    assert by_turn(traces["x2"]) == {"x0": ["trained"], "x2": ["trained"]}


def test_a_trace_ends_at_its_last_trained_token():
    made = chain(2)
    made.call("x1", kind=Kind.SIDE)
    traces = built(made)
    assert list(traces) == ["x1"]
    assert len(traces["x1"].response_ids) == 20


def test_a_side_call_in_the_middle_of_a_trace_is_masked_with_reason_kind():
    made = chain(1)
    made.call("x0", kind=Kind.SIDE)
    made.call("x1")
    (trace,) = built(made).values()
    assert by_turn(trace) == {"x0": ["trained"], "x1": ["kind"], "x2": ["trained"]}
    assert not trace.response_logprobs[15:20].any()


def test_sub_agents_and_turns_after_a_compaction_are_separate_traces():
    made = chain(2)
    made.call(None, kind=Kind.SUBAGENT, continues=None)
    made.call("x1", kind=Kind.COMPACTION)
    made.call(None, continues="x3", root_reason="history_changed")
    assert sorted(built(made)) == ["x2", "x3", "x4"]


def test_a_session_without_tokens_that_train_gives_no_trace():
    assert built(MadeSession()) == {}
    assert built(chain(2, output=0)) == {}
    assert built(chain(2, state=None, kind=Kind.SIDE)) == {}


def test_a_turn_without_tokens_does_not_break_a_path():
    made = chain(1)
    made.call("x0", output=0)
    made.call("x1")
    (trace,) = built(made).values()
    assert trace.exchange_ids == ("x0", "x2")


def test_each_token_has_the_policy_version_that_sampled_it():
    made = MadeSession()
    made.call(output=4, versions=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 4)))
    made.call("x0", output=3, versions=(VersionSpan(9, -5, 1), VersionSpan(8, 2, 99)))
    (trace,) = built(made).values()
    assert trace.versions.tolist() == [3, 3, 4, 4, *[-1] * 10, 9, -1, 8]


def test_a_trace_of_raw_and_processed_logprobs_has_mode_mixed():
    made = chain(1)
    made.call("x0", logprob_mode=LogprobMode.RAW)
    (trace,) = built(made).values()
    assert trace.logprob_mode == "mixed"


@pytest.mark.parametrize(
    ("limit", "turns", "trained"), [(100, 3, 15), (45, 3, 15), (44, 2, 10), (30, 2, 10), (29, 1, 5)]
)
def test_shortening_a_trace_removes_whole_turns_from_its_end(limit, turns, trained):
    trace = shorten(built(chain(3))["x2"], limit)
    assert trace is not None
    assert len(trace.prompt_ids) + len(trace.response_ids) <= limit
    assert trace.exchange_ids == ("x0", "x1", "x2")[:turns]
    assert trace.turn_ends[-1] == len(trace.response_ids)
    assert trace.loss_mask.sum() == trained
    assert trace.finish_reason == (FinishReason.STOP if turns == 3 else FinishReason.LENGTH)


def test_shortening_a_trace_below_its_first_turn_gives_none():
    assert shorten(built(chain(3))["x2"], 14) is None


def test_shortening_a_trace_also_removes_untrained_turns_at_its_end():
    made = chain(1)
    made.call("x0", kind=Kind.SIDE)
    made.call("x1")
    (trace,) = built(made).values()
    short = shorten(trace, 40)
    assert short is not None
    assert short.exchange_ids == ("x0",)


def test_masking_a_trace_keeps_its_tokens_and_trains_none():
    trace = built(chain(2))["x1"]
    left = mask_all(trace, MaskReason.TRUNCATED)
    assert np.array_equal(left.response_ids, trace.response_ids)
    assert not left.loss_mask.any()
    assert not left.response_logprobs.any()
    assert by_turn(left) == {"x0": ["truncated"], "x1": ["truncated"]}
