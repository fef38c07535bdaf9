import hashlib

from bridle.dialects import DIALECTS
from bridle.dialects.base import retry_headers
from bridle.dialects.json_reader import content_digest
from bridle.errors import RequestError
from bridle.types import Dialect


def test_a_digest_is_sixteen_bytes_of_sha256():
    assert content_digest(b"x") == hashlib.sha256(b"x").digest()[:16]


def test_when_to_come_back_is_told_in_both_units():
    told = retry_headers(RequestError("busy", code="rate_limit", retry_after_s=0.5))
    assert (told["Retry-After"], told["retry-after-ms"]) == ("1", "500")
    assert "Retry-After" not in retry_headers(RequestError("bad"))


def test_what_cannot_succeed_is_not_to_be_tried_again():
    told = retry_headers(RequestError("spent", code="budget_exhausted", retry_after_s=5))
    assert told["x-should-retry"] == "false"
    assert "Retry-After" not in told


def test_a_body_is_put_together_from_what_there_is():
    wire = DIALECTS[Dialect.GOOGLE]
    assert wire.body(b"{}", (), None) == b'{"contents":[]}'
    assert wire.body(b' {"a":1} ', (b"1", b"2"), b"[3]") == b'{"contents":[1,2],"tools":[3],"a":1}'


def test_a_refusal_is_an_http_answer_by_default():
    assert not DIALECTS[Dialect.OPENAI_CHAT].refuses_in_stream(RequestError("bad"))
