"""Nothing that was sampled is lost or altered on its way into a reply."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.prompting.family import make_family
from bridle.prompting.reply import argument_text, member, parse_reply
from bridle.types import FinishReason

TEXT = '{"command":   "ls \\u00e9", "n": 1.0}'
CALL = f'<tool_call>\n{{"name": "bash", "arguments": {TEXT}}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen3(tokens):
    return make_family("qwen3", tokens, thinking=None, history="exact")


@pytest.fixture(scope="module")
def parse(tokens, qwen3):
    def parse(
        text,
        *,
        finish=FinishReason.STOP,
        stop_text=None,
        tail="<|im_start|>assistant\n",
        calls_as_text=False,
    ):
        numbers = itertools.count(1)
        return parse_reply(
            qwen3,
            tokens,
            text if isinstance(text, list) else tokens.encode(text),
            tools=None,
            prompt_tail=tokens.encode(tail),
            finish=finish,
            stop_text=stop_text,
            new_id=None if calls_as_text else lambda: f"call_{next(numbers)}",
        )

    return parse


def test_text_reasoning_and_calls_are_separated(parse):
    reply = parse(f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}<|im_end|>")
    assert (reply.reasoning, reply.content) == ("hm", "I look.")
    assert [(c.id, c.name, c.arguments) for c in reply.tool_calls] == [
        ("call_1", "bash", TEXT),
        ("call_2", "bash", TEXT),
    ]
    assert (reply.finish_reason, reply.tokens_unseen) == (FinishReason.STOP, 0)


@given(text=st.text(alphabet="ab \n\t", max_size=12), ended=st.booleans())
def test_no_text_that_is_handed_out_ends_in_white_space(parse, text, ended):
    """So Messages refuses none for it that a harness sends back as its last message."""
    finish = FinishReason.STOP if ended else FinishReason.LENGTH
    reply = parse(f"{text}{'<|im_end|>' * ended}", finish=finish)
    assert reply.content == text.strip()
    called = parse(f"{text}\n{CALL}<|im_end|>")
    assert (called.content, len(called.tool_calls)) == (text.strip(), 1)


def test_calls_stay_in_the_text_as_sampled_with_calls_as_text(parse):
    reply = parse(f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}<|im_end|>", calls_as_text=True)
    assert (reply.reasoning, reply.content) == ("hm", f"I look.\n{CALL}\n{CALL}")
    assert (reply.tool_calls, reply.calls_as_text, reply.tokens_unseen) == ((), 2, 0)
    broken = parse('<tool_call>\n{"name": }\n</tool_call><|im_end|>', calls_as_text=True)
    assert (broken.tool_calls, broken.calls_as_text) == ((), 0)
    assert "<tool_call>" in broken.content


def test_a_plain_answer_has_neither_reasoning_nor_calls(parse):
    reply = parse("Hello.<|im_end|>")
    assert (reply.content, reply.reasoning, reply.tool_calls) == ("Hello.", None, ())
    assert parse("<think>\n\n</think>\n\nHello.<|im_end|>").reasoning is None


def test_reasoning_that_the_prompt_opened_continues(parse):
    reply = parse("hm</think>ok<|im_end|>", tail="<|im_start|>assistant\n<think>\n")
    assert (reply.reasoning, reply.content) == ("hm", "ok")


def test_reasoning_that_was_cut_is_all_reasoning(parse):
    reply = parse("<think>\nhm, I", finish=FinishReason.LENGTH)
    assert (reply.reasoning, reply.content) == ("hm, I", "")


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>\n{'name': 'bash'}\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n["bash"]\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
    ],
)
def test_a_call_without_a_readable_name_stays_in_the_text_as_it_was_written(parse, block):
    reply = parse(f"I look.\n{block}<|im_end|>")
    assert reply.content == f"I look.\n{block}"
    assert reply.tool_calls == ()
    both = parse(f"{block}\n{CALL}<|im_end|>")
    assert both.content == block
    assert [c.arguments for c in both.tool_calls] == [TEXT]


MALFORMED = [
    ('{"name": "bash", "arguments": {"a": }}', '{"a": }'),
    ('{"name": "bash", "arguments": {"a": ', '{"a":'),
    ('{"name": "bash", "arguments": {"a": "say "hi""}}', '{"a": "say "hi""}'),
    ('{"name": "bash", "arguments": "ls" -la}', '"ls" -la'),
    ("{'name': 'bash', 'arguments': {'a': 1}}", "{'a': 1}"),
    ('{"name": "bash", "arguments": null}', "null"),
    ('{"name": "bash", "arguments": {"a": 1}', '{"a": 1}'),
    ('{"name": "bash", "arguments": {"a": 1}}}', '{"a": 1}'),
]


@pytest.mark.parametrize(("body", "arguments"), MALFORMED)
def test_a_call_whose_arguments_are_no_json_is_a_call_with_its_raw_arguments(
    parse, body, arguments
):
    block = f"<tool_call>\n{body}\n</tool_call>"
    reply = parse(f"I look.\n{CALL}\n{block}\n{CALL}<|im_end|>")
    assert (reply.content, reply.tokens_unseen) == ("I look.", 0)
    assert [call.arguments for call in reply.tool_calls] == [TEXT, arguments, TEXT]
    assert {call.name for call in reply.tool_calls} == {"bash"}
    unwanted = parse(f"{block}<|im_end|>", calls_as_text=True)
    assert (unwanted.content, unwanted.calls_as_text) == (block, 1)


def test_a_call_that_the_end_of_the_turn_closes_is_a_call(parse):
    body = '<tool_call>\n{"name": "bash", "arguments": {"a": 1}}'
    reply = parse(f"{body}<|im_end|>")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("bash", '{"a": 1}')]
    assert reply.content == ""
    for cut in ({"finish": FinishReason.LENGTH}, {"stop_text": "STOP"}):
        assert parse(body, **cut).tool_calls == ()


def test_broken_markup_behind_a_name_is_a_call_with_the_markup_as_arguments(look_alike):
    tokenizer, family = look_alike("glm-4.5")
    body = "bash\n<arg_key>command</arg_key>\n<arg_value>ls"
    reply = parse_reply(
        family,
        tokenizer,
        tokenizer.encode(f"<tool_call>{body}</tool_call>"),
        tools=None,
        prompt_tail=[],
        finish=FinishReason.STOP,
        stop_text=None,
        new_id=lambda: "id",
    )
    rest = body.removeprefix("bash\n")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("bash", rest)]


def parsed_as(look_alike, name, text, **more):
    tokenizer, family = look_alike(name)
    asked = {"new_id": lambda: "id", "finish": FinishReason.STOP, "bare": name == "llama-3"}
    return parse_reply(
        family,
        tokenizer,
        tokenizer.encode(text),
        tools=None,
        prompt_tail=[],
        stop_text=None,
        **(asked | more),
    )


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("<parameter=n>\n3\n</parameter>\n<parameter=s>\nwords\n", "<parameter=s>\nwords"),
        ("words\n", "words"),
    ],
)
@pytest.mark.parametrize("end", ["</function>\n</tool_call>", "</tool_call>", "</function>", ""])
def test_an_xml_call_with_an_open_parameter_keeps_its_raw_arguments(
    look_alike, body, arguments, end
):
    reply = parsed_as(look_alike, "qwen3.5", f"<tool_call>\n<function=f>\n{body}{end}")
    [call] = reply.tool_calls
    assert (call.name, reply.content) == ("f", "")
    assert call.arguments.endswith(arguments)
    assert call.arguments == body.strip()


def test_an_xml_call_that_the_end_of_the_turn_closes_is_a_call(look_alike):
    body = "<parameter=n>\n3\n</parameter>"
    text = f"<tool_call>\n<function=f>\n{body}\n</function>"
    [call] = parsed_as(look_alike, "qwen3.5", text).tool_calls
    assert (call.name, call.arguments) == ("f", body)
    assert parsed_as(look_alike, "qwen3.5", text, finish=FinishReason.LENGTH).tool_calls == ()


def test_markup_inside_a_closed_parameter_is_its_value(look_alike):
    body = "<parameter=s>\na <parameter=x> b\n</parameter>\n"
    reply = parsed_as(look_alike, "qwen3.5", f"<tool_call>\n<function=f>\n{body}</tool_call>")
    assert json.loads(reply.tool_calls[0].arguments) == {"s": "a <parameter=x> b"}


def test_a_broken_call_of_a_family_whose_calls_have_no_markup_is_a_call(look_alike):
    text = '{"name": "f", "parameters": {"a": }}'
    reply = parsed_as(look_alike, "llama-3", text)
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("f", '{"a": }')]
    assert reply.content == ""
    unwanted = parsed_as(look_alike, "llama-3", text, new_id=None)
    assert (unwanted.content, unwanted.calls_as_text) == (text, 1)
    two = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    for other in (two, f"See: {text}", '{"name": "f"}; {}'):
        assert parsed_as(look_alike, "llama-3", other).content == other
    assert parsed_as(look_alike, "qwen3", text).content == text
    assert parsed_as(look_alike, "llama-3", text, finish=FinishReason.LENGTH).content == text


def test_a_call_that_was_cut_stays_in_the_text(parse):
    reply = parse('ok <tool_call>\n{"name": "ba', finish=FinishReason.LENGTH)
    assert reply.content == 'ok\n<tool_call>\n{"name": "ba'


def test_words_beside_calls_and_ids_after_the_end_are_counted(parse, tokens):
    junk = len(tokens.encode(" and then"))
    assert parse(f"{CALL} and then{CALL}\n<|im_end|>").tokens_unseen == junk
    assert parse(f"{CALL} and then<|im_end|>").tokens_unseen == junk
    assert parse("ok<|im_end|> and then").tokens_unseen == junk
    assert parse("ok<|im_end|>").tokens_unseen == 0


def test_a_stop_string_and_what_follows_is_not_shown(parse):
    reply = parse("Thought: x\nObservation: made up", stop_text="Observation:")
    assert (reply.content, reply.stop_text) == ("Thought: x\n", "Observation:")
    thought = parse("<think>\na STOP b", stop_text="STOP")
    assert (thought.reasoning, thought.content) == ("a ", "")
    both = parse("<think>\na\n</think>\n\nb STOP", stop_text="STOP")
    assert (both.reasoning, both.content) == ("a", "b ")


def test_nesting_that_no_parser_takes_loses_no_text(parse):
    """Before Python 3.13 the JSON reader gives up, and the call is text; then it is malformed."""
    nested = "[" * 3000
    deep = '<tool_call>\n{"name": "f", "arguments": ' + nested + "\n</tool_call>"
    for reply in (
        parse(f"{deep}<|im_end|>"),
        parse(f"{deep}STOP<|im_end|>", stop_text="STOP"),
    ):
        shown = reply.content or reply.tool_calls[0].arguments
        assert nested in shown
        assert "STOP" not in shown


def test_text_arguments_come_back_as_the_text_that_they_stand_for(parse):
    block = '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>'
    assert parse(f"{block}<|im_end|>").tool_calls[0].arguments == '{"a": 1}'
    missing = '<tool_call>\n{"name": "f"}\n</tool_call>'
    assert parse(f"{missing}<|im_end|>").tool_calls[0].arguments == "{}"


def test_xml_arguments_become_json_by_the_tools_schema(look_alike):
    tokenizer, family = look_alike("qwen3.5")
    schema = {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = (
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n"
        "<parameter=s>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )

    def arguments(tools):
        reply = parse_reply(
            family,
            tokenizer,
            tokenizer.encode(text),
            tools=tools,
            prompt_tail=[],
            finish=FinishReason.STOP,
            stop_text=None,
            new_id=lambda: "id",
        )
        return reply.tool_calls[0].arguments

    assert json.loads(arguments([tool])) == {"n": 3, "s": "3"}
    assert json.loads(arguments(None)) == {"n": 3, "s": 3}


@given(st.lists(st.integers(0, 2047), max_size=40))
def test_parsing_raises_no_error_for_any_sampled_ids(tokens, qwen3, ids):
    reply = parse_reply(
        qwen3,
        tokens,
        ids,
        tools=None,
        prompt_tail=[],
        finish=FinishReason.LENGTH,
        stop_text=None,
        new_id=lambda: "id",
    )
    assert 0 <= reply.tokens_unseen <= len(ids)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(values, st.sampled_from([None, 1]), st.booleans())
def test_the_raw_text_of_a_json_member_is_found_in_any_layout(value, indent, escape):
    raw = json.dumps(
        {"x": ["arguments"], "arguments": value, "y": {}}, indent=indent, ensure_ascii=escape
    )
    found = member(f" {raw}\n", "arguments")
    assert found is not None
    assert found[0] in raw
    assert (json.loads(found[0]), found[1]) == (value, value)


@pytest.mark.parametrize(
    "raw", ["", "[1]", '{"a"', '{"a": 1', '{"a" 1}', "{a: 1}", '{"b": 1}', "{,}"]
)
def test_json_that_is_no_object_has_no_members(raw):
    assert member(raw, "a") is None


def test_the_last_of_equal_members_counts_as_parsers_have_it():
    assert member('{"a": 1, "a": 2}', "a") == ("2", 2)


def test_arguments_not_found_in_the_markup_are_serialised_again():
    assert argument_text("<function=f>", {"a": "é"}) == '{"a": "é"}'
    assert argument_text('{"parameters": {"a":1}}', {"a": 1}) == '{"a":1}'
    assert argument_text('{"arguments": {"a":2}}', {"a": 1}) == '{"a": 1}'
    assert argument_text("x", None) == "{}"
