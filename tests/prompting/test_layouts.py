"""A suffix from a layout is the one that the family's own bridge gives."""

import random

import pytest
from tests.prompting.test_family import FAMILIES, TOOLS

from bridle.prompting.family import make_family
from bridle.prompting.placeholders import PlaceholderFamily, suffix_of, with_placeholders
from bridle.prompting.renderer import TAIL

WORDS = [
    *("ok", "\n", "<think>", "</think>", "{}", '{"a": 1}', "[1]", "a <b> c", "/nothink", " "),
    *("<tool_response>", "</tool_response>", "\u00e9\u2003", "\x7f", "<|im_end|>", "<image>", "x"),
    *("<|channel>thought\n", "<channel|>", "<tool_call>", "</tool_call>", "assistant\n"),
    *("long " * 60, "\u2028", "\x1c", "null", "<|endoftext|>", "\r\n", "0"),
]
TURNS = [
    "I did it.",
    "\n",
    "<think>\nhm\n</think>\n\nok",
    "<think>\nhm",
    "hm</think>ok",
    '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>',
    'ok<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
    "<tool_call>open",
    "",
]


START = [{"role": "user", "content": "Hello there"}]
ROLES = [["user"], ["tool"], ["tool"], ["tool", "tool"], ["tool", "user"], ["system"]]
UNHELD = {"deepseek-v4", "laguna-xs-2.1", "laguna-s-2.1", "hy3"}
"""Families that look at ids: see `with_placeholders`."""
USUAL = [TURNS[2], TURNS[2] + TURNS[5]]


class Asked:
    """A family that counts how often it is asked."""

    def __init__(self, family):
        self.family = family
        self.count = 0

    def __getattr__(self, name):
        return getattr(self.family, name)

    def bridge_to_next_turn(self, *asked, tools):
        self.count += 1
        return self.family.bridge_to_next_turn(*asked, tools=tools)


def text(tokenizer, drawn):
    words = "".join(drawn.choices(WORDS, k=drawn.choice([1, 1, 2, 4, 0])))
    return tokenizer.escape(words)


def message(tokenizer, drawn, role):
    made = {"role": role, "content": text(tokenizer, drawn)}
    if role == "tool":
        made["tool_call_id"] = drawn.choice(["c1", "c2", "functions.look:0"])
        if drawn.random() < 0.8:
            made["name"] = drawn.choice(["look", "find", " a\n", "f.g"])
    return made


def sampled(tokenizer, family, drawn):
    ends = family.get_stop_token_ids()
    if drawn.random() < 0.5:
        return [*tokenizer.encode(drawn.choice(USUAL)), ends[0]]
    said = tokenizer.encode(drawn.choice(TURNS))
    if drawn.random() < 0.2:
        said = tokenizer.encode(text(tokenizer, drawn)) + said
    return [*said, *drawn.choice([[ends[0]], [ends[-1]], [], [ends[0], 5]])]


def extended(tokenizer, family, turns):
    """Compares random turns; the share that needed no bridge."""
    asked = Asked(family)
    made = with_placeholders(asked, tokenizer)
    drawn = random.Random(7)
    root = family.render_ids(START, tools=TOOLS, add_generation_prompt=True)
    prompt, laid = root, 0
    for _ in range(turns):
        output = sampled(tokenizer, family, drawn)
        new = [message(tokenizer, drawn, role) for role in drawn.choice(ROLES)]
        tools = drawn.choice([None, TOOLS])
        before = prompt[-TAIL:]
        wanted = suffix_of(family, before, output, new, tools)
        count = asked.count
        assert suffix_of(made, before, output, new, tools) == wanted, (before, output, new)
        laid += asked.count == count
        prompt = root if wanted is None else [*before, *output, *wanted]
    return laid / turns


@pytest.mark.parametrize("name", FAMILIES)
def test_a_suffix_by_layout_is_the_one_of_the_familys_bridge(look_alike, name):
    tokenizer, family = look_alike(name)
    extended(tokenizer, family, 60)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_five_thousand_random_turns_are_extended_as_the_family_does(look_alike, name):
    tokenizer, family = look_alike(name)
    share = extended(tokenizer, family, 5_000)
    assert share > 0.1 or name in UNHELD
    for thinking in (False, True):
        template = make_family(name, tokenizer, thinking=thinking, history="template")
        extended(tokenizer, template, 1_000)
        exact = make_family(name, tokenizer, thinking=thinking, history="exact")
        extended(tokenizer, exact, 1_000)


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "kimi-k2", "deepseek-v3", "nemotron-3"])
def test_the_family_is_not_called_from_the_third_turn_of_a_layout_on(look_alike, name):
    tokenizer, family = look_alike(name)
    asked = Asked(family)
    made = with_placeholders(asked, tokenizer)
    prompt = family.render_ids(START, tools=TOOLS, add_generation_prompt=True)
    output = [*tokenizer.encode(USUAL[1]), family.get_stop_token_ids()[0]]
    for turn in range(5):
        count = asked.count
        new = [{"role": "tool", "content": f"{turn}\n", "tool_call_id": f"{turn}", "name": "look"}]
        before = prompt[-TAIL:]
        wanted = suffix_of(family, before, output, new, TOOLS)
        assert wanted is not None
        assert suffix_of(made, before, output, new, TOOLS) == wanted
        prompt = [*before, *output, *wanted]
    assert asked.count == count


@pytest.mark.parametrize("sign", ["{", "/nothink", "a", "\n"])
def test_suffixes_of_a_family_that_depend_on_a_text_are_not_cached_as_a_layout(look_alike, sign):
    tokenizer, family = look_alike("qwen3")

    class Decides(Asked):
        def bridge_to_next_turn(self, *asked, tools):
            found = super().bridge_to_next_turn(*asked, tools=tools)
            if found is not None and sign in asked[2][-1]["content"]:
                found.token_ids.append(1)
            return found

    decides = Decides(family)
    made = PlaceholderFamily(decides, tokenizer)
    prompt = family.render_ids(START, tools=TOOLS, add_generation_prompt=True)
    output = [*tokenizer.encode("I did it."), family.get_stop_token_ids()[0]]
    for turn in range(8):
        new = [{"role": "user", "content": "7" if turn < 6 else f"7{sign}7"}]
        wanted = suffix_of(decides, prompt, output, new, None)
        assert suffix_of(made, prompt, output, new, None) == wanted
        plain = suffix_of(family, prompt[-TAIL:], output, new, None)
        assert plain is not None
        prompt = [*prompt[-TAIL:], *output, *plain]
