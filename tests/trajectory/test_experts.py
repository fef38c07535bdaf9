"""Routed experts stand at their tokens, whatever became of the conversation."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.made import MadeSession
from tests.trajectory.conversations import sessions

from bridle.bridges.base import Shape, fit_trace
from bridle.bridges.parquet import pack as parquet
from bridle.bridges.parquet import unpack as from_parquet
from bridle.config import BuilderSpec
from bridle.experts import Experts, is_known, pack
from bridle.trajectory import rebuild
from bridle.trajectory.packing import pack as tree_of
from bridle.trajectory.result import from_packed, packed_json, trajectory_json, trajectory_of
from bridle.types import Kind


def by_prefix(ids):
    """Experts that tell all ids up to their token: a digest of them, in two layers."""
    digests = [hashlib.sha256(ids[: at + 1].tobytes()).digest() for at in range(len(ids))]
    values = [[[d[0], d[1]], [d[2] + 256, d[3]]] for d in digests]
    return np.array(values, np.int16).reshape(-1, 2, 2)


def by_id(ids):
    """Experts that tell the id of their token alone."""
    return (ids % 30_000).astype(np.int16)[:, None, None]


def rows_with(made, rule, silent=()):
    """The session's exchanges, each with the rows that are new with it, as a gateway keeps them."""
    found = []
    for number, exchange in enumerate(made.exchanges):
        start = max(0, exchange.kept - 1)
        rows = rule(made.full(exchange.exchange_id))[start:-1]
        packed = None if number in silent else pack(Experts(start, rows))
        found.append(dataclasses.replace(exchange, experts=packed))
    return found


def built(made, exchanges, strategy="prefix_merging", **config):
    spec = BuilderSpec(strategy=strategy, config=config)
    capture = dataclasses.replace(made.capture(), exchanges=exchanges)
    return rebuild(capture, builder=spec, train=[*Kind])


def ids_of(trace):
    return np.concatenate([trace.prompt_ids, trace.response_ids])


STRATEGIES = st.sampled_from(["prefix_merging", "per_request"])


@given(sessions(), STRATEGIES, st.integers(2, 40))
def test_every_token_but_the_last_has_its_routed_experts_also_in_cut_traces(
    made, strategy, longest
):
    session = built(
        made, rows_with(made, by_prefix), strategy, max_tokens=longest, overlong="truncate"
    )
    for trace in session.traces:
        wanted = by_prefix(ids_of(trace))
        assert trace.routed_experts.dtype == np.int16
        assert np.array_equal(trace.routed_experts[:-1], wanted[:-1])
        # A trace that was cut in its middle goes on with a token that the model saw.
        last = trace.routed_experts[-1]
        assert (last == -1).all() or np.array_equal(last, wanted[-1])
        shape = Shape(max_prompt=3, max_response=4)
        cut: Any = fit_trace(trace, shape)
        begin = max(0, len(trace.prompt_ids) - 3)
        end = len(cut.prompt_ids) + len(cut.response_ids)
        assert np.array_equal(cut.routed_experts, trace.routed_experts[begin : begin + end])


@given(sessions(), STRATEGIES, st.sets(st.integers(0, 13)))
def test_experts_that_the_engine_did_not_report_are_minus_1_and_others_stay_aligned(
    made, strategy, silent
):
    exchanges = rows_with(made, by_prefix, silent)
    for trace in built(made, exchanges, strategy).traces:
        if trace.routed_experts is None:
            continue
        known = is_known(trace.routed_experts)
        assert np.array_equal(trace.routed_experts[known], by_prefix(ids_of(trace))[known])
        assert (trace.routed_experts[~known] == -1).all()


@given(sessions(drift=True))
def test_a_spliced_turn_keeps_its_routed_experts(made):
    exchanges = rows_with(made, by_id)
    for trace in built(made, exchanges, on_drift="splice").traces:
        known = is_known(trace.routed_experts)
        assert np.array_equal(trace.routed_experts[known], by_id(ids_of(trace))[known])
        # Only the last token before a splice need not have gone through the model.
        unknown = np.flatnonzero(~known[:-1]) - len(trace.prompt_ids) + 1
        assert set(unknown.tolist()) <= {s["end"] for s in trace.metadata.get("spliced", ())}


@given(sessions(max_calls=6), st.sampled_from(["json", "packed", "parquet"]))
def test_routed_experts_survive_a_round_trip_in_every_format(made, form):
    session = built(made, rows_with(made, by_prefix))
    again = {
        "json": lambda: trajectory_of(trajectory_json(session)),
        "packed": lambda: from_packed(packed_json(session)),
        "parquet": lambda: from_parquet(parquet(session)),
    }[form]()
    for one, other in zip(session.traces, again.traces, strict=True):
        before: Any = one.routed_experts
        after: Any = other.routed_experts
        assert after.dtype == np.int16
        assert np.array_equal(before, after)


@given(sessions())
def test_a_packed_tree_has_the_routed_experts_of_its_traces(made):
    session = built(made, rows_with(made, by_prefix))
    tree = tree_of([session])
    rows: Any = tree.routed_experts()
    assert (rows is None) is (not session.traces)
    for number, trace in enumerate(session.traces):
        own = rows[tree.path(number)]
        known = is_known(own)
        assert known[:-1].all()
        assert np.array_equal(own[known], by_prefix(ids_of(trace))[known])


def test_a_trajectory_without_experts_has_no_routed_experts_field():
    made = MadeSession()
    made.call()
    session = built(made, made.exchanges)
    assert session.traces[0].routed_experts is None
    assert "routed_experts" not in trajectory_json(session)["traces"][0]
    assert "routed_experts" not in packed_json(session)["traces"][0]
    assert tree_of([session]).routed_experts() is None


def test_damaged_experts_and_those_of_another_shape_are_marked_unknown():
    made = MadeSession()
    made.call()
    made.call("x0")
    made.call("x1")
    first, second, third = rows_with(made, by_prefix)
    wider = pack(Experts(14, np.zeros((15, 2, 3), np.int16)))
    for fault in (b"x", second.experts[:-3], wider):
        exchanges = [first, dataclasses.replace(second, experts=fault), third]
        (trace,) = built(made, exchanges).traces
        known = np.flatnonzero(~is_known(trace.routed_experts))
        assert known.tolist() == [*range(14, 29), 44]


def test_a_trace_refuses_expert_rows_of_another_length():
    made = MadeSession()
    made.call()
    (trace,) = built(made, rows_with(made, by_prefix)).traces
    with pytest.raises(ValueError, match="has 14 rows of experts, but 15 token ids"):
        dataclasses.replace(trace, routed_experts=trace.routed_experts[1:])
