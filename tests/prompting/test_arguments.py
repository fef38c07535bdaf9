"""Equal JSON values have equal canonical arguments, unequal ones never; nothing raises."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.prompting.calls import (
    KEPT_LISTS,
    canonical_arguments,
    canonical_json,
    schema_defaults,
)
from bridle.types import ToolSpec

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"cmd": "ls \\u00e9"}', '{"cmd":"ls é"}'),
        ('{"a":1,"b":2}', '{ "b" : 2, "a" : 1 }'),
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":1}', '{"a":1e0}'),
        ('{"a":0}', '{"a":-0}'),
        ('{"a":0}', '{"a":-0.0}'),
        ('{"id":12345678901234567890}', '{"id":12345678901234567000}'),
        ('{"id":9007199254740993}', '{"id":9007199254740992}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ("", "{}"),
        (" \n", "{}"),
        ("null", "{}"),
        ('{"a":"x.5"}', '{"a": "x.5"}'),
        ('{"a":NaN}', '{ "a": NaN }'),
        ('{"a":"\\ud800"}', '{ "a": "\\uD800" }'),
        ('{"a":1e400}', '{"a":Infinity}'),
        ('{"a":-1' + "0" * 400 + "}", '{"a":-Infinity}'),
        ('{"10":1,"9":2}', '{"9":2,"10":1}'),
    ],
)
def test_two_json_spellings_of_one_value_have_equal_canonical_arguments(one, other):
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize(
    "distinct",
    [
        ['{"a":1}', '{"a":true}', '{"a":"1"}', '{"a":null}', "{}", '{"a":1.5}', '{"a":[1]}'],
        ['{"a":NaN}', '{"a":null}', '{"a":"NaN"}', '{"a":Infinity}'],
        ['{"a":9007199254740991}', '{"a":9007199254740992}'],
        ['{"a"', "{'a':1}", '\ufeff{"a":1}', '{"a":1}'],
        ['{"a":"x "}', '{"a":"x"}', '{"a":"X"}'],
        ['"{}"', "{}", "[]", '""'],
    ],
)
def test_different_values_stay_different(distinct):
    assert len({canonical_arguments(text) for text in distinct}) == len(distinct)


@pytest.mark.parametrize("text", ["{", "nope", "{'a': 1}", '{"a": "\n"}', "\ud800", "[" * 100000])
def test_arguments_that_are_not_json_are_compared_by_their_text(text):
    assert canonical_arguments(text) == b"r" + text.encode("utf-8", "surrogatepass")


def test_nesting_beyond_the_limit_keeps_its_text_and_below_it_is_compared_by_value():
    def nested(depth, inner):
        return "[" * depth + inner + "]" * depth

    assert canonical_arguments(nested(500, "1.5")).startswith(b"r")
    assert canonical_arguments(nested(100, "1")) == canonical_arguments(nested(100, " 1.0"))


def test_a_default_of_the_schema_is_the_same_as_leaving_it_out():
    tool = ToolSpec("edit", None, {"properties": {"all": {"default": False}, "x": {}, "y": 3}})
    defaults = schema_defaults([tool, ToolSpec("free", None, None)])
    assert defaults == {"edit": {"all": b"false"}}
    assert canonical_arguments('{"p":1,"all":false}', defaults["edit"]) == b'j{"p":1}'
    assert canonical_arguments('{"p":1,"all":true}', defaults["edit"]) != b'j{"p":1}'
    nested = canonical_arguments('{"p":{"all":false}}', defaults["edit"])
    assert nested == b'j{"p":{"all":false}}'


def test_a_default_is_recognised_beside_a_value_that_only_the_standard_parser_reads():
    defaults = schema_defaults([ToolSpec("t", None, {"properties": {"k": {"default": "é"}}})])
    assert canonical_arguments('{"a":NaN,"k":"é"}', defaults["t"]) == canonical_arguments(
        '{"a":NaN}'
    )


@given(values)
def test_spacing_key_order_and_escapes_never_matter(value):
    plain = json.dumps(value)
    other = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    assert canonical_arguments(plain) == canonical_arguments(other)


@given(values)
def test_a_parsed_value_and_its_text_have_one_canonical_form(value):
    if value is not None:
        assert canonical_arguments(json.dumps(value)) == b"j" + canonical_json(value)


@given(st.text(st.characters(codec=None)))
def test_any_text_has_canonical_arguments_without_an_error(text):
    assert canonical_arguments(text)[:1] in {b"j", b"r"}


def test_a_value_that_is_not_json_still_has_bytes():
    assert canonical_json({1, 2}).startswith(b"r")
    assert canonical_json(math.nan) == b"NaN"


def test_cached_schema_defaults_are_those_of_the_given_tool_list():
    def tools(value):
        schema = {"properties": {"limit": {"default": value}}}
        return (ToolSpec("read", None, schema),)

    lists = [tools(value) for value in range(3 * KEPT_LISTS)]
    for value, listed in enumerate(lists):
        for _ in range(2):
            assert schema_defaults(listed) == {"read": {"limit": canonical_json(value)}}
    for value, listed in enumerate(lists):  # forgotten ones too, and a list that is no tuple
        assert schema_defaults(listed) == schema_defaults(list(tools(value)))
