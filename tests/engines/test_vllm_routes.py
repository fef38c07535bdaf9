import json
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.fakes import Fake
from tests.engines.stub import sampled

from bridle.engines.base import GarbledError, GenerateRequest, Picture
from bridle.engines.ids import ArrayIds
from bridle.engines.pool_replica import Replica, RoutedCall
from bridle.engines.vllm_routes import MessageText, VllmRoute, call_parts, read_answer, read_answers
from bridle.errors import EngineError
from bridle.experts import npy_text
from bridle.types import FinishReason, Reply, Sampling, ToolCall, VersionSpan

PROMPT = [5, 6, 7]
ROWS = np.arange(8, dtype=np.int16).reshape(4, 2, 1)
SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=-1, max_tokens=9, stop=("a",), stop_token_ids=(3,), seed=4
)


def request(**fields):
    fields.setdefault("sampling", SAMPLING)
    return GenerateRequest("r", ArrayIds(np.array(PROMPT)), **fields)


def body(route, made, *, token_in=True):
    return json.loads(b"".join(call_parts(route, made, "m", room=50, token_in=token_in)))


COMMON = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 9, "stop": ["a"],
          "stop_token_ids": [3], "seed": 4}  # fmt: skip


def test_a_chat_call_carries_its_ids_beside_a_stand_in_message():
    read = body(VllmRoute.CHAT, request(session_id="s"))
    assert read == {
        "model": "m", "request_id": "r", "session_id": "s", **COMMON,
        "messages": [{"role": "user", "content": "."}],
        "kv_transfer_params": {"prompt_token_ids": PROMPT},
        "return_token_ids": True, "return_tokens_as_token_ids": True,
        "return_weight_versions": True, "logprobs": True, "top_logprobs": 0,
        "include_reasoning": True,
    }  # fmt: skip


def test_a_chat_call_without_token_input_sends_messages_and_tools():
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = request(messages=messages, tools=tools, model="other", stream=True)
    read = body(VllmRoute.CHAT, made, token_in=False)
    assert (read["messages"], read["tools"], read["model"]) == (messages, tools, "other")
    assert not {"kv_transfer_params", "tool_choice"} & read.keys()
    unwanted = body(VllmRoute.CHAT, replace(made, calls=False), token_in=False)
    assert (unwanted["tools"], unwanted["tool_choice"]) == (tools, "none")
    assert (read["stream"], read["stream_options"]) == (True, {"include_usage": True})


def test_a_token_call_keeps_sampling_in_its_own_object():
    read = body(VllmRoute.GENERATE, request(grammar={"json_schema": {"type": "object"}}))
    assert read["token_ids"] == PROMPT
    assert read["sampling_params"] == {
        **COMMON, "logprobs": 0, "structured_outputs": {"json": {"type": "object"}}
    }  # fmt: skip
    assert read["return_token_ids"] is True


@pytest.mark.parametrize("route", VllmRoute)
def test_every_route_takes_min_p_repetition_penalty_and_logit_bias(route):
    sampling = Sampling(min_p=0.3, repetition_penalty=1.1, logit_bias={"5": -1.0})
    read = body(route, request(sampling=sampling))
    read = read.get("sampling_params", read)
    assert (read["min_p"], read["repetition_penalty"]) == (0.3, 1.1)
    assert read["logit_bias"] == {"5": -1.0}


def test_images_go_beside_ids_with_one_placeholder_each():
    ids = [1, 8, 9, 9, 9, 8, 2, 9, 9, 3]
    pictures = (Picture("data:a", 1, 5), Picture("data:b", 7, 2))
    made = GenerateRequest("r", ArrayIds(np.array(ids)), SAMPLING, pictures=pictures)
    read = body(VllmRoute.GENERATE, made)
    assert read["token_ids"] == [1, 9, 2, 9, 3]
    assert read["content_parts"] == [
        {"type": "image_url", "url": "data:a"},
        {"type": "image_url", "url": "data:b"},
    ]
    assert "content_parts" not in body(VllmRoute.GENERATE, request())


def test_a_completion_call_has_ids_for_a_prompt():
    read = body(VllmRoute.COMPLETIONS, request())
    assert (read["prompt"], read["logprobs"]) == (PROMPT, 0)


@pytest.mark.parametrize("route", [VllmRoute.GENERATE, VllmRoute.COMPLETIONS])
def test_routes_that_default_to_sixteen_tokens_get_the_context_left(route):
    read = body(route, request(sampling=Sampling()))
    assert (read.get("sampling_params") or read)["max_tokens"] == 50
    assert "max_tokens" not in body(VllmRoute.CHAT, request(sampling=Sampling()))


def test_a_structural_tag_goes_as_it_is_where_the_route_takes_one():
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    grammar = {"structural_tag": tag}
    assert body(VllmRoute.CHAT, request(grammar=grammar))["response_format"] == tag
    assert body(VllmRoute.COMPLETIONS, request(grammar=grammar))["response_format"] == tag
    params = body(VllmRoute.GENERATE, request(grammar=grammar))["sampling_params"]
    assert json.loads(params["structured_outputs"]["structural_tag"]) == tag


def test_a_grammar_becomes_a_response_format():
    schema = body(VllmRoute.CHAT, request(grammar={"json_schema": {"a": 1}}))["response_format"]
    assert schema == {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"a": 1}}}
    free = body(VllmRoute.COMPLETIONS, request(grammar={"json_schema": {}}))["response_format"]
    assert free == {"type": "json_object"}


# ---- replies


def answer(compact=True, **changes):
    separators = (",", ":") if compact else None
    return json.dumps(sampled(PROMPT, **changes), separators=separators).encode()


def reading(compact=True, **changes):
    return read_answer(answer(compact, **changes))


@pytest.mark.parametrize("compact", [True, False])
def test_a_reply_is_read_into_arrays_and_its_prompt_stays_text(compact):
    read = reading(compact)
    chunk = read.chunk
    assert (chunk.output_ids.tolist(), chunk.output_ids.dtype) == ([7, 8], np.int32)
    assert (chunk.logprobs.tolist(), chunk.logprobs.dtype) == ([-0.5, -1.5], np.float32)
    assert json.loads(chunk.prompt_ids_json) == PROMPT
    assert (chunk.finish_reason, chunk.stop_text, read.paired) == (FinishReason.STOP, None, True)
    assert read.spans is None


SENT = b"[5,6,7]"


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({}, SENT),
        ({"stop_reason": '"prompt_token_ids":[5,6,7]'}, SENT),
        ({"prompt_token_ids": None}, None),
        ({"prompt_token_ids": []}, b"[]"),
        ({"prompt_token_ids": [5, 6]}, b"[5,6]"),
        ({"prompt_token_ids": [5, 6, 7, 8]}, b"[5,6,7,8]"),
        ({"prompt_token_ids": [5, 6, 9]}, b"[5,6,9]"),
    ],
)
def test_reported_prompt_ids_are_read_alike_with_and_without_the_sent_prompt_at_hand(
    changes, reported
):
    of_choice = {name: value for name, value in changes.items() if name != "prompt_token_ids"}
    whole = sampled(PROMPT, **of_choice) | {"prompt_token_ids": PROMPT} | changes
    for separators in ((",", ":"), None):
        text = json.dumps(whole, separators=separators).encode()
        for read in (read_answer(text, sent=SENT), read_answer(text)):
            assert read.chunk is not None
            assert read.chunk.prompt_ids_json == reported
            assert (read.chunk.output_ids.tolist(), read.paired) == ([7, 8], True)


@pytest.mark.parametrize("before", [True, False])
def test_an_echoed_request_does_not_hide_the_reported_prompt_ids(before):
    own, echo = {"prompt_token_ids": [9, 9]}, {"kv_transfer_params": {"prompt_token_ids": PROMPT}}
    whole = echo | sampled(PROMPT) | own if before else sampled(PROMPT) | own | echo
    text = json.dumps(whole, separators=(",", ":")).encode()
    read = read_answer(text, sent=SENT)
    assert read.chunk is not None
    assert read.chunk.prompt_ids_json == b"[9,9]"


def test_a_reported_prompt_with_the_same_tail_is_not_taken_for_the_sent_one():
    sent, used = [1, *range(10, 30)], [2, *range(10, 30)]
    whole = sampled(sent) | {"prompt_token_ids": used}
    text = json.dumps(whole, separators=(",", ":")).encode()
    chunk = read_answer(text, sent=ArrayIds(np.array(sent, np.int32)).json()).chunk
    assert chunk is not None
    assert chunk.prompt_ids_json == ArrayIds(np.array(used, np.int32)).json()


def test_an_echoed_request_does_not_count_as_reported_prompt_ids():
    whole = {"kv_transfer_params": {"prompt_token_ids": PROMPT}} | sampled(PROMPT)
    whole["prompt_token_ids"] = None
    text = json.dumps(whole, separators=(",", ":")).encode()
    chunk = read_answer(text, sent=ArrayIds(np.array(PROMPT, np.int32)).json()).chunk
    assert chunk is not None
    assert chunk.prompt_ids_json is None


def test_long_stop_texts_are_not_kept_for_later_calls():
    prompt = ArrayIds(np.array(PROMPT, np.int32))
    tracemalloc.start()
    try:
        for number in range(20):
            sampling = Sampling(max_tokens=5, stop=(f"{number}" * 50_000,))
            request = GenerateRequest("r", prompt, sampling)
            parts = call_parts(VllmRoute.CHAT, request, "m", room=10, token_in=True)
            assert json.loads(b"".join(parts))["stop"] == list(sampling.stop)
        assert tracemalloc.get_traced_memory()[0] < 600_000, "1.6 MB where each is kept"
    finally:
        tracemalloc.stop()


def test_logprobs_with_numeric_token_ids_are_paired_and_mismatches_refused():
    entries = [{"token_id": 7, "logprob": -1.0}, {"token_id": 8, "logprob": -2.0}]
    assert reading(logprobs={"content": entries}).paired
    entries[1]["token_id"] = 9
    with pytest.raises(
        EngineError, match=r"belong to other token ids: at position 1 it sampled id 8 .* of id 9"
    ):
        reading(logprobs={"content": entries})


@given(
    st.lists(
        st.tuples(st.integers(0, 2**31 - 1), st.floats(-99, 0, width=32)), min_size=1, max_size=9
    )
)
def test_numeric_ids_in_logprobs_are_read_alike_from_compact_and_spaced_json(pairs):
    entries = [{"token_id": id_, "logprob": value} for id_, value in pairs]
    ids = [id_ for id_, _ in pairs]
    for compact in (True, False):
        read = reading(compact, ids=ids, logprobs={"content": entries})
        assert (read.chunk.output_ids.tolist(), read.paired) == (ids, True)
        assert read.chunk.logprobs.tolist() == [value for _, value in pairs]
        assert read.chunk.output_ids.dtype == np.int32
        assert not read.chunk.output_ids.flags.writeable


def test_completions_have_parallel_lists():
    lists = {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-1.0, -2.0]}
    read = reading(logprobs=lists, prompt_token_ids=[1], text="hi", message=None)
    assert (read.chunk.logprobs.tolist(), read.paired, read.text) == ([-1.0, -2.0], True, "hi")


def test_logprobs_named_by_token_text_are_reported_as_unpaired():
    entries = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    assert reading(logprobs={"content": entries}).paired is None


@given(st.lists(st.integers(0, 99), min_size=2, max_size=8, unique=True))
def test_logprobs_shifted_by_one_token_are_refused(ids):
    entries = [{"token": f"token_id:{i}", "logprob": -1.0} for i in [*ids[1:], ids[0]]]
    with pytest.raises(EngineError, match="belong to other token ids"):
        reading(ids=ids, logprobs={"content": entries})


def entry(value):
    return {"token": "token_id:7", "logprob": value}


def numbered(id_):
    return {"token_id": id_, "logprob": -1.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ids": [7, 8, 9]}, "gave 3 token ids, but 2 logprobs"),
        ({"ids": [7], "logprobs": {"content": [entry(None)]}}, "no logprob for token 0"),
        ({"ids": [7], "logprobs": {"content": [entry(-9999.0)]}}, "no logprob for token 0"),
        ({"ids": [7], "logprobs": {"content": [{"token": "token_id:7"}]}}, "no logprob"),
        ({"ids": [7, 7], "logprobs": {"content": [entry(1e39), entry(None)]}}, "for token 1"),
        ({"ids": [7, 7], "logprobs": {"content": [entry(-1.0), entry(-1e39)]}}, "for token 1"),
        ({"ids": [-7], "logprobs": {"content": [numbered(-7)]}}, "cannot be read"),
        ({"ids": [2**31], "logprobs": {"content": [numbered(2**31)]}}, "cannot be read"),
        ({"ids": [2**70], "logprobs": {"content": [numbered(2**70)]}}, "cannot be read"),
        ({"ids": [7, 8], "logprobs": {"content": [numbered(7)]}}, "2 token ids, but 1 logprobs"),
        ({"finish_reason": "error"}, "ended a reply with the unknown finish reason 'error'"),
        ({"token_ids": [-1, 2]}, "cannot be read"),
        ({"token_ids": "x"}, "cannot be read"),
        ({"weight_versions": [{"version": "v2", "start": 0, "end": 2}]}, "'v2' is not a number"),
    ],
)  # fmt: skip
def test_unusable_replies_are_refused_with_the_reason(changes, says):
    with pytest.raises(EngineError, match=says):
        reading(**changes)


def test_text_that_is_no_reply_is_refused():
    for text in (b"{oops", b"[]", b'{"choices": 3}', b""):
        with pytest.raises(EngineError, match="cannot be read"):
            read_answer(text)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ('{"message":"gone","code":500}', None),
        ('{"message":"Generation is paused","type":"ServiceUnavailable","code":503}', 503),
        ('"gone"', None),
    ],
)
def test_an_error_in_a_stream_can_be_tried_again(error, status):
    with pytest.raises(EngineError, match="failed in mid-reply") as raised:
        read_answer(f'{{"error":{error}}}'.encode())
    assert (raised.value.retryable, raised.value.status) == (True, status)


def test_tokens_of_unnamed_weights_get_the_last_known_version():
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 2}]
    reply = json.dumps(sampled(PROMPT, weight_versions=spans)).encode()
    assert read_answer(reply).spans == (VersionSpan(0, 0, 1), VersionSpan(9, 1, 2))
    assert read_answer(reply, unnamed=8).spans == (VersionSpan(8, 0, 1), VersionSpan(9, 1, 2))
    for reported, numbered in ((spans, False), (spans[1:], True), (None, False)):
        chunk = read_answer(json.dumps(sampled(PROMPT, weight_versions=reported)).encode()).chunk
        assert chunk is not None
        assert chunk.numbered is numbered


def test_experts_that_are_no_rows_are_refused():
    halves: Any = ROWS * 0.5
    for text in ("AAA", npy_text(ROWS.reshape(4, 2)), npy_text(halves), npy_text(ROWS - 9)):
        with pytest.raises(GarbledError, match="routed experts"):
            read_answer(json.dumps(sampled(PROMPT, routed_experts=text)).encode())


def test_versions_stop_strings_extras_and_cache_hits_are_read():
    reply = sampled(PROMPT, stop_reason="END", routed_experts=npy_text(ROWS),
                   weight_versions=[{"version": "3", "start": 0, "end": 2}])  # fmt: skip
    reply["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
    read = read_answer(json.dumps(reply).encode())
    assert read.chunk is not None
    assert read.spans == (VersionSpan(3, 0, 2),)
    assert read.chunk.stop_text == "END"
    assert read.chunk.extra["routed_experts"].tolist() == ROWS.tolist()
    assert read.cached_tokens == 2


def test_a_usage_event_yields_no_tokens_chunk():
    read = read_answer(b'{"choices":[],"usage":{"prompt_tokens":3}}')
    assert (read.chunk, read.cached_tokens) == (None, 0)
    usage = b'{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":-2}}'
    assert read_answer(b'{"choices":[],"usage":%b}' % usage).cached_tokens == 0


def test_a_reply_without_ids_has_none():
    read = reading(token_ids=None, logprobs=None)
    assert (len(read.chunk.output_ids), read.has_ids) == (0, False)


def test_parsed_text_reasoning_and_calls_are_joined_across_stream_events():
    pieces = [
        {"reasoning": "h", "content": None},
        {"reasoning": "m", "content": "a"},
        {"tool_calls": [{"index": 0, "id": "c0", "function": {"name": "f", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}},
                        {"index": 1, "id": "c1", "function": {"name": "g", "arguments": "{}"}}]},
    ]  # fmt: skip
    text = MessageText()
    for piece in pieces:
        reply = {"choices": [{"delta": piece, "token_ids": []}]}
        text.add(read_answer(json.dumps(reply).encode()))
    text.add(read_answer(b'{"choices":[{"text":"!"}]}'))
    calls = (ToolCall("c0", "f", '{"a":1}'), ToolCall("c1", "g", "{}"))
    assert text.reply(FinishReason.STOP) == Reply("a!", "hm", calls, FinishReason.STOP)


def test_calls_of_a_whole_message_have_no_index():
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": "{}"}} for i in range(2)]
    text = MessageText()
    text.add(reading(message={"content": None, "tool_calls": calls}))
    assert [call.id for call in text.reply(FinishReason.STOP).tool_calls] == ["c0", "c1"]


# ---- stream chunks that arrive together


def event(ids, **choice):
    entries = [{"token_id": one, "logprob": -one / 8} for one in ids]
    fields = {"token_ids": ids, "logprobs": {"content": entries}}
    reply = {"choices": [{**fields, **choice}], "prompt_token_ids": None}
    return json.dumps(reply, separators=(",", ":")).encode()


OTHERS = (
    b'{"choices":[],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}',
    b'{"choices":[{"token_ids":[4],"logprobs":{"content":[{"token_id":5,"logprob":-1}]}}]}',
    b'{"choices":[{"token_ids":[4,4],"logprobs":{"content":[{"token_id":4,"logprob":-1}]}}]}',
    b'{"choices":[{"token_ids":[4],"logprobs":{"content":[{"token_id":4}]}}]}',
    b'{"error":{"message":"gone"}}',
    b'{"choices":[]},{"choices":[]}',
    b"no JSON",
    event([]),
    event([6], finish_reason="stop", weight_versions=[{"version": "3", "start": 0, "end": 1}]),
    event([6], finish_reason="unknown"),
    event([7], routed_experts=npy_text(ROWS)),
    event([7], delta={"content": "x"}),
    event([7], prompt_token_ids=[1, 2]),
)
READS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(
            st.one_of(
                st.lists(st.integers(0, 9), min_size=1, max_size=3).map(event),
                st.sampled_from(OTHERS),
            ),
            min_size=1,
            max_size=6,
        ),
    ),
    max_size=6,
)


def read_all(reads):
    """Tokens, logprobs, spans and all else that a stream's reads give, up to its error."""
    replica, routed = Replica("a", Fake()), RoutedCall(request())
    ids, values, failure = [], [], None
    others: list[tuple[object, ...]] = []
    try:
        for version, bodies in reads:
            replica.version = max(version, replica.version)
            for read in read_answers(bodies):
                reply = read.chunk
                if read.spans or reply is None:
                    others.append((len(ids), read.cached_tokens, read.spans))
                if reply is None:
                    continue
                if reply.finish_reason or reply.extra or reply.prompt_ids_json:
                    extra = {name: str(value) for name, value in reply.extra.items()}
                    others.append((len(ids), reply.finish_reason, extra, reply.prompt_ids_json))
                if len(reply.output_ids) or reply.finish_reason:
                    routed.took(reply, replica)
                ids += reply.output_ids.tolist()
                values += reply.logprobs.tolist()
    except EngineError as error:
        failure = str(error)
    return ids, values, others, failure, routed.spans, routed.mixed, routed.given


@given(READS)
def test_chunks_that_arrive_together_give_the_tokens_and_versions_of_chunks_alone(reads):
    alone = [(version, [body]) for version, bodies in reads for body in bodies]
    assert read_all(reads) == read_all(alone)


def test_chunks_with_only_tokens_are_read_as_one():
    bodies = [event([1]), event([2, 3]), event([4]), event([5], finish_reason="stop")]
    chunks = [read.chunk for read in read_answers(bodies) if read.chunk is not None]
    assert [one.output_ids.tolist() for one in chunks] == [[1, 2, 3, 4], [5]]
    assert chunks[0].logprobs.tolist() == [-0.125, -0.25, -0.375, -0.5]
    assert chunks[0].first == 1


def test_chunks_behind_the_one_with_the_prompt_are_read_as_one():
    first = event([1]).replace(b'"prompt_token_ids":null', b'"prompt_token_ids":[5,6,7]')
    reads = read_answers([first, event([2]), event([3, 4])], sent=b"[5,6,7]")
    chunks = [read.chunk for read in reads if read.chunk is not None]
    assert [one.output_ids.tolist() for one in chunks] == [[1], [2, 3, 4]]
    assert [one.prompt_ids_json for one in chunks] == [b"[5,6,7]", None]


def test_reading_a_token_of_many_that_arrive_together_takes_few_function_calls():
    bodies, calls = [event([one]) for one in range(128)], 0

    def seen(_frame, kind, _called):
        nonlocal calls
        calls += kind in {"call", "c_call"}

    sys.setprofile(seen)
    try:
        (read,) = read_answers(bodies)
    finally:
        sys.setprofile(None)
    assert read.chunk is not None
    assert len(read.chunk.output_ids) == 128
    assert calls <= 4 * 128
