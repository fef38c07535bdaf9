"""Laws of writing in every dialect: what is streamed, echoed, refused and listed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.exchange import HEAD, POSTED, USAGE, events, live, parse, pieces, synthetic

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import RouteKind
from bridle.errors import RequestError
from bridle.types import JSON, Dialect, FinishReason, Reply, ToolCall

ALL = pytest.mark.parametrize("dialect", list(POSTED), ids=str)
ASKED: dict[Dialect, JSON] = {
    Dialect.OPENAI_CHAT: {"messages": [{"role": "user", "content": "go"}]},
    Dialect.OPENAI_RESPONSES: {"input": [{"role": "user", "content": "go"}]},
    Dialect.ANTHROPIC: {"messages": [{"role": "user", "content": "go"}]},
    Dialect.GOOGLE: {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def asked(dialect, **fields):
    """A small request."""
    return parse(dialect, {"model": "m", **ASKED[dialect], **fields})


# ---- writing

replies = st.builds(
    Reply,
    st.text(max_size=20),
    st.none() | st.text(min_size=1, max_size=20),
    st.lists(
        st.builds(
            ToolCall,
            st.integers(0, 2**96).map(lambda n: f"call_{n:024x}"),
            st.sampled_from(["lookup", "edit"]),
            st.text(max_size=12)
            | json_values.map(json.dumps)
            | json_values.map(lambda value: json.dumps({"a": value}, indent=1)),
        ),
        max_size=3,
    ).map(tuple),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)


def assembled(dialect, stream):
    """Return what a client has put together at the end of a stream, as a reply's JSON."""
    parsed = [json.loads(event.data) for event in events(stream) if event.data != "[DONE]"]
    match dialect:
        case Dialect.OPENAI_CHAT:
            return _assembled_chat(parsed)
        case Dialect.OPENAI_RESPONSES:
            return parsed[-1]["response"]
        case Dialect.ANTHROPIC:
            return _assembled_message(parsed)
        case _:
            parts = [p for chunk in parsed for p in chunk["candidates"][0]["content"]["parts"]]
            return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


def _assembled_chat(result):
    message: JSON = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in result:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            message["tool_calls"] += delta.get("tool_calls", [])
    message["reasoning_content"] = message["reasoning_content"] or None
    return {"choices": [{"message": message}]}


def _assembled_message(result):
    blocks = []
    for event in result:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                for key in ("text", "thinking", "signature"):
                    if key in event["delta"]:
                        blocks[-1][key] += event["delta"][key]
                if "partial_json" in event["delta"]:
                    blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
    return {"role": "assistant", "content": blocks}


def merged(messages):
    """Texts joined: a stream may bring one text in several parts."""
    return [
        (m.role, m.text, m.reasoning, m.tool_calls, sorted(set(m.issued_ids))) for m in messages
    ]


@ALL
@pytest.mark.parametrize("make", [live, synthetic])
@given(reply=replies)
def test_streamed_reply_equals_the_whole_reply(dialect, make, reply):
    seeds: dict[Dialect, JSON] = {
        Dialect.ANTHROPIC: {"thinking": {"type": "enabled"}},
        Dialect.GOOGLE: {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
        Dialect.OPENAI_RESPONSES: {
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        },
        Dialect.OPENAI_CHAT: {"stream_options": {"include_usage": True}},
    }
    request = asked(dialect, **seeds[dialect])
    wire = DIALECTS[dialect]
    encoder = wire.stream(request, HEAD)
    if dialect is Dialect.GOOGLE:
        request.extra["sse"] = True
        encoder = wire.stream(request, HEAD)
    whole = wire.reply_messages(wire.reply_json(request, HEAD, reply, USAGE))
    streamed = wire.reply_messages(json.dumps(assembled(dialect, make(encoder, reply))).encode())
    assert merged(streamed) == merged(whole)


@ALL
@given(reply=replies)
def test_an_echoed_reply_reads_as_the_reply_did(dialect, reply):
    """The reply, put into the next request as a faithful harness does, gives the same messages."""
    wire = DIALECTS[dialect]
    whole = json.loads(wire.reply_json(asked(dialect), HEAD, reply, USAGE))
    echoed = {
        Dialect.OPENAI_CHAT: lambda: [whole["choices"][0]["message"]],
        Dialect.OPENAI_RESPONSES: lambda: whole["output"],
        Dialect.ANTHROPIC: lambda: [{"role": "assistant", "content": whole["content"]}],
        Dialect.GOOGLE: lambda: [whole["candidates"][0]["content"]],
    }[dialect]()
    [(key, history)] = ASKED[dialect].items()
    request = asked(dialect, **{key: [*history, *echoed, *history]})
    assert request.messages[1:-1] == wire.reply_messages(json.dumps(whole).encode())


@ALL
@given(reply=replies)
def test_the_end_of_a_reply_is_marked_only_in_the_last_event_of_a_stream(dialect, reply):
    wire = DIALECTS[dialect]
    encoder = wire.stream(asked(dialect), HEAD)
    encoder.open()
    before, last = encoder.close(reply, USAGE)
    marks = {
        Dialect.OPENAI_CHAT: (b'finish_reason":"', b"[DONE]"),
        Dialect.OPENAI_RESPONSES: (b"response.completed", b"response.incomplete"),
        Dialect.ANTHROPIC: (b"message_stop", b"stop_reason"),
        Dialect.GOOGLE: (b"finishReason", b"usageMetadata"),
    }[dialect]
    assert any(mark in last for mark in marks)
    for mark in marks:
        assert mark not in before.replace(b'\\"', b"").replace(_said(reply), b"")


def _said(reply):
    return json.dumps(reply.content, ensure_ascii=False).encode("utf-8", "replace") or b"\0"


@ALL
def test_pieces_sent_before_are_not_sent_again_at_the_close(dialect):
    wire = DIALECTS[dialect]
    encoder = wire.stream(asked(dialect), HEAD)
    reply = Reply("one two three", None, (), FinishReason.STOP)
    sent = encoder.open() + b"".join(encoder.text(piece) for piece in pieces("one two", 4))
    before, _ = encoder.close(reply, USAGE)
    assert b'"one ' in sent
    assert before.count(b'"one ') == (3 if dialect is Dialect.OPENAI_RESPONSES else 0)
    assert b'" three"' in before


@ALL
def test_final_text_that_contradicts_streamed_text_is_not_sent(dialect):
    wire = DIALECTS[dialect]
    encoder = wire.stream(asked(dialect), HEAD)
    encoder.open()
    encoder.text("one")
    before, _ = encoder.close(Reply("other", None, (), FinishReason.STOP), USAGE)
    assert b"other" not in before


# ---- errors, models, counts

CODES = {
    "invalid_request_error": (400, 400, 400),
    "authentication_error": (401, 401, 401),
    "permission_error": (403, 403, 403),
    "not_found": (404, 404, 404),
    "request_too_large": (413, 413, 413),
    "context_length_exceeded": (400, 400, 400),
    "rate_limit": (429, 429, 429),
    "session_busy": (429, 429, 429),
    "overloaded": (503, 529, 503),
    "paused": (503, 529, 503),
    "engine_error": (500, 500, 500),
    "store_error": (503, 500, 503),
    "budget_exhausted": (429, 402, 403),
}


@ALL
@pytest.mark.parametrize("code", CODES)
def test_every_error_code_has_the_provider_s_http_status(dialect, code):
    openai, anthropic, google = CODES[code]
    wanted = {Dialect.ANTHROPIC: anthropic, Dialect.GOOGLE: google}.get(dialect, openai)
    error = RequestError("why", code=code, retry_after_s=1.2)
    status, headers, body = DIALECTS[dialect].error(error)
    assert status == wanted
    assert json.loads(body)
    if code == "budget_exhausted":
        assert headers["x-should-retry"] == "false"
    else:
        assert headers["Retry-After"] == "2"


@ALL
def test_overflow_message_has_the_words_that_trigger_compaction(dialect):
    words = {
        Dialect.OPENAI_CHAT: "maximum context length is 4096 tokens",
        Dialect.OPENAI_RESPONSES: "exceeds the context window",
        Dialect.ANTHROPIC: "prompt is too long: 5000 tokens > 4096 maximum",
        Dialect.GOOGLE: "input token count (5000) exceeds the maximum number of tokens allowed",
    }[dialect]
    error = RequestError(
        "no room", code="context_length_exceeded", prompt_tokens=5000, context_length=4096
    )
    parsed = json.loads(DIALECTS[dialect].error(error)[2])["error"]
    assert words in parsed["message"]
    without = json.loads(
        DIALECTS[dialect].error(RequestError("no room", code="context_length_exceeded"))[2]
    )
    assert without["error"]["message"]
    in_stream = DIALECTS[dialect].refuses_in_stream(error)
    assert in_stream is (dialect is Dialect.OPENAI_RESPONSES)


@ALL
def test_an_empty_model_list_and_a_count_are_json(dialect):
    wire = DIALECTS[dialect]
    route = recognise("POST", POSTED[dialect], "", {})
    assert route is not None
    assert route.kind is RouteKind.GENERATE
    assert json.loads(wire.models(route, [], 10))
    assert 7 in json.loads(wire.token_count(7)).values()
