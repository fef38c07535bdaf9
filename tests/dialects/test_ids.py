import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.dialects.ids import (
    bare_id,
    call_id,
    is_signature,
    item_id,
    reply_id,
    signature,
    standard_base64,
)

RANDOM = st.integers(0, 2**96 - 1).map(lambda number: f"{number:024x}")


@given(RANDOM, st.integers(0, 999))
def test_a_signature_is_the_same_in_both_base64_alphabets(reply_id, index):
    mark = signature(reply_id, index)
    raw = base64.b64decode(mark, validate=True)
    assert base64.urlsafe_b64encode(raw).decode() == mark == standard_base64(mark)
    assert signature(reply_id, index + 1) != mark
    assert is_signature(mark)


@pytest.mark.parametrize("other", ["", "gAAAAB", "EmwKAhgBEgy3", "é", "0" * 36])
def test_an_opaque_value_of_another_provider_is_no_signature_of_ours(other):
    assert not is_signature(other)


@given(st.binary(min_size=1))
def test_url_safe_base64_reads_as_the_standard_one(raw):
    echoed = base64.urlsafe_b64encode(raw).decode()
    assert standard_base64(echoed) == base64.b64encode(raw).decode()
    assert standard_base64(echoed.rstrip("=")) == base64.b64encode(raw).decode()


def test_call_ids_take_the_dialects_prefix():
    assert call_id("toolu", "call_abc", "r", 0) == "toolu_abc"
    assert call_id("toolu", "engine-1", "r", 0) == "engine-1"
    assert call_id("toolu", None, "r", 3) == call_id("toolu", "", "r", 3) == "toolu_r003"
    assert item_id("msg", "ab", 12) == "msg_ab012"


@pytest.mark.parametrize("prefix", ["resp_", "chatcmpl-", "msg_", "cmpl-", ""])
def test_the_id_of_a_reply_is_read_in_every_dialect(prefix):
    name = "responseId" if not prefix else "id"
    whole = json.dumps({name: f"{prefix}00ff", "output": []}).encode()
    assert reply_id(whole) == f"{prefix}00ff"
    assert bare_id(reply_id(whole)) == "00ff"
