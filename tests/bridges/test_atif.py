"""Sessions as ATIF documents; the package `atif` takes them (suite `train`)."""

import dataclasses
import json

import numpy as np
import pytest
from tests.bridges.by_hand import CALL, CALLS, DONE, RESULT, SYSTEM, TOOLS, session, trace
from tests.capture.made import MadeSession

from bridle.bridges.examples import examples_of
from bridle.bridges.traces import SCHEMA, write_atif
from bridle.trajectory import rebuild
from bridle.types import LogprobMode

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def capture_of(harness="pi"):
    made = MadeSession("s0")
    made.record = dataclasses.replace(
        made.record, metadata={"harness": harness, "harness_version": "1.2"}
    )
    made.call(exchange_id="e0")
    made.call("e0", exchange_id="e1")
    made.end(1.0)
    return made.capture()


def document(tmp_path, *traces, **fields):
    trajectory = session("s0", 1.0, *traces, **fields)
    path = tmp_path / "a.jsonl"
    assert write_atif(path, [(capture_of(), trajectory, examples_of(trajectory))]) == 1
    (line,) = path.read_text().splitlines()
    return json.loads(line)


def odd():
    """Everything that the format does not know as it comes."""
    calls = [
        {**CALL, "id": "c2", "function": {"name": "bash", "arguments": "not JSON"}},
        {**CALL, "id": "c3", "function": {"name": "bash", "arguments": "[1]"}},
    ]
    return trace(
        "odd",
        prompt_messages=[
            SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE, SOUND]},
            DONE,
            {"role": "user", "content": "go on"},
        ],
        response_messages=[
            {"role": "assistant", "content": "First."},
            {**CALLS, "tool_calls": calls},
            RESULT,
            DONE,
        ],
        loss_mask=trace().loss_mask * 0,
        tools=None,
    )


def test_atif_agent_steps_have_exact_token_ids_metrics_and_tool_results(tmp_path):
    parsed = document(tmp_path, trace())
    assert (parsed["schema_version"], parsed["session_id"], parsed["trajectory_id"]) == (
        *(SCHEMA, "s0", "t0"),
    )
    assert parsed["agent"] == {
        "name": "pi", "version": "1.2", "model_name": "policy", "tool_definitions": TOOLS,
    }  # fmt: skip
    assert [step["source"] for step in parsed["steps"]] == ["system", "user", "agent", "agent"]
    assert [step["step_id"] for step in parsed["steps"]] == [1, 2, 3, 4]
    calls, done = parsed["steps"][2:]
    assert calls["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [4, 5],
        "logprobs": [-0.5, -0.5],
    }
    assert calls["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "bash", "arguments": {"a": 1}}
    ]
    assert calls["observation"] == {"results": [{"content": "ok", "source_call_id": "c1"}]}
    assert calls["reasoning_content"] == "hm"
    assert done["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert parsed["final_metrics"] == {
        "total_steps": 4, "total_prompt_tokens": 10, "total_completion_tokens": 5,
    }  # fmt: skip
    assert parsed["extra"]["reward"] == 1.0


def test_atif_has_other_traces_as_subagent_trajectories_and_keeps_unknown_content(tmp_path):
    parsed = document(tmp_path, trace(), odd())
    (other,) = parsed["subagent_trajectories"]
    user, given, _, calls, done = other["steps"][1:]
    assert user["message"][1] == {
        "type": "image",
        "source": {"media_type": "image/png", "path": URL},
    }
    assert json.loads(user["message"][2]["text"]) == SOUND
    assert given["is_copied_context"] is True
    assert calls["message"] == "First."
    assert [c["arguments"] for c in calls["tool_calls"]] == [
        {"arguments": "not JSON"}, {"arguments": [1]},
    ]  # fmt: skip
    assert calls["observation"]["results"] == [{"content": "ok"}]
    assert done["metrics"]["extra"] == {"loss_mask": [0, 0, 0]}


def test_an_atif_step_of_which_a_part_trains_has_a_mask_in_place_of_logprobs(tmp_path):
    mask = np.array([1, 0, 0, 0, 1, 1, 1], np.uint8)
    calls, done = document(tmp_path, trace(loss_mask=mask))["steps"][2:]
    assert (calls["metrics"]["extra"], "logprobs" in calls["metrics"]) == (
        {"loss_mask": [1, 0]},
        False,
    )
    assert len(done["metrics"]["logprobs"]) == 3


def test_atif_steps_of_messages_without_turns_have_no_metrics(tmp_path):
    parsed = document(tmp_path, trace(response_messages=[DONE, RESULT, DONE, RESULT, DONE]))
    assert not any("metrics" in step for step in parsed["steps"])
    assert parsed["final_metrics"] == {"total_steps": 5}


def test_a_session_without_token_ids_is_written_as_atif_text_steps(tmp_path):
    made = MadeSession()
    made.call(output=0, logprob_mode=LogprobMode.NONE)
    made.end(1.0)
    capture = made.capture()
    trajectory = rebuild(capture)
    path = tmp_path / "a.jsonl"
    taken = [(capture, trajectory, examples_of(trajectory, capture)), (capture, trajectory, [])]
    assert write_atif(path, taken) == 1
    parsed = json.loads(path.read_text())
    assert [step["source"] for step in parsed["steps"]] == ["system", "user", "agent"]
    assert parsed["agent"]["name"] == "unknown"


@pytest.mark.train
@pytest.mark.timeout(180)
def test_the_atif_package_validates_every_document(tmp_path):
    from atif import Trajectory

    read = Trajectory.model_validate(document(tmp_path, trace(), odd()))
    assert read.steps[2].metrics.completion_token_ids == [4, 5]
    assert read.subagent_trajectories[0].has_multimodal_content()
