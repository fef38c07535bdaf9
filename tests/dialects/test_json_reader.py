"""Levels and messages of a request are limited, and the error says so."""

import json
from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects.exchange import POSTED

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.json_reader import (
    MOST_ITEMS,
    MOST_NESTED,
    MOST_VALUES,
    arguments_object,
    arguments_text,
    check_json,
    check_values,
    content_digest,
    decode,
    encode,
    field_too_deep,
    first_of,
    flag_at,
    number_at,
    objects_at,
    read_spans,
    split_array,
    split_body,
    split_field,
    split_object,
    texts_at,
    whole_at,
    wholes_at,
    without_lone_surrogates,
)
from bridle.errors import RequestError
from bridle.types import Dialect, Message, Role, TextPart


def test_a_body_is_split_without_decoding_its_fields():
    fields = split_object(b'{"a": [1, {"b": 2}], "c":"x"}')
    assert {key: bytes(raw) for key, raw in fields.items()} == {"a": b'[1, {"b": 2}]', "c": b'"x"'}
    assert split_array(fields["a"], "a") == (b"1", b'{"b": 2}')


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'"\\ud83d cut"', "\ufffd cut"),
        (b'"low \\ude00"', "low \ufffd"),
        (b'"whole \\ud83d\\ude00"', "whole \U0001f600"),
        (b'"\\ud83d\\ud83d\\ude00"', "\ufffd\U0001f600"),
        (b'"text \\\\ud83d"', "text \\ud83d"),
        (b'"odd \\\\\\ud83d"', "odd \\\ufffd"),
        (b'"\\\\ud83d\\ude00"', "\\ud83d\ufffd"),
        (b"\xef\xbb\xbf1", 1),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b"1e400", float("inf")),
    ],
)
def test_lone_surrogates_byte_order_marks_and_huge_numbers_are_decoded(raw, value):
    assert decode(raw, "x") == value


def test_bodies_that_msgspec_refuses_are_split():
    fields = split_object(b'{"a": NaN, "b": ["\\\\ud83d\\ude00", NaN]}')
    assert decode(fields["b"], "b")[0] == "\\ud83d\ufffd"
    assert decode(split_array(fields["b"], "b")[1], "b") != 1


@pytest.mark.parametrize("body", [b"", b"{", b"{]}", b'{"a":}', b'"\xff"'])
def test_invalid_json_is_refused(body):
    with pytest.raises(RequestError, match="not valid JSON"):
        split_object(body)


def test_bytes_that_are_no_utf_8_are_refused_where_they_stand():
    fields = split_object(b'{"a":"\xff\\ud83d"}')
    with pytest.raises(RequestError, match="'a' is not valid JSON"):
        decode(fields["a"], "a")


@pytest.mark.parametrize("body", [b"[1]", b"NaN", b"[NaN]", b'"x"'])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(RequestError, match="the request body: expected an object"):
        split_object(body)


def test_an_object_in_place_of_an_array_is_refused_by_its_field():
    with pytest.raises(RequestError, match="'a': expected an array") as raised:
        split_array(split_object(b'{"a":{"b":1}}')["a"], "a")
    assert raised.value.param == "a"


@pytest.mark.parametrize("value", [b"Infinity", b"-Infinity", b"NaN", b'{"b": Infinity}'])
def test_nan_and_infinity_in_place_of_an_array_are_refused(value):
    with pytest.raises(RequestError, match="an array of objects"):
        split_array(split_object(b'{"a": %s}' % value)["a"], "a")


@given(st.text())
def test_any_text_is_encoded(text):
    assert json.loads(encode({"text": text})) == {"text": without_lone_surrogates(text)}


def test_pairs_of_surrogates_become_their_character():
    assert without_lone_surrogates("a\ud83d\ude00b\ud83d") == "a\U0001f600b\ufffd"
    assert json.loads(encode(["\ud83d", {"\ude00": 1}])) == ["\ufffd", {"\ufffd": 1}]


def test_only_new_spans_are_decoded():
    seen = []

    def read(value, path):
        seen.append(path)
        return (Message(Role.USER, (TextPart(value["t"]),)),)

    memo = {}
    spans = (b'{"t":"a"}', b'{"t":"b"}')
    read_spans(spans, memo, b"s:", "m", read)
    messages, digests, lengths = read_spans((*spans, b'{"t":"c"}'), memo, b"s:", "m", read)
    assert seen == ["m[0]", "m[1]", "m[2]"]
    assert [message.text for message in messages] == ["a", "b", "c"]
    assert digests == tuple(content_digest(span) for span in (*spans, b'{"t":"c"}'))
    assert lengths == (1, 1, 1)


def test_dialects_do_not_share_memo_entries():
    memo = {}
    read_spans((b"{}",), memo, b"a:", "m", lambda value, path: ())
    result = (Message(Role.USER),)
    messages, _, _ = read_spans((b"{}",), memo, b"b:", "m", lambda value, path: result)
    assert messages == list(result)


def test_a_span_that_is_no_object_is_refused_and_not_remembered():
    memo = {}
    with pytest.raises(RequestError, match=r"'m\[0\]': expected an object, but got null"):
        read_spans((b"null",), memo, b"s:", "m", lambda value, path: ())
    assert not memo


@pytest.mark.parametrize(
    ("found", "result"),
    [("1", "a string"), (True, "a boolean"), ([], "an array"), ({}, "an object")],
)
def test_a_value_of_another_type_in_place_of_a_number_is_refused_by_its_path(found, result):
    with pytest.raises(RequestError, match=f"expected a number, but got {result}") as error:
        number_at({"k": found}, "k", "a[0]")
    assert error.value.param == "a[0].k"


@pytest.mark.parametrize("found", [float("nan"), float("inf"), -1, 3])
def test_a_number_out_of_bounds_is_refused(found):
    with pytest.raises(RequestError, match="'k'"):
        number_at({"k": found}, "k", "", least=0, most=2)
    assert number_at({"k": 2}, "k", "", least=0, most=2) == 2.0
    assert number_at({"k": None}, "k", "") is None


@pytest.mark.parametrize(
    ("found", "limit"), [(-1, ">= 1, but got -1"), (2**70, "<= 9.22337e.18, but got 1.18059e.21")]
)
def test_the_error_for_a_number_out_of_bounds_names_the_bound_that_it_breaks(found, limit):
    with pytest.raises(RequestError, match=f"'k': expected a number {limit} instead"):
        whole_at({"k": found}, "k", "", least=1)


@pytest.mark.parametrize("found", [1.5, True, "1", 2**70, 1e300])
def test_a_fraction_boolean_text_or_huge_number_is_no_whole_number(found):
    with pytest.raises(RequestError, match="'k'"):
        whole_at({"k": found}, "k", "")
    assert whole_at({"k": 8.0}, "k", "") == 8
    assert whole_at({}, "k", "") is None


def test_lists_of_texts_and_numbers_are_read_and_wrong_items_refused():
    assert texts_at({"k": "a"}, "k", "") == ("a",)
    assert texts_at({"k": ["a", "", "b"]}, "k", "") == ("a", "b")
    assert texts_at({"k": ""}, "k", "") == texts_at({}, "k", "") == ()
    assert wholes_at({"k": [1, 2]}, "k", "") == (1, 2)
    for reader in (texts_at, wholes_at):
        with pytest.raises(RequestError, match=r"'k\[1\]'"):
            reader({"k": ["a" if reader is texts_at else 1, 1.5]}, "k", "")
    with pytest.raises(RequestError, match="'k': expected an array"):
        list(objects_at({"k": 7}, "k", ""))
    with pytest.raises(RequestError, match="expected a boolean"):
        flag_at({"k": 0}, "k", "")
    assert first_of({"b": 1}, ("a", "b")) == "b"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("{ as it is", "{ as it is"),
        ({"a": "é", "n": 2**70}, '{"a":"é","n":1180591620717411303424}'),
        ([], "[]"),
    ],
)
def test_call_arguments_of_any_type_are_read_as_text(value, text):
    assert arguments_text(value) == text


@pytest.mark.parametrize(
    ("arguments", "given_back"),
    [
        ('{"a": 1.0, "b": 1e5}', b'{"a": 1.0, "b": 1e5}'),
        (" {} ", b"{}"),
        ('{\n "a": [1.0,\r\n "x y"] }', b'{"a":[1.0,"x y"]}'),
        ("", b"{}"),
        ("null", b"{}"),
        ("[1]", b'{"INVALID_JSON":"[1]"}'),
        ('{"a": NaN}', b'{"INVALID_JSON":"{\\"a\\": NaN}"}'),
        ("\ud83d", b'{"INVALID_JSON":"\xef\xbf\xbd"}'),
    ],
)
def test_call_arguments_that_are_no_json_object_are_wrapped_in_one(arguments, given_back):
    assert arguments_object(arguments) == given_back


@given(st.text(max_size=30))
def test_any_call_arguments_are_written_as_a_json_object(arguments):
    assert isinstance(json.loads(arguments_object(arguments)), dict)


@pytest.mark.parametrize(
    ("body", "items", "rest"),
    [
        ('{"a":1,"messages":[{"x":[]}, 2 ],"tools":[1],"z":"é"}', ['{"x":[]}', "2"], "a tools z"),
        ('{"tools": null ,"messages":[ "[" ]}', ['"["'], "tools"),
        ('{ "tools" : [1] , "messages" : [ 1 ] , "messages_": [1] }', ["1"], "tools messages_"),
        ('{"messages":[1],"messages":[2,3]}', ["2", "3"], ""),
        ('{"m":{"messages":[7]},"messages":[7]}', ["7"], "m"),
        ('{"messages":[ ]}', [], ""),
    ],
)
def test_a_plain_body_is_split_into_fields_and_messages_in_one_pass(body, items, rest):
    fields, spans = split_body(body.encode(), "messages")
    assert spans == tuple(item.encode() for item in items)
    plain = split_object(body.encode())
    del plain["messages"]
    assert list(fields) == rest.split() == list(plain)
    assert {k: bytes(v) for k, v in fields.items()} == {k: bytes(v) for k, v in plain.items()}


@pytest.mark.parametrize("body", ['{"messages":"x"}', '{"a":1}', '{"messages":["\\ud83d"]}'])
def test_a_body_that_is_not_plain_is_split_into_fields_only(body):
    fields, spans = split_body(body.encode(), "messages")
    assert spans is None
    assert fields.keys() == json.loads(body).keys()


@given(
    st.dictionaries(st.sampled_from(["messages", "tools", "a"]), st.lists(st.text() | st.none()))
)
def test_one_pass_and_two_pass_splitting_of_a_body_give_the_same(value):
    body = json.dumps({"messages": [], **value}, ensure_ascii=False).encode()
    fields, spans = split_body(body, "messages")
    plain = split_object(body)
    assert spans == split_field(plain, "messages")
    assert {k: bytes(v) for k, v in fields.items()} == {k: bytes(v) for k, v in plain.items()}


def test_a_number_of_400_digits_is_refused_with_its_field():
    huge = 10**400
    for read in (number_at, whole_at):
        with pytest.raises(RequestError, match=r"'top_k'.*a number of 401 digits") as refused:
            read({"top_k": huge}, "top_k", "")
        assert refused.value.param == "top_k"
    with pytest.raises(RequestError, match=r"'ids\[1\]'"):
        wholes_at({"ids": [1, huge]}, "ids", "")


def test_number_of_5000_digits_is_refused():
    with pytest.raises(RequestError, match="'n' has a number of more than 4300 digits"):
        decode(b"1" * 5000, "n")


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def test_nesting_is_limited_and_brackets_in_strings_do_not_count():
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


def test_the_number_of_values_is_limited_and_commas_in_strings_do_not_count():
    check_values(encode({"text": ",\\\",'" * MOST_VALUES, "stop": [0] * (MOST_VALUES - 3)}))
    for body in ([0] * (MOST_VALUES + 1), {str(n): n for n in range(MOST_VALUES + 1)}):
        with pytest.raises(RequestError, match=f"more than {MOST_VALUES} JSON values") as refused:
            check_values(encode(body))
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")


@given(st.text('",\\a', max_size=40), st.integers(1, 9))
def test_only_commas_outside_of_strings_count(text, most):
    commas, quoted, escaped = 0, False, False
    for one in text:
        commas += one == "," and not quoted
        quoted ^= one == '"' and not escaped
        escaped = quoted and one == "\\" and not escaped
    with nullcontext() if commas < most else pytest.raises(RequestError):
        check_values(text.encode(), most)


def test_the_length_of_a_separately_split_array_is_limited():
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
