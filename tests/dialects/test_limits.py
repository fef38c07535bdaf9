"""What a request may hold: levels and messages are limited, and said so."""

import msgspec
import pytest

from bridle.dialects.limits import MOST_ITEMS, MOST_NESTED
from bridle.dialects.reading import decode, encode, split_array, split_body
from bridle.errors import RequestError


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


def test_a_list_that_is_read_by_itself_is_limited_too():
    with pytest.raises(RequestError, match="array too long"):
        split_array(msgspec.Raw(encode([{}] * (MOST_ITEMS + 1))), "input")
