"""A reply of text only is read as the family's parser reads it."""

import random

import pytest
from tests.prompting.test_family import FAMILIES, TOOLS
from tests.prompting.test_layouts import START, TURNS, WORDS

from bridle.prompting.placeholders import PlaceholderFamily, suffix_of, with_placeholders
from bridle.prompting.reply import PLAIN_FAMILIES as PLAIN
from bridle.prompting.reply import PlainReplies

PIECES = [
    *WORDS,
    *TURNS,
    '{"name": "look", "arguments": {}}',
    "call:",
    "look",
    "{",
    "}",
    "[",
    "<",
    "|",
]


class Asked:
    """A parser that counts how often it is asked."""

    def __init__(self, family):
        self.family = family
        self.count = 0

    def __getattr__(self, name):
        return getattr(self.family, name)

    def parse_response(self, *asked, **named):
        self.count += 1
        return self.family.parse_response(*asked, **named)


def prompt_of(made, family, tokenizer, new):
    """A prompt that the family extended."""
    prompt = family.render_ids(START, tools=TOOLS, add_generation_prompt=True)
    for turn in (TURNS[0], TURNS[2]):
        output = [*tokenizer.encode(turn), family.get_stop_token_ids()[0]]
        found = suffix_of(made, prompt[-128:], output, new, TOOLS)
        if found is not None:
            return [*prompt, *output, *found]
    return prompt


def drawn_reply(tokenizer, family, drawn):
    words = tokenizer.encode(
        tokenizer.escape("".join(drawn.choices(PIECES, k=drawn.randint(1, 5))))
    )
    odd = [id_ for id_ in drawn.choices(range(2_000), k=4) if id_ not in tokenizer.control_ids]
    ids = drawn.choice([words, odd, [*words, *odd], tokenizer.encode(drawn.choice(TURNS))])
    ends = family.get_stop_token_ids()
    return [*ids, *drawn.choice([[], [ends[0]], [ends[-1]], [ends[0], 5]])]


def compared(look_alike, name, count):
    """Compares random replies; how many needed no parser."""
    tokenizer, family = look_alike(name)
    asked, drawn = Asked(family), random.Random(7)
    made = with_placeholders(asked, tokenizer, plain=True)
    if not isinstance(made, PlaceholderFamily):
        return 0
    new = [{"role": "user", "content": "hi"}]
    prompt = prompt_of(made, family, tokenizer, new)[-64:]
    read = 0
    for _ in range(count):
        ids = drawn_reply(tokenizer, family, drawn)
        tools = drawn.choice([None, TOOLS])
        wanted = family.parse_response(ids, tools=tools, prompt_ids=prompt)
        before = asked.count
        found = made.parse_response(ids, tools=tools, prompt_ids=prompt)
        read += asked.count == before
        assert found.content == wanted.content, ids
        assert (found.reasoning_content or "") == (wanted.reasoning_content or ""), ids
        assert list(found.tool_calls) == list(wanted.tool_calls), ids
    return read


@pytest.mark.parametrize("name", FAMILIES)
def test_random_replies_are_read_as_the_parser_reads_them(look_alike, name):
    assert (compared(look_alike, name, 60) > 20) == (name in PLAIN)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_reply_with_control_tokens_is_parsed_without_its_prompt(look_alike, name):
    tokenizer, family = look_alike(name)

    class Saw(Asked):
        def parse_response(self, ids, *, tools, prompt_ids):
            self.saw = prompt_ids
            return self.family.parse_response(ids, tools=tools, prompt_ids=prompt_ids)

    saw = Saw(family)
    made = with_placeholders(saw, tokenizer, plain=True)
    prompt = prompt_of(made, family, tokenizer, [{"role": "user", "content": "hi"}])[-64:]
    for turn in TURNS[2:]:
        ids = tokenizer.encode(turn)
        wanted = family.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
        found = made.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
        assert saw.saw == []
        assert (found.content, found.reasoning_content) == (
            wanted.content,
            wanted.reasoning_content,
        )
        assert found.tool_calls == wanted.tool_calls


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_ten_thousand_random_replies_are_read_as_the_parser_reads_them(look_alike, name):
    assert compared(look_alike, name, 10_000) > 4_000


@pytest.mark.parametrize("end", ["<think>\n", "<|im_start|>assistant\n<think>\n"])
def test_text_behind_a_prompt_that_opens_reasoning_is_left_to_the_parser(tokens, look_alike, end):
    tokenizer, family = look_alike("qwen3")
    plain = PlainReplies(family, tokenizer)
    assert plain.read(tokenizer.encode("hm"), tuple(tokenizer.encode(end)), None) is None


def test_a_parser_that_raises_is_always_asked(look_alike):
    tokenizer, family = look_alike("qwen3")

    class Raises(Asked):
        def parse_response(self, *asked, **named):
            raise ValueError

    plain = PlainReplies(Raises(family), tokenizer)
    assert plain.read(tokenizer.encode("hm"), (1,), None) is None
