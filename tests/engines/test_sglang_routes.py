import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.shapes import PROMPT, request

from bridle.engines.base import GarbledError
from bridle.engines.sglang_routes import Ask, Reading, SglangRoute, call_body, experts_shape
from bridle.errors import EngineError
from bridle.types import FinishReason, Reply, Sampling, ToolCall, VersionSpan

ASK = Ask(model="m", room=1000)


def body(route=SglangRoute.GENERATE, ask=ASK, **fields):
    return json.loads(call_body(route, request(**fields), "rid", ask))


def triples(ids):
    return [[-float(id_), id_, None] for id_ in ids]


def piece(ids, count, **meta):
    """A chunk that tells `ids`, `count` having been sampled in all."""
    reply = {"finish_reason": None, "prompt_tokens": len(PROMPT), "completion_tokens": count,
            "output_token_logprobs": triples(ids), **meta}  # fmt: skip
    reply = {key: value for key, value in reply.items() if value is not ...}
    return json.dumps({"text": "x", "output_ids": ids, "meta_info": reply}).encode()


def reading(**options):
    return Reading(len(PROMPT), 7, **options)


DONE = {"finish_reason": {"type": "length", "length": 4}}


# ---- what is asked


def test_a_generate_request_has_prompt_ids_sampling_parameters_and_call_ids():
    wanted = Sampling(0.5, 0.9, 7, 11, 1, ("zz",), (5,), 3, 0.1, 0.2, 1.1, 0.3, {"5": -1.0})
    asked = body(sampling=wanted, session_id="s")
    assert asked["input_ids"] == PROMPT.tolist()
    assert asked["sampling_params"] == {
        "max_new_tokens": 11, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_new_tokens": 1,
        "stop": ["zz"], "stop_token_ids": [5], "sampling_seed": 3, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "min_p": 0.3,
        "logit_bias": {"5": -1.0},
    }  # fmt: skip
    assert (asked["rid"], asked["session_id"]) == ("rid", "s")
    assert (asked["return_logprob"], asked["return_prompt_token_ids"]) == (True, True)


def test_max_new_tokens_defaults_to_the_room_in_the_context():
    assert body(sampling=Sampling())["sampling_params"]["max_new_tokens"] == 1000
    short = body(sampling=Sampling(max_tokens=3, min_tokens=9))["sampling_params"]
    assert short["min_new_tokens"] == 3


@pytest.mark.parametrize(("budget", "every"), [(10, 1), (2000, 8), (1_000_000, 32)])
def test_the_stream_interval_of_cumulative_streams_grows_with_the_budget(budget, every):
    asked = body(stream=True, sampling=Sampling(max_tokens=budget))
    assert asked["sampling_params"]["stream_interval"] == every
    assert not asked["return_prompt_token_ids"]
    better = body(ask=Ask("m", 9, incremental=True), stream=True)
    assert "stream_interval" not in better["sampling_params"]


def test_fields_that_the_server_does_not_support_are_not_sent():
    assert (
        "sampling_seed"
        not in body(ask=Ask("m", 9, seeds=False), sampling=Sampling(seed=1))["sampling_params"]
    )
    assert body(ask=Ask("m", 9, prompt=True))["logprob_start_len"] == 0
    assert body(ask=Ask("m", 9, experts=True))["return_routed_experts"]
    assert "return_routed_experts" not in body(ask=Ask("m", 9))


@pytest.mark.parametrize("schema", [{"type": "array"}, {}])
def test_a_json_schema_grammar_is_sent_on_the_generate_and_chat_routes(schema):
    asked = body(grammar={"json_schema": schema})
    assert json.loads(asked["sampling_params"]["json_schema"]) == (schema or {"type": "object"})
    chat = body(SglangRoute.CHAT, grammar={"json_schema": schema})
    reply = chat["response_format"]["json_schema"]["schema"]
    assert reply == (schema or {"type": "object"})


def test_a_chat_call_has_messages_tools_and_budgets():
    asked = body(SglangRoute.CHAT, messages=[{"role": "user", "content": "q"}], tools=[{"a": 1}],
                 sampling=Sampling(seed=3, max_tokens=5, min_tokens=2))  # fmt: skip
    assert asked["messages"] == [{"role": "user", "content": "q"}]
    assert asked["tools"] == [{"a": 1}]
    assert (asked["seed"], asked["max_tokens"], asked["min_tokens"]) == (3, 5, 2)
    assert (asked["return_token_ids"], asked["return_meta_info"]) == (True, True)
    assert body(SglangRoute.CHAT)["messages"]


# ---- what is read


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.data(), st.booleans())
def test_a_stream_gives_each_token_once_in_either_form(ids, data, incremental):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=8)) | {len(ids)})
    read = reading()
    got, values, start = [], [], 0
    for end in cuts:
        reply = ids[start:end] if incremental else ids[:end]
        chunk = read.read(piece(reply, end, **(DONE if end == len(ids) else {})))
        got += chunk.output_ids.tolist()
        values += chunk.logprobs.tolist()
        start = end
    assert got == ids
    assert values == [-float(one) for one in ids]
    assert chunk.finish_reason is FinishReason.LENGTH
    assert read.count == len(ids)


def test_a_chunk_that_runs_ahead_of_its_count_loses_nothing():
    read = reading()
    read.read(piece([5], 1))
    assert read.read(piece([5, 6, 7], 2)).output_ids.tolist() == [6, 7]
    assert read.read(piece([5, 6, 7], 3)).output_ids.tolist() == []
    assert read.read(piece([5, 6, 7, 8], 4)).output_ids.tolist() == [8]


def test_the_last_chunk_of_an_aborted_call_adds_no_token_twice():
    aborted = {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}
    read = reading()
    read.read(piece([5, 6], 2))
    last = read.read(piece([6], 2, output_token_logprobs=triples([5, 6]), **aborted))
    assert (last.output_ids.tolist(), last.finish_reason) == ([], FinishReason.ABORT)


def test_a_piece_that_repeats_other_tokens_is_refused():
    read = reading()
    read.read(piece([5, 6], 2))
    with pytest.raises(EngineError, match="they are others than before"):
        read.read(piece([5, 67, 8], 3))


def test_cumulative_pieces_without_a_token_count_are_recognised_by_their_prefix():
    read = reading()
    read.read(piece([5, 6], ...))
    assert read.read(piece([5, 6, 7], ...)).output_ids.tolist() == [7]
    other = reading()
    other.read(piece([5, 6], ...))
    assert other.read(piece([7], ...)).output_ids.tolist() == [7]


def test_logprobs_of_a_cumulative_piece_are_matched_by_position():
    read = reading()
    read.read(piece([5], 1))
    reply = [[-5.00, 5, "five"], [-6.0, 6, None]]
    assert read.read(piece([5, 6], 2, output_token_logprobs=reply)).logprobs.tolist() == [-6.0]


def test_ids_are_read_from_logprobs_if_a_reply_has_no_id_list():
    reply = {"text": "x", "meta_info": {"output_token_logprobs": triples([5, 6]), **DONE}}
    chunk = reading().read(json.dumps(reply).encode())
    assert (chunk.output_ids.tolist(), chunk.logprobs.tolist()) == ([5, 6], [-5.0, -6.0])


def test_a_chat_request_by_messages_is_sent_with_tools_and_without_ids():
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"messages": [{"role": "user", "content": "hi"}], "arguments": {"enable_thinking": 1}}
    made = body(SglangRoute.CHAT, tools=tools, calls=False, by_messages=True, **fields)
    assert "input_ids" not in made
    assert "tool_choice" not in made  # SGLang's template would not show the tools then
    assert (made["tools"], made["messages"]) == (tools, fields["messages"])
    assert (made["chat_template_kwargs"], made["return_prompt_token_ids"]) == (
        fields["arguments"],
        True,
    )


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"output_token_logprobs": triples([5])}, "gave 2 token ids, but 1 logprobs"),
        ({"output_token_logprobs": ...}, "gave 2 token ids, but 0 logprobs"),
        (
            {"output_token_logprobs": triples([5, 9])},
            "at position 1 it sampled id 6 and gives .* of id 9",
        ),
        ({"output_token_logprobs": [[None, 5, None], [-1.0, 6, None]]}, "no logprob for token 0"),
        ({"prompt_tokens": 3}, "under 3 prompt tokens"),
        (
            {"finish_reason": {"type": "content_filter"}},
            "ended a reply with the unknown finish reason 'content_filter'",
        ),
        ({"finish_reason": {"type": "abort", "message": "full", "status_code": 503}}, "full"),
        ({"weight_version": "best", **DONE}, "is not a number"),
        ({"finish_reason": 5}, "cannot be read"),
    ],
)
def test_unusable_replies_are_refused_with_the_reason(meta, says):
    with pytest.raises(EngineError, match=says):
        reading().read(piece([5, 6], 2, **meta))


@pytest.mark.parametrize(
    ("error", "status", "retryable"),
    [
        ({"message": "too long", "code": 400}, 400, False),
        ({"message": "busy", "code": 503}, 503, True),
        ({"message": "gone"}, None, True),
        ("gone", None, True),
    ],
)
def test_a_failure_inside_a_stream_has_its_status(error, status, retryable):
    with pytest.raises(EngineError, match="failed in mid-reply") as caught:
        reading().read(json.dumps({"error": error}).encode())
    assert (caught.value.status, caught.value.retryable) == (status, retryable)


def test_an_abort_with_an_error_status_is_retryable_by_that_status():
    for status, retryable in ((400, False), (429, True), (500, True)):
        reply = {"type": "abort", "message": "m", "status_code": status}
        with pytest.raises(EngineError) as caught:
            reading().read(piece([5], 1, finish_reason=reply))
        assert (caught.value.status, caught.value.retryable) == (status, retryable)


def test_a_reply_without_meta_info_is_refused_as_a_router_s():
    with pytest.raises(EngineError, match="router"):
        reading().read(b'{"text": "x"}')


def test_versions_are_read_per_token_or_per_reply_or_default_to_the_known_one():
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 2},
             {"version": "9", "start": 2, "end": 2}]  # fmt: skip
    reply = reading().read(piece([5, 6], 2, weight_versions=spans, **DONE))
    assert reply.versions == (VersionSpan(7, 0, 1), VersionSpan(9, 1, 2))
    assert reading().read(piece([5, 6], 2, weight_version="8", **DONE)).versions == (
        VersionSpan(8, 0, 2),
    )
    assert reading().read(piece([5, 6], 2, **DONE)).versions == (VersionSpan(7, 0, 2),)
    assert reading().read(piece([], 0, **DONE)).versions == ()


def test_prompt_ids_come_once_from_their_field_or_from_logprobs():
    read = reading()
    first = json.loads(piece([5], 1))
    both = json.dumps({**first, "prompt_token_ids": [1, 2]}).encode()
    assert read.read(both).prompt_ids_json == b"[1,2]"
    assert read.read(both).prompt_ids_json is None
    reply = piece([5], 1, input_token_logprobs=[[None, 3, None], [-1.0, 4, None]])
    assert reading().read(reply).prompt_ids_json == b"[3,4]"


def test_a_stop_string_is_reported_and_a_stop_token_is_not():
    for matched, text in (("stop!", "stop!"), (5, None), ([5], None)):
        ended = {"finish_reason": {"type": "stop", "matched": matched}}
        assert reading().read(piece([5], 1, **ended)).stop_text == text


@pytest.mark.parametrize(("reported", "read"), [(3, 3), (None, 0), (-2, 0)])
def test_cached_tokens_are_never_fewer_than_none(reported, read):
    assert reading().read(piece([5], 1, cached_tokens=reported)).cached_tokens == read


@pytest.mark.parametrize("incremental", [False, True])
def test_experts_come_with_the_last_piece_in_either_form(incremental):
    rows = np.arange(2 * (len(PROMPT) + 2), dtype=np.int32).reshape(-1, 2, 1)
    experts_text = base64.b64encode(rows[1:].tobytes()).decode()
    read = reading(experts_from=1, experts_shape=(2, 1))
    read.read(piece([5], 1))
    assert read.read(piece([6] if incremental else [5, 6], 2)).extra == {}
    ids = [7] if incremental else [5, 6, 7]
    experts = read.read(piece(ids, 3, routed_experts=experts_text, **DONE)).extra["routed_experts"]
    assert (experts.start, experts.rows.tolist()) == (1, rows[1:].tolist())


@pytest.mark.parametrize(
    ("experts", "fault"), [("AAA", "Incorrect padding"), ("AAAAAAAAAAAAAAAA", "cannot reshape")]
)
def test_experts_that_are_no_rows_are_refused(experts, fault):
    with pytest.raises(GarbledError, match=fault):
        reading(experts_shape=(2, 1)).read(piece([5], 1, routed_experts=experts, **DONE))


def test_the_shape_of_routed_experts_is_read_from_the_model_s_config():
    assert experts_shape({"num_hidden_layers": 3, "num_experts_per_tok": 2}) == (3, 2)
    nested = {"text_config": {"num_hidden_layers": 4, "num_experts_per_tok": 1}}
    assert experts_shape(nested) == (4, 1)
    assert experts_shape({"num_hidden_layers": 3}) is None


def test_a_chat_reply_is_read_as_the_server_parsed_it():
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [call, {"id": "x"}]}
    meta = {"output_token_logprobs": triples([5]), "finish_reason": {"type": "stop", "matched": 5}}
    choice = {"message": message, "response_token_ids": [5], "prompt_token_ids": [1, 2],
              "meta_info": meta}  # fmt: skip
    chunk = reading().read(json.dumps({"choices": [choice]}).encode())
    calls = (ToolCall("c", "f", "{}"),)
    assert chunk.reply == Reply("", "hm", calls, FinishReason.STOP)
    assert (chunk.output_ids.tolist(), chunk.prompt_ids_json) == ([5], b"[1,2]")


def test_a_reply_of_text_alone_is_read_when_not_strict():
    reply = {"text": "hello", "meta_info": {"finish_reason": {"type": "stop", "matched": None}}}
    read = reading(strict=False)
    chunk = read.read(json.dumps(reply).encode())
    assert chunk.reply == Reply("hello", None, (), FinishReason.STOP)
    assert len(chunk.output_ids) == len(chunk.logprobs) == 0
    assert not read.has_ids


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data):
    for reply in (data, b'{"meta_info":' + data + b"}", b'{"meta_info":{"x":' + data + b"}}"):
        try:
            chunk = reading().read(reply)
        except EngineError:
            continue
        assert isinstance(chunk.output_ids, np.ndarray)
