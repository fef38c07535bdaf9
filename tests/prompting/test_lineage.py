"""Texts of ours in a later conversation tell where it comes from."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.prompting.turns import Lineage
from bridle.types import Message, Role, TextPart, ToolCall


def called(**arguments):
    call = ToolCall(id="c", name="agent", arguments=json.dumps(arguments))
    return (Message(Role.ASSISTANT, tool_calls=(call,)),)


def said(text):
    return (Message(Role.ASSISTANT, content=(TextPart(text),)),)


def asked(*parts):
    return (
        Message(Role.SYSTEM, content=(TextPart("You are one."),)),
        Message(Role.USER, content=tuple(TextPart(part) for part in parts)),
    )


@given(st.text(min_size=1).filter(str.strip))
def test_a_first_message_with_a_text_of_an_earlier_tool_call_is_spawned(text):
    lineage = Lineage()
    lineage.note("e1", called(name="part", tasks=[{"prompt": text}]), summary=False)
    assert lineage.is_spawned(asked("<reminder>the date</reminder>", text))
    assert lineage.is_spawned(asked(f"\n{text} "))


@pytest.mark.parametrize("text", ["Do part", "Do part a, please", "", " "])
def test_a_first_message_without_a_text_of_an_earlier_tool_call_is_not_spawned(text):
    lineage = Lineage()
    assert not lineage.is_spawned(asked(text))
    lineage.note("e1", called(prompt="Do part a", note="", count=3), summary=False)
    assert not lineage.is_spawned(asked(text))


def test_only_a_user_message_can_be_spawned_by_a_tool_call():
    lineage = Lineage()
    lineage.note("e1", called(prompt="Do it"), summary=False)
    assert not lineage.is_spawned((Message(Role.SYSTEM, content=(TextPart("Do it"),)),))
    assert not lineage.is_spawned((Message(Role.TOOL, content=(TextPart("Do it"),)),))


@pytest.mark.parametrize("arguments", ["", "no json", "[" * 9000, '"Do it"', "null"])
def test_call_arguments_that_are_no_object_raise_no_error(arguments):
    lineage = Lineage()
    call = ToolCall(id="c", name="agent", arguments=arguments)
    lineage.note("e1", (Message(Role.ASSISTANT, tool_calls=(call,)),), summary=False)
    assert lineage.is_spawned(asked("Do it")) == (arguments == '"Do it"')


def test_a_request_that_continues_a_summary_is_linked_to_it():
    lineage = Lineage()
    lineage.note("e1", said("We counted files."), summary=True)
    assert lineage.summarised_by(asked("A summary:\n\nWe counted files.\nGo on.")) == "e1"
    assert lineage.summarised_by(said("We counted files.")) == "e1"
    assert lineage.summarised_by(asked("We counted.")) is None


@pytest.mark.parametrize("tag", ["summary", "state_snapshot"])
def test_a_request_with_a_summary_taken_out_of_its_tags_is_linked_to_it(tag):
    lineage = Lineage()
    text = f"<analysis>hm</analysis>\n<{tag}>\nFiles were\ncounted.\n</{tag}>"
    lineage.note("e1", said(text), summary=True)
    assert lineage.summarised_by(asked("Earlier: Files were\ncounted.")) == "e1"


def test_a_request_is_linked_to_the_newest_summary_that_it_contains():
    lineage = Lineage()
    lineage.note("e1", said("first"), summary=True)
    lineage.note("e2", said("second"), summary=True)
    lineage.note("e3", said("second and third"), summary=False)
    lineage.note("e4", said(" "), summary=True)
    assert lineage.summarised_by(asked("first, then second and third")) == "e2"
    assert Lineage().summarised_by(asked("first")) is None
