import json
from dataclasses import replace

import pytest
from tests.dialects.exchange import CUT, HEAD, TEXT, USAGE, events, synthetic

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import Route
from bridle.errors import RequestError
from bridle.types import Dialect

WIRE = DIALECTS[Dialect.OPENAI_CHAT]
TOLD = replace(TEXT, token_logprobs=(("Hello", -0.5), (" there.", -0.25)))


def route(path="/v1/completions") -> Route:
    found = recognise("POST", path, "", {})
    assert found is not None
    return found


def read(**fields):
    body = {"model": "m", "prompt": "go", **fields}
    return WIRE.parse(route(), json.dumps(body).encode(), {})


def test_a_prompt_is_a_text_or_ids():
    assert read().raw_prompt == "go"
    assert read(prompt=["go"]).raw_prompt == "go"
    assert read(prompt=[1, 2]).raw_prompt == read(prompt=[[1, 2]]).raw_prompt == (1, 2)
    assert read(prompt="\ud800x").raw_prompt == "\ufffdx"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"model": None}, "model"),
        ({"logprobs": "all"}, "logprobs"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_is_wrong_or_not_served_is_named(fields, param):
    with pytest.raises(RequestError) as told:
        read(**fields)
    assert told.value.param == param
    assert told.value.status == 400


def test_a_body_without_a_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt"):
        WIRE.parse(route(), b'{"model":"m"}', {})


def test_the_budget_is_the_api_s_own_where_none_is_asked_for():
    assert read().sampling.max_tokens == 16
    assert read(max_tokens=5).sampling.max_tokens == 5
    assert read(n=1, best_of=1, echo=False, suffix="").sampling == read().sampling


def test_a_stored_request_reads_as_the_same_message_again():
    request = read(max_tokens=5)
    body = WIRE.body(request.head, request.message_spans, request.tools_span)
    again = WIRE.parse(route("/v1/chat/completions"), body, {})
    assert again.messages == request.messages
    assert again.span_digests == request.span_digests
    whole = WIRE.reply_json(request, HEAD, TEXT, USAGE)
    [message] = WIRE.reply_messages(whole)
    assert message.text == TEXT.content


def test_logprobs_are_parallel_lists_where_they_were_asked_for():
    request = read(logprobs=1)
    assert request.logprobs
    assert not read().logprobs
    [choice] = json.loads(WIRE.reply_json(request, HEAD, TOLD, USAGE))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " there."],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"Hello": -0.5}, {" there.": -0.25}],
        "text_offset": [0, 5],
    }
    last = [event.data for event in events(synthetic(WIRE.stream(request, HEAD), TOLD))][-2]
    assert json.loads(last)["choices"][0]["logprobs"] == choice["logprobs"]


def test_a_stream_says_what_the_whole_says():
    for reply in (TEXT, CUT):
        request = read(stream=True, stream_options={"include_usage": True})
        [whole] = json.loads(WIRE.reply_json(request, HEAD, reply, USAGE))["choices"]
        told = [event.data for event in events(synthetic(WIRE.stream(request, HEAD), reply))]
        assert told.pop() == "[DONE]"
        *pieces, counted = [json.loads(data) for data in told]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]
        assert pieces[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
        assert counted["usage"]["total_tokens"] == 18
        assert counted["choices"] == []


def test_a_failure_after_the_start_is_a_cut():
    encoder = WIRE.stream(read(), HEAD)
    assert encoder.open() == b""
    assert encoder.error(RequestError("late")) is None
    assert encoder.reasoning("hm") == encoder.tool_call(0, "c", "f", "{}") == b""
    assert json.loads(events(encoder.keepalive())[0].data)["choices"][0]["text"] == ""
