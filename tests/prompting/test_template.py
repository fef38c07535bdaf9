"""Text after a turn is the template's own, or the template is not used for it."""

import pytest

from bridle.errors import RenderError
from bridle.prompting.family import STAND_IN, ChatTemplate, tool_parser_of
from bridle.prompting.tokenizer import load_tokenizer

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "look", "content": "out"}
TOLD = {"role": "assistant", "content": "by hand"}

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>\n{% endfor %}"
BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
STABLE = TURNS + BEGUN
NO_END = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}" + BEGUN
DEPENDS_ON_WHAT_FOLLOWS = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>"
    "{% if loop.last %}(end){% endif %}{% endfor %}" + BEGUN
)
MERGES = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
ROLES_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}" + BEGUN
)


@pytest.fixture
def template(folder):
    """The builtin tokenizer with another chat template."""

    def make(source, stop_ids=(2024,)):
        (folder / "chat_template.jinja").write_text(source)
        return ChatTemplate(load_tokenizer(folder), stop_ids)

    return make


@pytest.fixture
def builtin(tokens):
    return ChatTemplate(tokens, [2024])


def after(template, tokens, *messages, closed=True, thinking=None):
    ids = template.extend(messages, None, closed=closed, thinking=thinking)
    return None if ids is None else tokens.decode(ids)


def test_a_suffix_is_what_the_template_writes_behind_the_turn(template, tokens):
    stable = template(STABLE)
    assert (stable.close, stable.extends) == ("<|im_end|>", True)
    assert after(stable, tokens, USER) == "\n<|im_start|>user:hi<|im_end|>\n<|im_start|>assistant:"


def test_a_turn_that_was_cut_is_closed_first(template, tokens):
    text = after(template(STABLE), tokens, USER, closed=False)
    assert text == "<|im_end|>\n<|im_start|>user:hi<|im_end|>\n<|im_start|>assistant:"


def test_messages_that_a_harness_wrote_for_the_model_can_follow(builtin, tokens):
    text = after(builtin, tokens, TOLD, USER)
    assert text == (
        "\n<|im_start|>assistant\nby hand<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_extension_without_messages_opens_the_next_assistant_turn(builtin, tokens):
    assert after(builtin, tokens) == "\n<|im_start|>assistant\n"


def test_results_stand_behind_a_turn_that_called(builtin, tokens):
    assert after(builtin, tokens, RESULT, RESULT, thinking=False) == (
        "\n<|im_start|>user\n<tool_response>\nout\n</tool_response>"
        "\n<tool_response>\nout\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_text_that_looks_like_a_control_token_stays_text(builtin, tokens):
    text = tokens.escape(f"<|im_end|>{STAND_IN}")
    ids = builtin.extend([{"role": "user", "content": text}], None, closed=True, thinking=None)
    assert tokens.decode(ids).count("<|im_end|>") == 2
    assert ids.count(2024) == 1


@pytest.mark.parametrize("source", [NO_END, DEPENDS_ON_WHAT_FOLLOWS])
def test_a_template_that_cannot_be_extended_gives_no_suffix(template, tokens, source):
    unfit = template(source)
    assert not unfit.extends
    assert after(unfit, tokens, USER) is None


def test_a_template_without_an_end_token_closes_nothing(template):
    assert template(NO_END).close is None
    assert template(STABLE, stop_ids=()).close is None


def test_messages_that_the_template_refuses_are_no_extension(template, tokens):
    strict = template(ROLES_ALTERNATE)
    assert strict.extends
    assert after(strict, tokens, USER) == "<|im_start|>user:hi<|im_end|><|im_start|>assistant:"
    assert after(strict, tokens, TOLD, USER) is None
    with pytest.raises(RenderError, match="roles must alternate"):
        strict.text([TOLD], None, thinking=None)


def test_a_template_that_refuses_every_assistant_turn_is_not_extended(template):
    assert template("{{ raise_exception('never') }}").close is None


def test_a_template_that_drops_the_turn_is_not_extended(template, tokens):
    forgets = "{% if messages[-1].role == 'user' %}x{% else %}" + STABLE + "{% endif %}"
    assert after(template(forgets), tokens, USER) is None


def test_an_extension_that_rewrites_the_turn_before_it_is_refused(template, tokens):
    rewrites = (
        "{% for m in messages %}{% if m.role != 'assistant' or messages[-1].role != 'tool' %}"
        "{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + BEGUN
    )
    assert after(template(rewrites), tokens, USER) == "hi<|im_end|><|im_start|>assistant:"
    assert after(template(rewrites), tokens, RESULT) is None


def test_a_template_that_shows_the_name_of_a_call_needs_the_name(template, tokens):
    shows = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ messages[loop.index0 - 1].tool_calls[0].function.name }}={% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}" + BEGUN
    )
    named, unnamed = RESULT, {"role": "tool", "tool_call_id": "c", "content": "out"}
    assert after(template(shows), tokens, named) == "look=out<|im_end|><|im_start|>assistant:"
    assert after(template(shows), tokens, unnamed) is None


def test_a_suffix_whose_ids_depend_on_what_is_before_is_refused(folder):
    import json

    made = json.loads((folder / "tokenizer.json").read_text())
    for token in made["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "chat_template.jinja").write_text(STABLE)
    assert not ChatTemplate(load_tokenizer(folder), [2024]).extends


def test_a_template_with_a_short_generation_prompt_can_be_extended(template):
    assert template(MERGES).extends


def test_a_whole_prompt_is_the_templates_own(builtin, tokens):
    ids = builtin.render([USER], None, thinking=False)
    assert tokens.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call>\n<function=x>", "qwen3.5"),
        ("<tool_call>x<arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3"),  # noqa: RUF001 - the token's own characters
        ("<tool_call>{", "qwen3"),
        ("plain", None),
    ],
)
def test_the_call_markup_of_a_template_is_recognised(source, name):
    assert tool_parser_of(source) == name
