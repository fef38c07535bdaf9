import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.scripted.chatml import Delta, ReplyReader, spell_call, spell_turn

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
    return Delta(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [call for delta in deltas for call in delta.calls],
    )


@given(st.none() | free, free, calls, st.integers(1, 7))
def test_a_spelled_turn_is_read_back_letter_for_letter(reasoning, content, made, size):
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
def test_pieces_never_change_what_is_read(text, size, tools, thinking):
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
def test_text_that_only_looks_like_a_call_stays_content(text, content):
    assert read_reply(text, tools=True) == Delta(content=content)


def test_without_tools_calls_are_text():
    text = spell_call("f", {})
    assert read_reply(text, tools=False) == Delta(content=text)


def test_text_after_a_call_is_kept():
    delta = read_reply(spell_call("f", {}) + "junk", tools=True)
    assert (delta.content, delta.calls) == ("junk", [("f", "{}")])


def test_arguments_that_are_a_text_are_given_as_they_are():
    assert read_reply(spell_call("f", '"raw"'), tools=True).calls == [("f", "raw")]


def test_reasoning_may_begin_in_the_prompt_and_may_not_end():
    assert read_reply("hm\n</think>\n\nhi", tools=True, thinking=True) == Delta("hm", "hi")
    assert read_reply("<think>\nhm", tools=True) == Delta("hm")


def test_content_is_given_out_as_soon_as_it_is_certain():
    reader = ReplyReader(tools=True)
    assert reader.feed("Hello <") == Delta(content="Hello ")
    assert reader.feed("b> and\n") == Delta(content="<b> and")
    assert reader.feed("<tool_call>") == Delta()
    assert reader.feed('{"name": "f"}</tool_call>') == Delta(calls=[("f", "{}")])
