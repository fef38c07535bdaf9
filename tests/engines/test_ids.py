import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engines.ids import (
    ArrayIds,
    IdsError,
    TextIds,
    compact,
    cut_ids,
    ids_json,
    parse_ids,
)

some_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(some_ids)
def test_ids_survive_text_in_every_form(ids):
    text = ids_json(np.array(ids, dtype=np.int32))
    assert json.loads(text) == ids
    assert parse_ids(text).tolist() == ids
    assert parse_ids(json.dumps(ids).encode()).tolist() == ids
    assert compact(json.dumps(ids, indent=1).encode()) == text
    assert parse_ids(text).dtype == np.int32


@given(some_ids)
def test_prompt_ids_from_an_array_and_from_json_text_are_equal(ids):
    array = ArrayIds(np.array(ids, dtype=np.int32))
    text = TextIds(json.dumps(ids).encode())
    assert len(array) == len(text) == len(ids)
    assert array.json() == text.json()
    assert array.array().tolist() == text.array().tolist() == ids


@given(some_ids.filter(bool), st.integers(1, 50))
def test_the_tail_of_a_prompt_is_its_last_ids(ids, count):
    array = ArrayIds(np.array(ids, dtype=np.int32))
    text = TextIds(json.dumps(ids).encode())
    assert array.tail(count).tolist() == text.tail(count).tolist() == ids[-count:]


@pytest.mark.parametrize(
    "text",
    [b"[1,,2]", b"[,1]", b"[1,]", b"[-1]", b"[1.5]", b"[1e3]", b"[true]", b'["1"]', b"[2147483648]",
     b"[99999999999999999999]", b"1,2", b"{}", b"[1", b"[1/2]", b"[1-2]"],
)  # fmt: skip
def test_json_that_is_no_array_of_ids_is_refused(text):
    with pytest.raises(IdsError):
        parse_ids(text)


def test_a_prompt_that_is_no_array_is_refused_at_once():
    with pytest.raises(IdsError, match="not a JSON array"):
        TextIds(b'"abc"')


def test_a_prompts_array_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        TextIds(b"[1,2]").array()[0] = 5


@given(some_ids, st.text(), st.integers(0, 3))
def test_cutting_ids_out_leaves_the_rest_and_loses_nothing(ids, noise, depth):
    inner = {"prompt_token_ids": ids, "note": noise}
    for level in range(depth):
        inner = {f"k{level}": inner, "note": noise + '"prompt_token_ids":[1]'}
    body = json.dumps(inner, separators=(",", ":")).encode()
    rest, cut = cut_ids(body, b"prompt_token_ids")
    assert cut is not None
    assert json.loads(cut) == ids
    expected = json.loads(body)
    deepest = expected
    for level in reversed(range(depth)):
        deepest = deepest[f"k{level}"]
    deepest["prompt_token_ids"] = None
    assert json.loads(rest) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"ids":[1, 2]}',
        b'{"ids":[1,"2"]}',
        b'{"ids":[1.5]}',
        b'{"ids":[1',
        b'{"ids":null}',
        b'{"other":[1]}',
        b'{"ids":[1],"deep":{"ids":[2]}}',
        b'{"ids":[1],"deep":{"ids":"x"}}',
    ],
)
def test_cutting_ids_leaves_unusual_json_unchanged(body):
    assert cut_ids(body, b"ids") == (body, None)


def test_a_key_inside_a_string_is_no_key():
    body = json.dumps({"a": '"ids":[1]', "ids": [2, 3]}, separators=(",", ":")).encode()
    rest, cut = cut_ids(body, b"ids")
    assert cut == b"[2,3]"
    assert json.loads(rest) == {"a": '"ids":[1]', "ids": None}
