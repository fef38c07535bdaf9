import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.completions import CompletionAnswer

from bridle.engines.base import GenerateChunk, GenerateRequest
from bridle.engines.ids import TextIds
from bridle.scripted.replies import (
    ChatReplyWriter,
    ParsedDelta,
    ReplyReader,
    TokenReplyWriter,
    Wants,
    event,
)
from bridle.scripted.script import spell_call, spell_turn
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import FinishReason, Sampling, VersionSpan

TOKENIZER = load_tokenizer(None)
ALL = Wants(ids=True, prompt_ids=True, logprobs=True, tokens_as_ids=True, versions=True, usage=True)
KINDS = (ChatReplyWriter, CompletionAnswer, TokenReplyWriter)


def answer(kind, wants=ALL):
    call = GenerateRequest("r", TextIds(b"[1,2,3]"), Sampling())
    return kind(call, "m", wants, TOKENIZER)


def chunks(ids, size, **last):
    """`ids` in pieces of `size`, with a logprob each."""
    array = np.array(ids, dtype=np.int32)
    values = (-np.arange(1, len(ids) + 1) / 7).astype(np.float32)
    pieces = [
        GenerateChunk(array[at : at + size], values[at : at + size])
        for at in range(0, len(ids), size)
    ]
    final = pieces.pop()
    ended = {"finish_reason": FinishReason.STOP, **last}
    return [*pieces, GenerateChunk(final.output_ids, final.logprobs, **ended)]


def read(event):
    return json.loads(event.removeprefix(b"data: "))


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=30), st.integers(1, 9)
)
def test_streamed_and_whole_replies_have_equal_ids_and_logprobs_on_every_route(ids, size):
    for kind in KINDS:
        whole = json.loads(answer(kind).whole(chunks(ids, len(ids))))["choices"][0]
        streamed = answer(kind)
        pieces = [read(streamed.piece(chunk))["choices"][0] for chunk in chunks(ids, size)]
        assert [one for piece in pieces for one in piece["token_ids"]] == whole["token_ids"] == ids
        if kind is CompletionAnswer:
            result = [one for piece in pieces for one in piece["logprobs"]["token_logprobs"]]
            assert result == whole["logprobs"]["token_logprobs"]
            offsets = [one for piece in pieces for one in piece["logprobs"]["text_offset"]]
            assert offsets == whole["logprobs"]["text_offset"]
            assert "".join(piece["text"] for piece in pieces) == whole["text"]
        else:
            result = [one for piece in pieces for one in piece["logprobs"]["content"]]
            assert result == whole["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == whole["finish_reason"]


@given(st.lists(st.floats(-9998, 0, width=32), min_size=1, max_size=9))
def test_reply_logprobs_survive_json_as_float32(values):
    logprobs = np.array(values, dtype=np.float32)
    chunk = GenerateChunk(np.arange(len(values), dtype=np.int32), logprobs, FinishReason.STOP)
    for kind in (ChatReplyWriter, TokenReplyWriter):
        entries = json.loads(answer(kind).whole([chunk]))["choices"][0]["logprobs"]["content"]
        assert np.array_equal(np.array([e["logprob"] for e in entries], np.float32), logprobs)


def test_a_logprob_of_minus_infinity_is_written_as_vllm_s_minus_9999():
    chunk = GenerateChunk(
        np.array([5], np.int32), np.array([-np.inf], np.float32), FinishReason.STOP
    )
    for kind in (ChatReplyWriter, TokenReplyWriter):
        entries = json.loads(answer(kind).whole([chunk]))["choices"][0]["logprobs"]["content"]
        assert entries[0]["logprob"] == -9999.0


def test_logprob_entries_name_tokens_by_text_by_default():
    ids = TOKENIZER.encode("hé").tolist()
    made = answer(ChatReplyWriter, Wants(logprobs=True, top_logprobs=1))
    entries = json.loads(made.whole(chunks(ids, 9)))["choices"][0]["logprobs"]["content"]
    assert entries[0]["token"] == "h"
    assert entries[0]["bytes"] == [104]
    top = entries[0]["top_logprobs"][0]
    assert (top["token"], top["logprob"]) == ("h", entries[0]["logprob"])


def test_weight_versions_and_usage_are_at_the_end_of_a_stream():
    last = {"versions": (VersionSpan(3, 0, 2),), "cached_tokens": 2}
    made = answer(ChatReplyWriter)
    pieces = [read(made.piece(chunk)) for chunk in chunks([5, 6], 1, **last)]
    assert "weight_versions" not in pieces[0]["choices"][0]
    assert pieces[1]["choices"][0]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
    usage, done = made.closing()
    assert read(usage)["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert done == b"data: [DONE]\n\n"
    assert answer(ChatReplyWriter, Wants()).closing() == [done]


def test_an_sse_event_is_one_line_although_its_text_has_unicode_line_separators():
    data = event({"text": "a\u2028b\u2029c\u0085d"})
    assert len(data.decode().splitlines()) == 2
    assert json.loads(data.removeprefix(b"data: ")) == {"text": "a\u2028b\u2029c\u0085d"}


def test_a_reply_without_tokens_is_written_with_empty_token_ids():
    empty = GenerateChunk(np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT)
    for kind in KINDS:
        choice = json.loads(answer(kind).whole([empty]))["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "abort")


# ---- the reader of chat text

words = st.text(st.sampled_from("ab \n<>/{}thinkcol_"), max_size=30)
free = words.filter(lambda t: not any(m in t for m in ("<think>", "</think>", "<tool_call>")))
calls = st.lists(
    st.tuples(st.sampled_from(["bash", "edit"]), st.dictionaries(st.sampled_from("xy"), words)),
    max_size=3,
)


def read_reply(text, **options):
    return ReplyReader(**options).feed(text, last=True)


def in_pieces(text, size, **options):
    reader = ReplyReader(**options)
    deltas = [reader.feed(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(reader.feed("", last=True))
    return ParsedDelta(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [call for delta in deltas for call in delta.calls],
    )


@given(st.none() | free, free, calls, st.integers(1, 7))
def test_a_turn_written_in_the_family_s_format_is_parsed_back_exactly(
    reasoning, content, made, size
):
    if any("tool_call>" in value for _, arguments in made for value in arguments.values()):
        return
    if reasoning is None and not content.strip("\n"):
        content = "x" + content
    text = spell_turn(reasoning, content, [spell_call(name, given) for name, given in made])
    delta = in_pieces(text, size, tools=True)
    assert delta.reasoning == (reasoning or "")
    assert delta.content == content
    assert [(name, json.loads(given)) for name, given in delta.calls] == made
    assert delta == read_reply(text, tools=True)


@given(words, st.integers(1, 5), st.booleans(), st.booleans())
def test_parsing_a_reply_in_pieces_gives_the_same_result_as_parsing_it_whole(
    text, size, tools, thinking
):
    whole = read_reply(text, tools=tools, thinking=thinking)
    assert in_pieces(text, size, tools=tools, thinking=thinking) == whole


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('a\n<tool_call>\n{"name": 1}\n</tool_call>', 'a\n<tool_call>\n{"name": 1}\n</tool_call>'),
        ("a\n<tool_call>\n{oops\n</tool_call>b", "a\n<tool_call>\n{oops\n</tool_call>b"),
        ("<tool_call>\n[1]\n</tool_call>", "<tool_call>\n[1]\n</tool_call>"),
        ('a<tool_call>\n{"name": "f"', 'a<tool_call>\n{"name": "f"'),
        ("a<tool_c", "a<tool_c"),
        ("<thi", "<thi"),
    ],
)
def test_malformed_tool_calls_stay_content(text, content):
    assert read_reply(text, tools=True) == ParsedDelta(content=content)


def test_tool_calls_are_parsed_as_content_when_the_request_has_no_tools():
    text = spell_call("f", {})
    assert read_reply(text, tools=False) == ParsedDelta(content=text)


def test_text_after_a_tool_call_is_kept_as_content():
    delta = read_reply(spell_call("f", {}) + "junk", tools=True)
    assert (delta.content, delta.calls) == ("junk", [("f", "{}")])


def test_tool_call_arguments_that_are_a_string_are_passed_unchanged():
    assert read_reply(spell_call("f", '"raw"'), tools=True).calls == [("f", "raw")]


def test_reasoning_opened_by_the_prompt_or_left_open_is_parsed_as_reasoning():
    assert read_reply("hm\n</think>\n\nhi", tools=True, thinking=True) == ParsedDelta("hm", "hi")
    assert read_reply("<think>\nhm", tools=True) == ParsedDelta("hm")


def test_streamed_content_is_emitted_as_soon_as_it_cannot_be_a_tool_call():
    reader = ReplyReader(tools=True)
    assert reader.feed("Hello <") == ParsedDelta(content="Hello ")
    assert reader.feed("b> and\n") == ParsedDelta(content="<b> and")
    assert reader.feed("<tool_call>") == ParsedDelta()
    assert reader.feed('{"name": "f"}</tool_call>') == ParsedDelta(calls=[("f", "{}")])
