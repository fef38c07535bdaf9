"""A family is found by what it renders, and its bridge needs the parent's tail only."""

import re

import pytest

from bridle.errors import RenderError
from bridle.prompting.family import (
    PROBES,
    ChatTemplate,
    differences,
    family_names,
    find_family,
    make_family,
    plain_parser,
)
from bridle.prompting.renderer import TAIL, load_renderer
from bridle.prompting.tokenizer import load_tokenizer
from bridle.types import Message, Role, TextPart

TOOLS = next(tools for _, _, tools in PROBES if tools)
CALLED, RESULT = PROBES[5][1][2:]
USER = {"role": "user", "content": "Hello there"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOLD = {"role": "assistant", "content": "Done."}
HISTORY = [
    SYSTEM,
    {"role": "user", "content": "Hello there " * 100},
    *[{**CALLED, "reasoning_content": "hm"}, RESULT, TOLD, {"role": "user", "content": "go " * 40}]
    * 4,
]

FAKED = [
    # Not gpt-oss: its vocabulary is downloaded by a library of its own.
    "qwen3 prime-qwen3 qwen3.5 qwen3.6 qwen3.8 qwen3-vl gemma4 glm-5 glm-5.1 glm-5.3 glm-4.5",
    "minimax-m2 deepseek-v3 deepseek-r1 deepseek-v4 kimi-k2 kimi-k2.5 nemotron-3",
    "nemotron-3-ultra nemotron-3.5 llama-3 laguna-xs.2 laguna-m.1 laguna-xs-2.1 laguna-s-2.1",
    "inkling hy3",
]
FAMILIES = " ".join(FAKED).split()


def tokens_with(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def test_every_model_family_but_gpt_oss_is_tested():
    assert set(family_names()) == {*FAMILIES, "gpt-oss"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_suffix_depends_on_the_parents_tail_only(look_alike, name):
    """The proof for `renderer.TAIL`, for each family and each way that a turn may end."""
    tokenizer, family = look_alike(name)
    prompt = family.render_ids(HISTORY, tools=TOOLS, add_generation_prompt=True)
    assert len(prompt) > 5 * TAIL
    stop = family.get_stop_token_ids()[0]
    said = tokenizer.encode("I did it.")
    thought = tokenizer.encode("<think>\nhm\n</think>\n\nok")
    bridged = 0
    for output in ([*said, stop], said, [*thought, stop], [*said, stop, *said], []):
        for new in ([RESULT], [USER], [RESULT, RESULT, USER], [SYSTEM, USER]):

            def suffix(before, output=output, new=new):
                made = family.bridge_to_next_turn(before, output, new, tools=TOOLS)
                return None if made is None else made.token_ids[len(before) :]

            whole = suffix(prompt)
            assert whole == suffix(prompt[-TAIL:])
            bridged += whole is not None
    assert bridged >= 4


def test_the_builtin_tokenizer_is_detected_as_qwen3(tokens):
    template = ChatTemplate(tokens, [2024])
    assert find_family(tokens, template) == ("qwen3", None)
    family = make_family("qwen3", tokens, thinking=None, history="exact")
    assert list(differences(family, template)) == []


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_on_and_off_begin_a_turn_as_the_template_does(tokens, thinking):
    template = ChatTemplate(tokens, [2024])
    family = make_family("qwen3", tokens, thinking=thinking, history="exact")
    for _, messages, tools in PROBES:
        wanted = template.render(messages, tools, thinking=thinking)
        assert family.render_ids(messages, tools=tools, add_generation_prompt=True) == wanted


def test_a_template_that_does_not_think_by_default_is_found_with_thinking_off(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("enable_thinking is defined and not", "not"))
    tokenizer = load_tokenizer(folder)
    assert find_family(tokenizer, ChatTemplate(tokenizer, [2024])) == ("qwen3", False)
    made = load_renderer(str(folder))
    user = Message(Role.USER, (TextPart("hi"),))
    off, on = (made.decode(made.render([user], (), thinking=way)) for way in (None, True))
    assert off.endswith("<think>\n\n</think>\n\n")
    assert on.endswith("<|im_start|>assistant\n")


def test_an_unknown_chat_template_matches_no_family(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(folder)
    assert find_family(tokenizer, ChatTemplate(tokenizer, [2024])) is None


def test_template_differences_name_the_differing_conversations(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("# Tools", "# My tools"))
    tokenizer = load_tokenizer(folder)
    family = make_family("qwen3", tokenizer, thinking=None, history="exact")
    found = list(differences(family, ChatTemplate(tokenizer, [2024])))
    assert found == ["tools", "tools without system", "call and result", "parallel results"]


def test_a_conversation_that_the_template_refuses_is_no_difference(folder, tokens):
    family = make_family("qwen3", tokens, thinking=None, history="exact")
    refusing = ChatTemplate(tokens_with(folder, "{{ raise_exception('never') }}"), [2024])
    assert list(differences(family, refusing)) == []


class Refusing:
    """A family that takes nothing."""

    def render_ids(self, messages, *, tools, add_generation_prompt):
        raise ValueError("no")

    def bridge_to_next_turn(
        self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools
    ):
        return None

    def parse_response(self, token_ids, *, tools, prompt_ids):
        raise ValueError("no")

    def get_stop_token_ids(self):
        return []


def test_a_conversation_that_only_the_family_refuses_is_a_difference(tokens):
    assert len(list(differences(Refusing(), ChatTemplate(tokens, [2024])))) == len(PROBES)


def test_a_family_that_does_not_exist_is_named_with_those_that_do(tokens):
    with pytest.raises(RenderError, match=r"unknown model family 'qwen9'; known: qwen3, "):
        make_family("qwen9", tokens, thinking=None, history="exact")


def test_a_tokenizer_of_another_family_is_refused(tokens):
    with pytest.raises(RenderError, match=re.escape("not of the family 'llama-3'")):
        make_family("llama-3", tokens, thinking=None, history="exact")


def test_history_decides_whether_reasoning_survives_a_user_message(tokens):
    output = tokens.encode("<think>\nhm\n</think>\n\nok<|im_end|>")
    prompt = tokens.encode("<|im_start|>assistant\n")
    exact = make_family("qwen3", tokens, thinking=None, history="exact")
    template = make_family("qwen3", tokens, thinking=None, history="template")
    assert exact.bridge_to_next_turn(prompt, output, [USER], tools=None) is not None
    assert template.bridge_to_next_turn(prompt, output, [USER], tools=None) is None
    assert template.bridge_to_next_turn(prompt, output, [RESULT], tools=None) is not None


def test_a_plain_parser_reads_the_markup_that_the_template_names(tokens):
    parsed = plain_parser(tokens).parse_response(
        tokens.encode('<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        tools=None,
        prompt_ids=[],
    )
    assert (parsed.reasoning_content, parsed.tool_calls[0].name) == ("hm", "f")
