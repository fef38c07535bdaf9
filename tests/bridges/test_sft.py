"""Accepted examples as lines: exact tokens beside messages with their tool calls."""

import json

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.bridges.examples import SftCounts, examples_of, write_lines, write_sft
from bridle.errors import BridleError
from bridle.trajectory import rebuild
from bridle.types import LogprobMode


def example(made):
    made.end(1.0)
    capture = made.capture()
    return examples_of(rebuild(capture), capture)[0]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_sft_line_has_exact_token_ids_a_loss_mask_and_messages(tmp_path):
    made = MadeSession()
    made.call()
    made.call("x0")
    one = example(made)
    counts = write_sft(tmp_path / "sft.jsonl", [one])
    (line,) = lines(tmp_path / "sft.jsonl")
    trace = one.trace
    prompt = len(trace.prompt_ids)
    assert line["input_ids"] == np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
    assert line["loss_mask"] == [0] * prompt + trace.loss_mask.tolist()
    assert (line["session_id"], line["task_id"], line["reward"]) == ("s1", "task-1", 1.0)
    assert [m["role"] for m in line["messages"]] == [
        *("system", "user", "assistant"),
        *("user", "assistant"),
    ]
    assert line["tools"] is None
    assert counts == SftCounts(examples=1, tokens=10)


def test_an_sft_example_of_a_text_session_has_no_token_ids(tmp_path):
    made = MadeSession()
    made.call(output=0, logprob_mode=LogprobMode.NONE)
    counts = write_sft(tmp_path / "sft.jsonl", [example(made)])
    (line,) = lines(tmp_path / "sft.jsonl")
    assert (line["input_ids"], line["loss_mask"]) == (None, None)
    assert counts == SftCounts(examples=1, tokens=0, texts=1)


def test_unicode_line_separators_do_not_split_an_sft_line(tmp_path):
    count = write_lines(tmp_path / "sft.jsonl", [{"text": "a\u2028b\u2029c\u0085d"}])
    text = (tmp_path / "sft.jsonl").read_text()
    assert len(text.splitlines()) == count == 1
    assert json.loads(text)["text"] == "a\u2028b\u2029c\u0085d"


def test_sft_messages_have_reasoning_and_tool_calls_in_openai_chat_form(tmp_path):
    made = MadeSession()
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    made.call(reply=json.dumps(reply).encode(), tools=tools)
    write_sft(tmp_path / "sft.jsonl", [example(made)])
    (line,) = lines(tmp_path / "sft.jsonl")
    assert line["messages"][-1] == {**message, "content": ""}
    assert json.loads(line["tools"]) == tools


def test_sft_messages_keep_content_parts(tmp_path):
    made = MadeSession()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, image]}
    made.call(first_message=message)
    write_sft(tmp_path / "sft.jsonl", [example(made)])
    (line,) = lines(tmp_path / "sft.jsonl")
    assert line["messages"][1] == message


def test_a_failed_sft_write_names_the_file_and_leaves_none(tmp_path):
    path = tmp_path / "no" / "sft.jsonl"
    with pytest.raises(BridleError, match=f"{path}: cannot write examples"):
        write_sft(path, [])

    def failing():
        made = MadeSession()
        made.call()
        yield example(made)
        raise OSError("disk")

    with pytest.raises(BridleError, match="disk"):
        write_sft(tmp_path / "sft.jsonl", failing())
    assert list(tmp_path.iterdir()) == []
