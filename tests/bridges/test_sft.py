"""Accepted trajectories become supervised examples with exact tokens."""

import json

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.bridges.sft import SftCounts, export_sft
from bridle.errors import BridleError
from bridle.trajectory import rebuild
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode


def trajectory(session_id="s1", reward=1.0, status="COMPLETED", turns=2):
    made = MadeSession(session_id)
    for turn in range(turns):
        made.call(f"x{turn - 1}" if turn else None)
    made.end(reward, status=status)
    return rebuild(made.capture())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_the_exact_tokens_and_where_they_train(tmp_path):
    one = trajectory()
    counts = export_sft(tmp_path / "sft.jsonl", [one])
    (line,) = lines(tmp_path / "sft.jsonl")
    (trace,) = one.traces
    prompt = len(trace.prompt_ids)
    assert line["input_ids"] == np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
    assert line["loss_mask"] == [0] * prompt + trace.loss_mask.tolist()
    assert (line["session_id"], line["task_id"], line["reward"]) == ("s1", "task-1", 1.0)
    assert [m["role"] for m in line["messages"]] == [
        *("system", "user", "assistant"),
        *("user", "assistant"),
    ]
    assert counts == SftCounts(examples=1, tokens=10, rejected=0, too_long=0)


def test_only_accepted_trajectories_are_written(tmp_path):
    offered = [
        trajectory("good", 1.0),
        trajectory("weak", 0.5),
        trajectory("unknown", None),
        trajectory("late", 1.0, status="TIMEOUT"),
        trajectory("empty", 1.0, turns=0),
    ]
    counts = export_sft(tmp_path / "sft.jsonl", offered)
    assert [line["session_id"] for line in lines(tmp_path / "sft.jsonl")] == ["good"]
    assert counts.rejected == 4
    counts = export_sft(tmp_path / "sft.jsonl", offered, min_reward=0.5)
    assert [line["session_id"] for line in lines(tmp_path / "sft.jsonl")] == ["good", "weak"]
    assert (counts.examples, counts.rejected) == (2, 3)


def test_long_traces_are_left_out_and_counted(tmp_path):
    offered = [trajectory("short", turns=1), trajectory("long", turns=5)]
    counts = export_sft(tmp_path / "sft.jsonl", offered, max_tokens=20)
    assert [line["session_id"] for line in lines(tmp_path / "sft.jsonl")] == ["short"]
    assert counts == SftCounts(examples=1, tokens=5, rejected=0, too_long=1)


def test_a_session_of_text_gives_each_of_its_conversations_without_ids(tmp_path):
    made = MadeSession()
    unpaired = {"output": 0, "logprob_mode": LogprobMode.NONE}
    made.call(**unpaired)
    made.call("x0", tools=[{"type": "function", "function": {"name": "bash"}}], **unpaired)
    made.call(**unpaired, kind=Kind.SUBAGENT)
    made.call(**unpaired, kind=Kind.SIDE)
    made.call(**unpaired, state=DeliveryState.ABANDONED)
    made.call(**unpaired, extra={"other_model": "judge"})
    made.call(**unpaired, finish_reason=FinishReason.ABORT)
    made.end(1.0)
    capture = made.capture()
    trajectory = rebuild(capture)
    path = tmp_path / "sft.jsonl"
    counts = export_sft(path, [trajectory], captures={"s1": capture})
    assert counts == SftCounts(examples=2, tokens=0, rejected=0, too_long=0, texts=2)
    main, agent = lines(path)
    assert [m["role"] for m in main["messages"]] == ["system", *["user", "assistant"] * 2]
    assert [m["role"] for m in agent["messages"]] == ["system", "user", "assistant"]
    assert (main["input_ids"], main["loss_mask"], main["reward"]) == (None, None, 1.0)
    assert (main["session_id"], main["task_id"]) == ("s1", "task-1")
    assert [tool["function"]["name"] for tool in main["tools"]] == ["bash"]
    assert main["trace_id"] != agent["trace_id"]
    assert export_sft(path, [trajectory]).rejected == 1
    assert export_sft(path, [trajectory], min_reward=2.0, captures={"s1": capture}).rejected == 1


def test_a_session_with_tokens_gives_no_texts_beside_them(tmp_path):
    made = MadeSession()
    made.call()
    made.call(output=0, logprob_mode=LogprobMode.NONE)
    made.end(1.0)
    capture = made.capture()
    counts = export_sft(tmp_path / "a.jsonl", [rebuild(capture)], captures={"s1": capture})
    assert (counts.examples, counts.texts) == (1, 0)


def test_reasoning_and_calls_stand_as_text(tmp_path):
    made = MadeSession()
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    message = {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    made.call(reply=json.dumps(reply).encode())
    made.end()
    export_sft(tmp_path / "sft.jsonl", [rebuild(made.capture())])
    (line,) = lines(tmp_path / "sft.jsonl")
    assert line["messages"][-1] == {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nLooking.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    }


def test_content_parts_stay_parts(tmp_path):
    made = MadeSession()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "see"}, image]
    message = {"role": "user", "content": parts}
    made.call(first_message=message)
    made.end()
    export_sft(tmp_path / "sft.jsonl", [rebuild(made.capture())])
    (line,) = lines(tmp_path / "sft.jsonl")
    assert line["messages"][1] == message


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    path = tmp_path / "no" / "sft.jsonl"
    with pytest.raises(BridleError, match=f"{path}: cannot write examples"):
        export_sft(path, [])

    def failing():
        yield trajectory()
        raise OSError("disk")

    with pytest.raises(BridleError, match="disk"):
        export_sft(tmp_path / "sft.jsonl", failing())
    assert list(tmp_path.iterdir()) == []
