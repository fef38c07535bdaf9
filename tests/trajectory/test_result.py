"""Results in JSON: Polar's names, our additions, the same bytes for the same facts."""

import json
from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.made import MadeSession
from tests.trajectory.conversations import sessions

from bridle.trajectory import rebuild
from bridle.trajectory.result import (
    encode,
    trace_json,
    trajectory_bytes,
    trajectory_json,
    trajectory_of,
)

BREAKS = "a\u2028b\u2029c\u0085d"


def trajectory(**outcome):
    made = MadeSession(metadata={"builder": {"strategy": "prefix_merging"}})
    made.call(tools=[{"type": "function", "function": {"name": "bash", "parameters": {}}}])
    made.call("x0")
    made.end(**outcome)
    return rebuild(made.capture())


def test_a_trace_has_the_names_and_types_that_trainers_read():
    (trace,) = trajectory_json(trajectory(reward=0.5))["traces"]
    names = list(trace)
    assert names[:10] == [
        *("prompt_ids", "response_ids", "loss_mask", "prompt_messages", "response_messages"),
        *("tools", "finish_reason", "response_logprobs", "reward", "metadata"),
    ]
    assert len(trace["prompt_ids"]) == 10
    assert len(trace["response_ids"]) == len(trace["loss_mask"]) == 20
    assert len(trace["response_logprobs"]) == 20
    assert set(trace["loss_mask"]) == {0, 1}
    assert (trace["finish_reason"], trace["reward"]) == ("stop", 0.5)
    assert trace["tools"][0]["function"]["name"] == "bash"
    assert [m["role"] for m in trace["prompt_messages"]] == ["system", "user"]
    assert [m["role"] for m in trace["response_messages"]] == ["assistant", "user", "assistant"]


def test_trajectory_json_has_polar_s_field_names_and_counts():
    value = trajectory_json(trajectory(reward=0.5))
    assert list(value)[:4] == ["status", "metadata", "traces", "error"]
    assert (value["status"], value["reward"], value["error"]) == ("COMPLETED", 0.5, None)
    assert value["metadata"]["trace_count"] == 1
    assert value["metadata"]["record_count"] == 2
    assert value["metadata"]["reconstruction_stats"]["completions_merged"] == 2
    assert value["mask_reasons"][value["traces"][0]["reasons"][0]] == "trained"


@given(st.lists(st.floats(-30, 0, width=32), min_size=5, max_size=5))
def test_logprobs_read_back_to_the_same_float32(values):
    made = MadeSession()
    made.call(logprobs=np.array(values, np.float32))
    (trace,) = rebuild(made.capture()).traces
    text = encode(trace_json(trace))
    read = np.array(json.loads(text)["response_logprobs"], np.float32)
    assert read.tobytes() == np.array(values, np.float32).tobytes()


def test_logprobs_are_written_in_their_shortest_form():
    made = MadeSession()
    made.call(logprobs=np.array([-0.1, -1.2345678, -1e-7, 0, -3], np.float32))
    (trace,) = rebuild(made.capture()).traces
    text = encode(trace_json(trace)).decode()
    assert '"response_logprobs":[-0.1,-1.2345678,-1e-7,0.0,-3.0]' in text


@given(made=sessions())
def test_a_trajectory_is_read_back_from_its_json(made):
    written = trajectory_bytes(rebuild(made.capture()))
    assert trajectory_bytes(trajectory_of(json.loads(written))) == written


def test_a_trajectory_with_only_polar_s_fields_is_read():
    whole = json.loads(trajectory_bytes(trajectory(reward=1.0)))
    for name in ("session_id", "reward", "mask_reasons"):
        del whole[name]
    for name in list(whole["traces"][0])[10:]:
        del whole["traces"][0][name]
    whole["traces"][0]["response_logprobs"] = None
    read = trajectory_of(whole)
    (trace,) = read.traces
    assert trace.loss_mask.sum() == 10
    assert (trace.reasons == 1 - trace.loss_mask).all()
    assert not trace.response_logprobs.any()
    assert set(trace.versions.tolist()) == {-1}


def test_json_without_the_fields_of_a_trajectory_is_refused():
    with pytest.raises(KeyError):
        trajectory_of({"status": "COMPLETED"})


def test_text_that_utf8_cannot_hold_is_escaped():
    value = {"\udc80": ["a\ud800b", ("c", 1.5, None)], "n": {"m": True}}
    assert json.loads(encode(value)) == {
        "\\udc80": ["a\\ud800b", ["c", 1.5, None]],
        "n": {"m": True},
    }


def test_trajectory_json_is_one_line_although_its_text_has_unicode_line_separators():
    made = MadeSession()
    made.call(output=2)
    trajectory = replace(rebuild(made.capture()), error=BREAKS)
    (line,) = trajectory_bytes(trajectory).decode().splitlines()
    assert json.loads(line)["error"] == BREAKS


def test_token_rewards_and_media_survive_a_json_round_trip():
    made = MadeSession()
    made.call(output=3)
    made.end(1.0, metadata={"token_rewards": [[0.1, 0.2, 0.3]]})
    one = rebuild(made.capture())
    media = [{"digest": "d", "start": 2, "length": 4}]
    one = replace(one, traces=(replace(one.traces[0], media=media),))
    (trace,) = trajectory_of(orjson.loads(trajectory_bytes(one))).traces
    assert trace.token_rewards is not None
    assert trace.token_rewards.tolist() == np.array([0.1, 0.2, 0.3], np.float32).tolist()
    assert trace.media == [{"digest": "d", "start": 2, "length": 4}]
    (plain,) = trajectory_of(orjson.loads(trajectory_bytes(rebuild(chain_of_one())))).traces
    assert (plain.token_rewards, plain.media) == (None, ())


def chain_of_one():
    made = MadeSession()
    made.call()
    return made.capture()
