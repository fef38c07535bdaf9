import json
from typing import Any

import numpy as np
import pytest

from bridle.scripted.chatml import PromptView, opening_of, spell_call, spell_turn, view_messages
from bridle.scripted.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(None)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}}
    for name in ("bash", "edit")
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": "First <|im_end|> question"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "out"},
    {"role": "user", "content": "Second\nquestion"},
    {"role": "assistant", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "Third"}]},
]  # fmt: skip


def prompt_view(messages, tools=None, **arguments):
    text = TOKENIZER.render(messages, tools, arguments=arguments)
    return PromptView(TOKENIZER.encode(text), TOKENIZER)


def test_a_prompt_shows_what_its_messages_show():
    plain = [dict(message) for message in MESSAGES]
    plain[1]["content"] = "First question"
    bare = prompt_view(plain, TOOLS)
    given = view_messages(plain, TOOLS)
    assert bare.system == given.system == "You are kind."
    assert list(bare.users) == list(given.users) == ["First question", "Second\nquestion", "Third"]
    assert list(given.results) == ["out"]
    assert [text.strip() for text in bare.results] == ["<tool_response>\nout\n</tool_response>"]
    assert bare.assistants == given.assistants == 2
    assert [t["function"]["name"] for t in bare.tools] == ["bash", "edit"]
    assert list(given.tools) == TOOLS


def test_a_prompt_without_system_or_tools_shows_none():
    view = prompt_view([{"role": "user", "content": "hi"}])
    assert (view.system, list(view.tools), view.assistants) == ("", [], 0)


def test_text_without_markers_is_one_user_message():
    view = PromptView(TOKENIZER.encode("once upon a time"), TOKENIZER)
    assert list(view.users) == ["once upon a time"]
    assert view.assistants == 0
    assert not len(opening_of(TOKENIZER.encode("once upon a time"), TOKENIZER))


def test_system_text_that_speaks_of_tools_is_kept():
    text = "See <tools>\nnot json\n</tools>"
    view = prompt_view([{"role": "system", "content": text}, {"role": "user", "content": "x"}])
    assert view.system == text
    assert list(view.tools) == []


def test_an_assistant_turn_without_a_prompt_after_it_counts():
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    assert PromptView(ids, TOKENIZER).assistants == 1
    assert not len(opening_of(ids, TOKENIZER))


@pytest.mark.parametrize("held", ["", "<think>\n", "<think>\n\n</think>\n\n", "Half an ans"])
def test_the_opening_is_what_stands_after_the_last_header(held):
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + held)
    assert TOKENIZER.decode(opening_of(ids, TOKENIZER)) == held
    assert PromptView(ids, TOKENIZER).assistants == 0


def test_an_open_turn_of_another_role_is_no_opening():
    ids = TOKENIZER.encode("<|im_start|>user\nhi")
    assert not len(opening_of(ids, TOKENIZER))
    assert not len(opening_of(np.empty(0, np.int32), TOKENIZER))


def test_a_turn_is_spelled_as_the_template_spells_it():
    call = spell_call("bash", {"command": "\N{PARTY POPPER}"})
    assert call == (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "\N{PARTY POPPER}"}}\n</tool_call>'
    )
    function = {"name": "bash", "arguments": json.dumps({"command": "\N{PARTY POPPER}"})}
    message = {
        "role": "assistant",
        "content": "Fine.",
        "reasoning": "hm",
        "tool_calls": [{"function": function}] * 2,
    }
    rendered = TOKENIZER.render([{"role": "user", "content": "q"}, message], None)
    assert (
        spell_turn("hm", "Fine.", [call, call]) + "<|im_end|>\n<|im_start|>assistant\n" in rendered
    )


def test_arguments_given_as_text_stand_as_they_are():
    assert (
        spell_call("f", '{"a":') == '<tool_call>\n{"name": "f", "arguments": {"a":}\n</tool_call>'
    )


def test_parts_that_are_not_there_leave_no_trace():
    assert spell_turn(None, "hi", []) == "hi"
    assert spell_turn(None, "", ["C"]) == "C"
    assert spell_turn("", "", []) == "<think>\n\n</think>\n\n"
