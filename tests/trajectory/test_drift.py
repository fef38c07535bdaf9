"""Turns that a chat template wrote anew: their class, where they fork, where they are spliced."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from tests.capture.made import MadeSession
from tests.trajectory.conversations import sessions

from bridle.config import BuilderSpec
from bridle.trajectory import rebuild
from bridle.types import FinishReason

END, RETURN, CALL = 900, 901, 902
"""End of turn in the history; what harmony samples in its place; what begins a call's turn."""


def session(output, shown, after=(50, 51), *, drift=None, **fields):
    """Two turns; the second's prompt shows `shown` where the first sampled `output`."""
    made = MadeSession()
    made.call(new=[1, 2, 3], output=output, **fields)
    made.call(
        None, continues="x0", root_reason="engine_prompt", new=[1, 2, 3, *shown, *after],
        output=[60, END], extra={"drift": drift} if drift else {},
    )  # fmt: skip
    return made


def built(made, strategy="prefix_merging", **config):
    return rebuild(made.capture(), builder=BuilderSpec(strategy=strategy, config=config))


def joined(made, **config):
    """The ids of the only trace, its flagged spans and the class of the second turn."""
    trajectory = built(made, on_drift="splice", **config)
    (trace,) = trajectory.traces
    kind = max(trajectory.metadata["stats"]["drift"])
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    spans = [ids[len(trace.prompt_ids) + s["start"] : len(trace.prompt_ids) + s["end"]]
             for s in trace.metadata.get("spliced", [])]  # fmt: skip
    return ids, spans, kind


@pytest.mark.parametrize("mode", ["fork", "splice"])
def test_a_prompt_that_repeats_every_sampled_id_extends_the_trace(mode):
    trajectory = built(session([10, 11, END], [10, 11, END]), on_drift=mode)
    (trace,) = trajectory.traces
    assert trace.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1]
    stats = trajectory.metadata["stats"]
    assert (stats["drift"], stats["merge_ratio"], stats["breaks"]) == ({"exact": 1}, 1.0, [])
    assert (stats["roots"], stats["spliced"]) == (1, {"spans": 0, "tokens": 0})


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_reply_without_a_close_token_continues_with_the_template_s_close_token(finish):
    made = session([10, 11], [10, 11, END], finish_reason=finish)
    ids, spans, kind = joined(made)
    assert (ids, spans, kind) == ([1, 2, 3, 10, 11, END, 50, 51, 60, END], [], "exact")


@pytest.mark.parametrize("close", [(), (END, RETURN)])
def test_a_stop_token_that_the_template_replaces_is_spliced_as_a_span_of_one(close):
    made = session([10, 11, RETURN], [10, 11, END])
    ids, spans, kind = joined(made, close_token_ids=close)
    assert ids == [1, 2, 3, 10, 11, RETURN, 50, 51, 60, END]
    assert (spans, kind) == ([[RETURN]], "exact")
    forked = built(made)
    assert len(forked.traces) == 2
    assert forked.metadata["stats"]["drift"] == {"exact": 1}


def test_a_sampled_stop_token_that_the_template_omits_is_spliced_in():
    made = session([10, 11, CALL], [10, 11], after=[50, 51])
    ids, spans, kind = joined(made, close_token_ids=(CALL,))
    assert ids == [1, 2, 3, 10, 11, CALL, 50, 51, 60, END]
    assert (spans, kind) == ([[CALL]], "exact")


def test_retokenized_text_forks_by_default_and_is_spliced_on_demand():
    made = session([10, 11, 12, END], [10, 77, END])
    stats = built(made).metadata["stats"]
    assert (stats["roots"], stats["drift"]) == (2, {"retokenized": 1})
    assert stats["breaks"] == [
        {"exchange": "x1", "position": 4, "reason": "engine_prompt",
         "ids": [[11, 12, END], [77, END, 50, 51]]}
    ]  # fmt: skip
    ids, spans, kind = joined(made)
    assert ids == [1, 2, 3, 10, 11, 12, END, 50, 51, 60, END]
    assert (spans, kind) == ([[11, 12, END]], "retokenized")
    spliced = built(made, on_drift="splice").metadata["stats"]
    assert (spliced["spliced"], spliced["merge_ratio"]) == ({"spans": 1, "tokens": 3}, 1.0)
    assert [b["exchange"] for b in spliced["breaks"]] == ["x1"]


def test_spliced_retokenized_text_keeps_the_template_s_close_token():
    made = session([10, 11, 12], [10, 77, END], finish_reason=FinishReason.LENGTH)
    ids, spans, kind = joined(made, end_of_turn_token_id=END)
    assert ids == [1, 2, 3, 10, 11, 12, END, 50, 51, 60, END]
    assert (spans, kind) == ([[11, 12]], "retokenized")


@pytest.mark.parametrize(
    ("made", "close"),
    [
        (session([10, 11, END], [10, 78, END], drift="changed"), ()),
        (session([10, 11, 12], [10, 77, 78], finish_reason=FinishReason.LENGTH), (END,)),
        (session([10, 11, END], [10], after=[]), ()),
    ],
    ids=["harness", "no close token", "only a beginning"],
)
def test_rewritten_turns_fork_also_with_on_drift_splice(made, close):
    trajectory = built(made, on_drift="splice", close_token_ids=close)
    stats = trajectory.metadata["stats"]
    assert (stats["roots"], stats["drift"]) == (2, {"rewritten": 1})
    assert stats["spliced"] == {"spans": 0, "tokens": 0}


def test_a_prompt_changed_before_the_sampled_turn_is_classified_as_rewritten():
    made = MadeSession()
    made.call(new=[1, 2, 3], output=[10, END])
    made.call(None, continues="x0", root_reason="engine_prompt", new=[1, 9, 3, 10, END, 50])
    assert built(made, on_drift="splice").metadata["stats"]["drift"] == {"rewritten": 1}


def long_session(turns, *, retokenize):
    """Every prompt is rendered from text again; text tokens 10 and 11 come back as one."""
    made = MadeSession(texts=False)
    history: list[int] = [1, 2, 3]
    for turn in range(turns):
        made.call(
            None, continues=f"x{turn - 1}" if turn else None, new=history, output=[10, 11, END],
            root_reason="engine_prompt" if turn else "first",
        )  # fmt: skip
        history = [*history, *([77] if retokenize else [10, 11]), END, 40 + turn]
    return made


@pytest.mark.parametrize("retokenize", [False, True])
def test_a_session_of_30_templated_turns_is_one_trace_with_on_drift_splice(retokenize):
    trajectory = built(long_session(30, retokenize=retokenize), on_drift="splice")
    (trace,) = trajectory.traces
    assert len(trace.exchange_ids) == 30
    assert trace.loss_mask.sum() == 90
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    expected = [1, 2, 3]
    for turn in range(30):
        expected += [10, 11, END, *([40 + turn] if turn < 29 else [])]
    assert ids == expected
    spans = trace.metadata.get("spliced", [])
    assert len(spans) == (29 if retokenize else 0)
    sampled = trace.response_ids
    assert all(sampled[s["start"] : s["end"]].tolist() == [10, 11, END] for s in spans)


def test_a_turn_that_extends_a_spliced_turn_joins_its_trace():
    made = session([10, 11, END], [77, END])
    made.call("x1", new=[70], output=[71])
    ids, spans, _ = joined(made)
    assert ids == [1, 2, 3, 10, 11, END, 50, 51, 60, END, 70, 71]
    assert spans == [[10, 11, END]]


def test_a_turn_is_not_spliced_when_a_child_keeps_only_a_part_of_its_prompt():
    made = session([10, 11, END], [77, END])
    made.call("x1", kept=2, new=[70], output=[71])
    assert built(made, on_drift="splice").metadata["stats"]["roots"] == 2


def test_a_turn_that_continues_a_missing_exchange_stays_a_root():
    made = MadeSession()
    made.call(None, continues="gone", root_reason="template", new=[1, 2], output=[3])
    stats = built(made, on_drift="splice").metadata["stats"]
    assert (stats["roots"], stats["drift"]) == (1, {"exact": 1})


def test_a_root_is_not_spliced_onto_its_own_descendant():
    made = MadeSession()
    made.call(new=[1, 2], output=[3, END], continues="x1", root_reason="template")
    made.call("x0", new=[], output=[])
    made.exchanges[0] = dataclasses.replace(
        made.exchanges[0], suffix_ids=np.array([1, 2], np.int32), continues="x1"
    )
    assert built(made, on_drift="splice").metadata["stats"]["roots"] == 1


def test_turns_that_continue_each_other_stay_roots():
    made = MadeSession()
    made.call(new=[1], output=[2], continues="x1", root_reason="template")
    made.call(None, new=[1, 2, 3], output=[4], continues="x0", root_reason="template")
    stats = built(made).metadata["stats"]
    assert stats["tokens_trained"] == 2
    made = MadeSession()
    made.call(new=[1, 2, 3], output=[4], continues="x1", root_reason="template")
    made.call("x0", new=[1, 2, 3], kept=0, output=[4], continues="x1", root_reason="template")
    assert built(made).metadata["stats"]["tokens_captured"] == 2


def test_per_request_traces_keep_the_engine_s_prompts_with_on_drift_splice():
    made = session([10, 11, END], [77, END])
    traces = built(made, "per_request", on_drift="splice").traces
    assert [t.prompt_ids.tolist() for t in traces] == [[1, 2, 3], [1, 2, 3, 77, END, 50, 51]]


@given(made=sessions(drift=True))
def test_token_identity_and_token_counts_hold_with_and_without_splicing(made):
    captured = sum(len(e.output_ids) for e in made.exchanges)
    trained = set()
    for mode in ("fork", "splice"):
        trajectory = built(made, on_drift=mode)
        numbers = trajectory.metadata["stats"]
        assert numbers["tokens_captured"] == captured
        assert captured == numbers["tokens_trained"] + sum(numbers["tokens_excluded"].values())
        trained.add((numbers["tokens_trained"], tuple(numbers["tokens_excluded"].items())))
        for trace in trajectory.traces:
            if "spliced" not in trace.metadata:
                ids = np.concatenate([trace.prompt_ids, trace.response_ids])
                assert np.array_equal(ids, made.full(trace.exchange_ids[-1]))
    assert len(trained) == 1
