import json
from typing import Any

import numpy as np
import pytest

from bridle.errors import ConfigError, EngineError
from bridle.scripted.script import (
    PromptView,
    choose,
    load_script,
    make_script,
    opening_of,
    spell_call,
    spell_turn,
    view_messages,
)
from bridle.scripted.tokenizer import load_tokenizer


def view(*messages, tools=()):
    named = [{"type": "function", "function": {"name": name}} for name in tools]
    return view_messages([{"role": role, "content": text} for role, text in messages], named)


def script(*conversations):
    return make_script({"conversations": list(conversations)}, "script")


def turns(*texts, **more):
    return {"turns": [{"content": text} for text in texts], **more}


USER = ("user", "please fix the bug")


@pytest.mark.parametrize(
    ("when", "fits"),
    [
        ({}, True),
        ({"system_contains": "kind"}, True),
        ({"system_contains": ["kind", "brief"]}, True),
        ({"system_contains": ["kind", "rude"]}, False),
        ({"user_contains": "fix"}, True),
        ({"user_contains": "thanks"}, True),
        ({"user_contains": ["fix", "thanks"]}, True),
        ({"user_contains": "kind"}, False),
        ({"last_contains": "thanks"}, True),
        ({"last_contains": "fix"}, False),
        ({"results_contain": "a result"}, True),
        ({"results_contain": "thanks"}, False),
        ({"user_contains": "a result"}, False),
        ({"tools_include": "bash"}, True),
        ({"tools_include": ["bash", "edit"]}, True),
        ({"tools_include": ["bash", "web"]}, False),
        ({"model": "m"}, True),
        ({"model": "n"}, False),
        ({"system_contains": "kind", "user_contains": "never"}, False),
    ],
)
def test_a_conversation_is_selected_only_when_every_field_of_when_matches(when, fits):
    request = view(
        ("system", "be kind"), ("developer", "be brief"), USER, ("assistant", "done"),
        ("tool", "a result"), ("user", "thanks"), tools=["bash", "edit"],
    )  # fmt: skip
    two = script(turns("special", when=when), turns("rest"))
    assert choose(two, request, "m")[0] == (0 if fits else 1)


def test_the_first_matching_conversation_is_selected():
    many = script(
        turns("a", when={"user_contains": "fix"}), turns("b", when={"user_contains": "bug"})
    )
    assert choose(many, view(USER), None) == (0, 0)


def test_the_turn_number_counts_assistant_messages_and_the_last_turn_repeats():
    plain = script(turns("0", "1"))
    skipping = script(turns("0", "1", skip=2))
    found = []
    for count in range(5):
        request = view(USER, *[("assistant", "x")] * count)
        found.append((choose(plain, request, None)[1], choose(skipping, request, None)[1]))
    assert found == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 1)]


def test_last_contains_does_not_match_without_a_user_message():
    with pytest.raises(EngineError):
        choose(script(turns("a", when={"last_contains": "x"})), view(("system", "x")), None)


def test_a_request_without_a_matching_conversation_is_refused_with_its_contents():
    with pytest.raises(EngineError, match="no conversation") as caught:
        choose(
            script(turns("a", when={"model": "m"})),
            view(("system", "s" * 90), USER, tools=["t"]),
            "n",
        )
    text = str(caught.value)
    assert "ss...'" in text
    assert "fix the bug" in text
    assert "['t']" in text
    assert "'n'" in text
    assert (caught.value.status, caught.value.retryable) == (400, False)


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"contents": "x"}, "conversations.0.turns.0.contents: Extra inputs"),
        ({"delay_s": -1}, "conversations.0.turns.0.delay_s"),
        ({"fault": 200}, "conversations.0.turns.0.fault"),
        ({"fault": "broken"}, "conversations.0.turns.0.fault"),
        ({"finish": "abort"}, "conversations.0.turns.0.finish"),
        ({"token_ids": [1, -1]}, "conversations.0.turns.0.token_ids.1"),
        ({"tool_calls": [{"arguments": {}}]}, "conversations.0.turns.0.tool_calls.0.name"),
        ({"shell": "ls"}, "conversations.0.turns.0.shell"),
        ({"raw": "a", "content": "b"}, "`raw` is its whole text"),
        ({"raw": "a", "shell": ["ls"]}, "`raw` is its whole text"),
        ({"fault_times": 1}, "fault_times says how a fault happens"),
        ({"fault_after": 1}, "fault_after says how a fault happens"),
        ({"fault": 500, "fault_after": 0}, "conversations.0.turns.0.fault_after"),
    ],
)
def test_a_mistake_in_a_scripted_turn_is_reported_with_file_and_field(tmp_path, turn, says):
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"conversations": [{"turns": [turn]}]}))
    with pytest.raises(ConfigError) as caught:
        load_script(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"conversations": [\n  oops]}', ":2:3: Expecting value"),
        ("[]", "(top level)"),
        ("{}", "conversations: Field required"),
        (
            '{"conversations": [{"turns": [{"fault": "odd"}]}]}',
            "unable to parse string as an integer; or Input should be 'cut'; given: 'odd'",
        ),
        ('{"conversations": []}', "conversations: "),
        ('{"conversations": [{"turns": []}]}', "conversations.0.turns: "),
        ('{"conversations": [{"turns": [{}], "whem": {}}]}', "conversations.0.whem"),
        (
            '{"conversations": [{"turns": [{}], "when": {"user": "x"}}]}',
            "conversations.0.when.user",
        ),
    ],
)
def test_a_mistake_in_a_script_file_is_reported_with_its_position(tmp_path, text, says):
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_script(path)
    assert says in str(caught.value)


def test_script_files_that_cannot_be_read_are_reported(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_script(tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_script(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_script(tmp_path)


def test_a_script_file_with_every_field_is_read(tmp_path):
    path = tmp_path / "script.json"
    turn = {
        "reasoning": "r", "content": "c", "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        "shell": ["ls"], "token_ids": [1], "finish": "length", "delay_s": 0.5, "fault": "cut",
        "fault_times": 2, "fault_after": 3,
    }  # fmt: skip
    path.write_text(json.dumps({"conversations": [{"turns": [turn, {"raw": "x"}], "skip": 1}],
                                "model": "m", "context_length": 100}))  # fmt: skip
    read = load_script(path)
    assert read.conversations[0].turns[0].tool_calls[0].arguments == {"a": 1}
    assert read.conversations[0].turns[1].raw == "x"
    assert (read.model, read.context_length, read.conversations[0].skip) == ("m", 100, 1)


# ---- views of prompts, and the text of turns

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


def test_a_rendered_prompt_and_its_messages_give_the_same_view():
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


def test_the_view_of_a_prompt_without_system_or_tools_has_none():
    view = prompt_view([{"role": "user", "content": "hi"}])
    assert (view.system, list(view.tools), view.assistants) == ("", [], 0)


def test_a_prompt_without_role_markers_is_one_user_message():
    view = PromptView(TOKENIZER.encode("once upon a time"), TOKENIZER)
    assert list(view.users) == ["once upon a time"]
    assert view.assistants == 0
    assert not len(opening_of(TOKENIZER.encode("once upon a time"), TOKENIZER))


def test_system_text_with_a_tools_tag_that_is_no_json_is_kept():
    text = "See <tools>\nnot json\n</tools>"
    view = prompt_view([{"role": "system", "content": text}, {"role": "user", "content": "x"}])
    assert view.system == text
    assert list(view.tools) == []


def test_an_assistant_turn_at_the_end_of_a_prompt_is_counted():
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    assert PromptView(ids, TOKENIZER).assistants == 1
    assert not len(opening_of(ids, TOKENIZER))


@pytest.mark.parametrize("held", ["", "<think>\n", "<think>\n\n</think>\n\n", "Half an ans"])
def test_the_reply_opening_is_the_text_after_the_last_assistant_header(held):
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + held)
    assert TOKENIZER.decode(opening_of(ids, TOKENIZER)) == held
    assert PromptView(ids, TOKENIZER).assistants == 0


def test_an_open_user_turn_gives_no_reply_opening():
    ids = TOKENIZER.encode("<|im_start|>user\nhi")
    assert not len(opening_of(ids, TOKENIZER))
    assert not len(opening_of(np.empty(0, np.int32), TOKENIZER))


def test_a_turn_is_written_as_the_chat_template_renders_it():
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


def test_tool_call_arguments_given_as_text_are_written_unchanged():
    assert (
        spell_call("f", '{"a":') == '<tool_call>\n{"name": "f", "arguments": {"a":}\n</tool_call>'
    )


def test_missing_parts_of_a_turn_are_not_written():
    assert spell_turn(None, "hi", []) == "hi"
    assert spell_turn(None, "", ["C"]) == "C"
    assert spell_turn("", "", []) == "<think>\n\n</think>\n\n"
