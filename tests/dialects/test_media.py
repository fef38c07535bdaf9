import base64
import hashlib
import json

from bridle.dialects.media import block_part, data_part, url_part

RAW = b"\xfb\xff bytes"
DIGEST = hashlib.sha256(RAW).hexdigest()


def test_inline_data_digest_is_of_the_decoded_bytes():
    standard = base64.b64encode(RAW).decode()
    url_safe = base64.urlsafe_b64encode(RAW).decode().rstrip("=")
    assert standard != url_safe
    first = data_part("image/png", standard)
    assert first.digest == data_part("image/png", url_safe).digest == DIGEST
    assert first.source == f"data:image/png;base64,{standard}"
    assert url_part(first.source, "image/*") == first


def test_invalid_base64_is_digested_as_text():
    assert data_part("image/png", "é!").digest == hashlib.sha256("é!".encode()).hexdigest()


def test_a_media_url_is_digested_as_its_text():
    part = url_part("https://example.org/a.png", "image/*")
    assert part.source == "https://example.org/a.png"
    assert part.digest == hashlib.sha256(b"https://example.org/a.png").hexdigest()
    plain = url_part("data:text/plain,hello", "image/*")
    assert (plain.media_type, plain.source) == ("text/plain", "data:text/plain,hello")
    assert url_part("data:broken", "image/*").media_type == "broken"


def test_block_digest_ignores_volatile_keys():
    block = {"type": "odd", "id": "1", "deep": [{"b": 1, "a": 2, "cache_control": {}}]}
    again = {"deep": [{"a": 2, "b": 1}], "type": "odd", "id": "2", "status": "done"}
    assert block_part(block).digest == block_part(again).digest
    assert block_part(block).digest != block_part({**block, "type": "other"}).digest
    assert json.loads(block_part(block).source) == block
