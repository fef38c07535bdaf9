"""The laws of trajectories, over random conversations and over hand-made ones."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.made import MadeSession
from tests.trajectory.conversations import chain, sessions

from bridle.capture.records import Damaged, SessionCapture
from bridle.config import BuilderSpec
from bridle.errors import ConfigError
from bridle.trajectory import rebuild, with_outcome
from bridle.trajectory.result import trace_json, trace_metadata, trajectory_bytes
from bridle.trajectory.sample import MaskReason
from bridle.types import DeliveryState, FinishReason, Kind, VersionSpan

STRATEGIES = ("per_request", "prefix_merging", "tree")


def stats(trajectory):
    return trajectory.metadata["stats"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(made=sessions())
def test_a_trace_equals_the_prompt_and_sampled_ids_of_its_exchanges(strategy, made):
    trajectory = rebuild(made.capture(), builder=BuilderSpec(strategy=strategy))
    for trace in trajectory.traces:
        last = trace.exchange_ids[-1]
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])
        assert np.array_equal(ids, made.full(last))
        for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            output = made.outputs[exchange_id]
            context = ids[: len(trace.prompt_ids) + end]
            start = end - len(output)
            if trace.loss_mask[max(start, 0) : end].any():
                assert np.array_equal(
                    context[: len(made.prompts[exchange_id])], made.prompts[exchange_id]
                )


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(made=sessions())
def test_every_sampled_token_trains_once_or_is_excluded_for_one_reason(strategy, made):
    trajectory = rebuild(made.capture(), builder=BuilderSpec(strategy=strategy))
    numbers = stats(trajectory)
    captured = sum(len(e.output_ids) for e in made.exchanges)
    assert numbers["tokens_captured"] == captured
    assert captured == numbers["tokens_trained"] + sum(numbers["tokens_excluded"].values())
    trained = {}
    for trace in trajectory.traces:
        start = 0
        assert trace.loss_mask.any()
        for exchange_id, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            size = int(np.count_nonzero(trace.reasons[start:end] != MaskReason.PROMPT))
            for token in np.flatnonzero(trace.loss_mask[end - size : end]).tolist():
                key = exchange_id, token
                assert key not in trained
                trained[key] = True
                at = end - size + token
                exchange = next(e for e in made.exchanges if e.exchange_id == exchange_id)
                assert trace.response_ids[at] == exchange.output_ids[token]
                assert trace.response_logprobs[at] == exchange.logprobs[token]
            start = end
        assert not trace.response_logprobs[trace.loss_mask == 0].any()
    assert len(trained) == numbers["tokens_trained"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(made=sessions(), data=st.data())
def test_a_trajectory_does_not_depend_on_the_order_of_captured_exchanges(strategy, made, data):
    capture = made.capture()
    shuffled = data.draw(st.permutations(capture.exchanges))
    other = SessionCapture(
        capture.session, shuffled, dict(reversed(capture.deliveries.items())), capture.bodies,
        capture.outcome,
    )  # fmt: skip
    spec = BuilderSpec(strategy=strategy)
    assert trajectory_bytes(rebuild(other, builder=spec)) == trajectory_bytes(
        rebuild(capture, builder=spec)
    )


@given(made=sessions())
def test_all_builders_train_the_same_tokens(made):
    one, two, three = (
        stats(rebuild(made.capture(), builder=BuilderSpec(strategy=name))) for name in STRATEGIES
    )
    assert two == three
    assert one["tokens_trained"] == two["tokens_trained"]
    assert one["tokens_excluded"] == two["tokens_excluded"]


# ---- hand-made sessions


def built(made, config=None, strategy="prefix_merging"):
    return rebuild(made.capture(), builder=BuilderSpec(strategy=strategy, config=config or {}))


def a_hard_session(turns=200):
    """3 sub-agents, 2 compactions and a retry every tenth turn; ids of what must not train."""
    made, lost = MadeSession(texts=False), {}
    last = None
    for turn in range(turns):
        if turn in (70, 140):
            made.call(last, kind=Kind.COMPACTION, output=30)
            last = made.call(None, continues=last, root_reason="history_changed").exchange_id
        else:
            before = made.exchanges[-1].exchange_id if last else None
            last = made.call(last if before else None).exchange_id
        if turn % 10 == 9:
            tried = made.exchanges[-1]
            made.deliver(tried.exchange_id, DeliveryState.ABANDONED)
            lost[tried.exchange_id] = len(tried.output_ids)
            last = made.call(
                tried.parent_id, new=tried.suffix_ids, continues=tried.continues
            ).exchange_id
        if turn in (20, 90, 150):
            sub = None
            for _ in range(6):
                sub = made.call(sub, kind=Kind.SUBAGENT, continues=sub).exchange_id
    made.end()
    return made, lost


def test_a_session_with_sub_agents_compactions_and_retries_accounts_for_every_token():
    made, lost = a_hard_session()
    trajectory = built(made)
    numbers = stats(trajectory)
    captured = sum(len(e.output_ids) for e in made.exchanges)
    assert numbers["tokens_captured"] == captured
    assert numbers["tokens_excluded"] == {"abandoned": sum(lost.values())}
    assert numbers["tokens_trained"] == captured - sum(lost.values())
    # The agent from its root and after each compaction, and three sub-agents.
    assert len(trajectory.traces) == 3 + 3
    assert numbers["roots"] == 6
    assert [b["reason"] for b in numbers["breaks"]] == ["history_changed"] * 2


def test_traces_are_ordered_by_conversation_start():
    made = MadeSession()
    made.call(started_at=5.0, output=50)
    made.call(None, continues=None, started_at=3.0)
    made.call("x1", started_at=9.0)
    made.call("x1", started_at=8.0)
    traces = built(made).traces
    assert [trace.exchange_ids[-1] for trace in traces] == ["x3", "x2", "x0"]
    assert [trace.trace_id for trace in traces] == [f"s1/prefix_merging/{n}" for n in range(3)]


def test_trace_metadata_has_kind_agent_policy_versions_and_sampling_parameters():
    made = chain(1)
    made.call("x0", versions=(VersionSpan(9, 0, 5),))
    made.call(None, kind=Kind.SUBAGENT, continues=None, versions=())
    one, two = built(made).traces
    assert one.metadata == {
        "kind": "agent",
        "agent": "policy",
        "root_reason": "first",
        "tokens_trained": 10,
        "policy_versions": [7, 9],
        "temperatures": [1.0, 1.0],
        "seeds": [None, None],
        "cached_tokens": [0, 0],
        "sampling": {
            "temperature": [1.0],
            "top_p": [1.0],
            "top_k": [-1],
            "presence_penalty": [None],
            "frequency_penalty": [None],
            "min_p": [None],
            "repetition_penalty": [None],
            "logit_bias": [None],
        },
    }
    assert (two.metadata["kind"], two.metadata["policy_versions"]) == ("subagent", None)


def test_rebuild_uses_the_session_s_builder_settings_unless_others_are_given():
    made = chain(
        3, MadeSession(metadata={"builder": {"strategy": "per_request"}, "train": ["subagent"]})
    )
    assert rebuild(made.capture()).metadata["builder"]["strategy"] == "per_request"
    assert rebuild(made.capture()).traces == ()
    agents = rebuild(made.capture(), train=[Kind.AGENT])
    assert len(agents.traces) == 3
    assert agents.metadata["train"] == ["agent"]
    merged = rebuild(made.capture(), builder=BuilderSpec(), train=[Kind.AGENT])
    assert len(merged.traces) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            BuilderSpec(strategy="best"),
            "unknown builder 'best'; known: per_request, prefix_merging, tree",
        ),
        (BuilderSpec(config={"max_token": 3}), "builder prefix_merging: config: max_token"),
        (BuilderSpec(config={"max_tokens": 0}), "max_tokens"),
    ],
)
def test_a_wrong_builder_setting_is_refused_by_name(spec, message):
    with pytest.raises(ConfigError, match=message):
        rebuild(chain(1).capture(), builder=spec)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"builder": {"strategi": "x"}}, "session s1: builder: strategi"),
        ({"train": ["agents"]}, "session s1: train: 'agents'"),
    ],
)
def test_a_wrong_builder_setting_in_session_metadata_is_refused_by_name(metadata, message):
    with pytest.raises(ConfigError, match=message):
        rebuild(chain(1, MadeSession(metadata=metadata)).capture())


def test_a_custom_builder_is_loaded_by_its_import_path():
    trajectory = built(chain(2), strategy="bridle.trajectory.builders:per_request")
    assert len(trajectory.traces) == 2


def test_polar_s_end_of_turn_token_setting_is_accepted():
    assert len(built(chain(2), {"end_of_turn_token_id": 151645}).traces) == 1


@pytest.mark.parametrize(
    ("overlong", "traces", "trained"), [("truncate", 1, 10), ("mask", 1, 0), ("drop", 0, 0)]
)
def test_tokens_beyond_max_tokens_are_counted_as_truncated(overlong, traces, trained):
    trajectory = built(chain(3), {"max_tokens": 30, "overlong": overlong})
    numbers = stats(trajectory)
    assert len(trajectory.traces) == traces
    assert numbers["tokens_trained"] == trained
    assert numbers["tokens_excluded"] == {"truncated": 15 - trained}
    for trace in trajectory.traces:
        assert trace.metadata["tokens_trained"] == trained


def test_an_overlong_trace_trains_in_full_and_is_counted_with_overlong_keep():
    trajectory = built(chain(3), {"max_tokens": 30, "overlong": "keep"})
    numbers = stats(trajectory)
    assert (numbers["tokens_trained"], numbers["overlong"]) == (15, 1)


def cut_sessions():
    """Return how a session can be cut, with what its numbers call it."""
    by_length = chain(1)
    by_length.call("x0", finish_reason=FinishReason.LENGTH)
    by_length.end()
    by_time, by_limit = chain(2), chain(2)
    by_time.end(None, status="TIMEOUT")
    by_limit.end(0.0, status="ERROR", cause="limit")
    return [(by_length, "length"), (by_time, "timeout"), (by_limit, "limit")]


@pytest.mark.parametrize(("made", "why"), cut_sessions(), ids=lambda value: str(value)[:7])
@pytest.mark.parametrize(
    ("setting", "traces", "trained"), [("keep", 1, 10), ("mask", 1, 0), ("drop", 0, 0)]
)
def test_a_truncated_session_is_kept_masked_or_dropped_as_the_setting_says(
    made, why, setting, traces, trained
):
    trajectory = built(made, {"truncated": setting})
    numbers = stats(trajectory)
    assert (len(trajectory.traces), numbers["traces"]) == (traces, traces)
    assert (numbers["tokens_trained"], numbers["truncated"]) == (trained, why)
    assert numbers["tokens_excluded"] == ({} if trained else {"truncated": 10})
    for trace in trajectory.traces:
        assert trace.loss_mask.sum() == trace.metadata["tokens_trained"] == trained
    without = rebuild(
        dataclasses.replace(made.capture(), outcome=None),
        builder=BuilderSpec(config={"truncated": setting}),
    )
    assert trajectory_bytes(with_outcome(without, made.outcome)) == trajectory_bytes(trajectory)


def test_a_session_whose_side_call_hit_the_length_limit_is_not_truncated():
    made = chain(2)
    made.call("x1", kind=Kind.SIDE, finish_reason=FinishReason.LENGTH)
    made.end()
    numbers = stats(built(made, {"truncated": "drop"}))
    assert (numbers["truncated"], numbers["tokens_trained"]) == (None, 10)


def test_token_rewards_are_attached_only_when_their_length_matches_the_trace():
    made = chain(2)
    made.end(0.5, metadata={"token_rewards": [[0.25] * 20]})
    trajectory = built(made)
    (trace,) = trajectory.traces
    assert trace.token_rewards.tolist() == [0.25] * 20
    assert trace.reward == 0.5
    made.end(0.5, metadata={"token_rewards": [[0.25] * 19]})
    trajectory = built(made)
    assert trajectory.traces[0].token_rewards is None
    assert "token_rewards_ignored" in trajectory.metadata


def test_a_damaged_exchange_excludes_its_descendants_and_the_rest_is_built():
    made = chain(2)
    made.call(None, continues=None)
    made.call("x2")
    capture = dataclasses.replace(
        made.capture(),
        exchanges=[made.exchanges[0], made.exchanges[1], made.exchanges[3]],
        damaged=[Damaged("x2", 5, "ValueError")],
    )
    trajectory = rebuild(capture)
    numbers = stats(trajectory)
    assert numbers["exchanges"] == 4
    assert (numbers["tokens_captured"], numbers["tokens_trained"]) == (20, 10)
    assert numbers["tokens_excluded"] == {"broken": 10}
    assert {b["exchange"]: b["reason"] for b in numbers["breaks"]} == {
        "x2": "damaged_row",
        "x3": "unknown_parent",
    }


# ---- media

IMAGE = "data:image/png;base64,aGk="


def an_image_session():
    """One call with an image in its message."""
    made = MadeSession()

    def shown(source):
        part = {"type": "image_url", "image_url": {"url": source}}
        return {"role": "user", "content": [{"type": "text", "text": "see"}, part]}

    made.call(first_message=shown(IMAGE))
    return made


def test_a_trace_lists_its_images_with_their_placeholder_positions():
    made = an_image_session()
    (plain,) = built(made).traces
    (part,) = plain.media
    digest = part["digest"]
    place = {"digest": digest, "start": 2, "length": 4, "grid": [1, 2, 2]}
    for extra in ({"media": [place]}, {"engine": {"media": [place]}}):
        made.exchanges[0] = dataclasses.replace(made.exchanges[0], extra=extra)
        (trace,) = built(made).traces
        assert trace.media == [{"media_type": "image/png", **place}]
        assert trace_json(trace)["media"] == [{"media_type": "image/png", **place}]
    made.exchanges[0] = dataclasses.replace(made.exchanges[0], extra={})
    (trace,) = built(made).traces
    assert trace.media == [{"digest": digest, "media_type": "image/png"}]


def test_a_content_block_of_unknown_type_is_not_listed_as_an_image():
    made = MadeSession()
    block = {"type": "searched", "query": "q"}
    made.call(first_message={"role": "user", "content": [{"type": "text", "text": "see"}, block]})
    (trace,) = built(made).traces
    assert trace.prompt_messages
    assert [*trace.media] == []


def test_a_session_without_an_outcome_has_status_running():
    trajectory = built(chain(1))
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("RUNNING", None, None)


@given(made=sessions())
def test_adding_the_outcome_later_is_the_same_as_building_with_it(made):
    made.outcome = None
    without = rebuild(made.capture())
    outcome = made.end(0.75, status="TIMEOUT", error="late")
    assert trajectory_bytes(with_outcome(without, outcome)) == trajectory_bytes(
        rebuild(made.capture())
    )


def test_a_trace_has_its_own_reward_or_else_the_session_s():
    made = chain(1)
    made.call(None, continues=None)
    made.end(0.5, trace_rewards=(0.25, 1.0))
    assert [trace.reward for trace in built(made).traces] == [0.25, 1.0]
    made.end(0.5)
    assert [trace.reward for trace in built(made).traces] == [0.5, 0.5]


def test_trace_rewards_of_another_count_than_the_traces_are_ignored():
    made = chain(1)
    made.end(0.5, trace_rewards=(0.25, 1.0))
    trajectory = built(made)
    assert [trace.reward for trace in trajectory.traces] == [0.5]
    assert trajectory.metadata["trace_rewards_ignored"] == "2 rewards for 1 traces"


def test_a_missing_request_body_loses_the_messages_and_no_token():
    made = chain(2)
    made.bodies.clear()
    (trace,) = built(made).traces
    assert trace.loss_mask.sum() == 10
    assert trace.prompt_messages == []
    assert "exchange x0: cannot read its request" in trace_metadata(trace)["messages_missing"]


def test_the_only_conversation_of_a_session_trains_although_a_rule_marks_it_as_a_side_call():
    made = MadeSession()
    made.call(kind=Kind.SIDE, extra={"kind_rule": "title"})
    assert built(made).metadata["stats"]["tokens_trained"] == 5
    made.call()
    assert built(made).metadata["stats"]["tokens_excluded"] == {"kind": 5}
