"""Levels and messages of a request are limited, and the error says so."""

import msgspec
import pytest
from tests.dialects.exchange import POSTED

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.json_reader import (
    MOST_ITEMS,
    MOST_NESTED,
    MOST_VALUES,
    check_json,
    check_values,
    decode,
    encode,
    field_too_deep,
    split_array,
    split_body,
)
from bridle.errors import RequestError
from bridle.types import Dialect


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def test_nesting_is_limited_and_brackets_in_text_are_none():
    assert decode(nested(MOST_NESTED), "tools")
    with pytest.raises(RequestError, match="'tools' is nested too deeply"):
        decode(nested(MOST_NESTED + 1), "tools")
    many_brackets = encode({"text": "[" * 10_000, "flat": [[]] * 1000})
    assert decode(many_brackets, "x")


def test_messages_are_limited_in_number():
    within, beyond = (
        b'{"input":[%b]}' % b",".join([b"{}"] * n) for n in (MOST_ITEMS, MOST_ITEMS + 1)
    )
    assert len(split_body(within, "input")[1] or ()) == MOST_ITEMS
    with pytest.raises(RequestError, match=f"maximum length {MOST_ITEMS}") as refused:
        split_body(beyond, "input")
    assert refused.value.param == "input"


def test_values_are_limited_in_number_and_commas_in_text_are_none():
    check_values(encode({"text": ",\\\",'" * MOST_VALUES, "stop": [0] * (MOST_VALUES - 3)}))
    for body in ([0] * (MOST_VALUES + 1), {str(n): n for n in range(MOST_VALUES + 1)}):
        with pytest.raises(RequestError, match=f"more than {MOST_VALUES} JSON values") as refused:
            check_values(encode(body))
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")


def test_a_list_that_is_read_by_itself_is_limited_too():
    with pytest.raises(RequestError, match="array too long"):
        split_array(msgspec.Raw(encode([{}] * (MOST_ITEMS + 1))), "input")


def test_the_field_that_is_nested_too_deeply_is_named():
    deep = nested(5000)
    body = b'{"model":"a{[\\"","tools":[{"type":"f"},{"function":%b}],"n":1}' % deep
    assert field_too_deep(body) == "tools[1].function"
    assert field_too_deep(b"[" * 900) == "[0][0][0]"


@pytest.mark.parametrize("levels", [200, 5000, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_refused_by_its_field(levels):
    schema = b'{"type":"function","function":{"name":"f","parameters":%b}}' % nested(levels)
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[%b]}' % schema
    route = recognise("POST", POSTED[Dialect.OPENAI_CHAT], "", {})
    assert route is not None
    with pytest.raises(RequestError, match=r"'tools.*' is nested too deeply") as refused:
        DIALECTS[Dialect.OPENAI_CHAT].parse(route, body, {})
    assert (refused.value.param or "").startswith("tools")


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_a_number_of_more_than_64_bits_is_named_by_its_field(digits, sign):
    body = f'{{"limits":{{"max_turns":[1,{sign}{"9" * digits}]}}}}'.encode()
    with pytest.raises(RequestError, match="more than 64 bits") as refused:
        check_json(body)
    assert refused.value.param == "limits.max_turns[1]"
    check_json(b'{"a":%d,"b":%d,"c":"%s"}' % (2**64 - 1, -(2**63), b"9" * 400))
    check_json(b"9" * 30 + b"no JSON")
