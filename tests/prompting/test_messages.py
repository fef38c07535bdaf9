"""Messages reach a template whole, in one shape, with every text escaped."""

import pytest
from tests.prompting.talk import BASH, call, image, result, said, system, user

from bridle.errors import RenderError
from bridle.prompting.renderer import chat_messages, chat_tools, server_messages
from bridle.types import Message, Role, ToolSpec


def shout(text):
    """An escape that can be seen."""
    return text.upper()


def test_each_role_has_the_shape_of_openai_chat():
    chat = chat_messages(
        [
            system("s"),
            user("a", "b"),
            said("t", reasoning="r", calls=[call("c1", '{"k": ["v", 1]}')]),
            result("c1", "out", name="bash"),
            result(None, "more"),
        ],
        shout,
    )
    assert chat == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "AB"},
        {
            "role": "assistant",
            "content": "T",
            "reasoning_content": "R",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "C1",
                    "function": {"name": "BASH", "arguments": {"K": ["V", 1]}},
                }
            ],
        },
        {"role": "tool", "content": "OUT", "tool_call_id": "C1", "name": "BASH"},
        {"role": "tool", "content": "MORE"},
    ]


@pytest.mark.parametrize(
    ("arguments", "plain", "objects"),
    [
        ('{"a": 1}', {"A": 1}, {"A": 1}),
        ("", {}, {}),
        ("null", {}, {}),
        ('{"id": 12345678901234567890}', {"ID": 12345678901234567890}, None),
        ('{"a": ', '{"A": ', {"arguments": '{"A": '}),
        ("[1]", "[1]", {"arguments": "[1]"}),
        ("[" * 5000, "[" * 5000, {"arguments": "[" * 5000}),
    ],
)
def test_arguments_are_an_object_where_they_can_be(arguments, plain, objects):
    def rendered(**more):
        (turn,) = chat_messages([said(calls=[call("c", arguments)])], shout, **more)
        return turn["tool_calls"][0]["function"]["arguments"]

    assert rendered() == plain
    assert rendered(objects=True) == (plain if objects is None else objects)


def test_a_freeform_input_is_the_one_argument_that_the_model_was_shown():
    (turn,) = chat_messages([said(calls=[call("c", "*** patch", custom=True)])], shout)
    assert turn["tool_calls"][0]["function"]["arguments"] == {"input": "*** PATCH"}


def test_a_turn_in_pieces_is_one_message():
    pieces = [
        said(reasoning="r1"),
        said(reasoning="r2"),
        said("text"),
        said(calls=[call("1")]),
        said(calls=[call("2")]),
    ]
    (turn,) = chat_messages(pieces, str)
    assert (turn["content"], turn["reasoning_content"]) == ("text", "r1r2")
    assert [c["id"] for c in turn["tool_calls"]] == ["1", "2"]


@pytest.mark.parametrize(
    "turns",
    [
        [said("one"), said("two")],
        [said("one"), said(reasoning="r")],
        [said(calls=[call("1")]), said("two")],
        [said(calls=[call("1")]), said(reasoning="r", calls=[call("2")])],
        [said(calls=[call("1")]), said()],
        [said("one"), user("u"), said("two")],
    ],
)
def test_separate_assistant_turns_are_not_merged_into_one_message(turns):
    assert len(chat_messages(turns, str)) == len(turns)


def test_a_media_part_is_an_error_that_names_its_message_and_part():
    with pytest.raises(RenderError, match=r"tool message 1 holds image/png \(part 1\)"):
        chat_messages([user("x"), result("c", "a", image("d"))], str)


def test_media_parts_keep_their_place_for_a_multimodal_engine():
    shown = [user("x"), result("c", "a", image("d"))]
    outcome, seen = chat_messages(shown, shout, media=lambda part: {"seen": part.digest})
    assert outcome["content"] == "X"
    assert seen["content"] == [{"type": "text", "text": "A"}, {"seen": "d"}]
    turn = Message(Role.ASSISTANT, (image("d"),))
    with pytest.raises(RenderError, match="assistant message 0 holds"):
        chat_messages([turn], str, media=lambda part: {"seen": part.digest})


def test_a_server_gets_arguments_as_text():
    turns = [said(calls=[call("c", '{"command":"é"}'), call("d", "no json")])]
    (outcome,) = server_messages(turns)
    given = [one["function"]["arguments"] for one in outcome["tool_calls"]]
    assert given == ['{"command": "é"}', "no json"]


def test_a_server_gets_no_lone_surrogate_and_results_in_the_order_of_their_calls():
    calls = [call("c", '{"command":"\\ud83d"}'), call("d")]
    turn, *results = server_messages([said(calls=calls), result("d", "2"), result("c", "1")])
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"command": "\ufffd"}'
    assert [one["content"] for one in results] == ["1", "2"]


def test_tools_are_functions_with_a_schema_even_where_none_was_given():
    assert chat_tools([]) is None
    (bash, bare) = chat_tools([BASH, ToolSpec("t", None, None)]) or []
    assert bash["function"]["parameters"] is BASH.parameters
    assert bare["function"] == {
        "name": "t",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_every_text_of_a_tool_is_escaped():
    tool = ToolSpec("t", "d", {"k": [{"enum": ["v", None, 1, True]}]})
    (escaped,) = chat_tools([tool], shout) or []
    assert escaped["FUNCTION"]["PARAMETERS"] == {"K": [{"ENUM": ["V", None, 1, True]}]}
