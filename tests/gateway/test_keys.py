"""Session keys: random, hashed, found wherever a client puts them, never shown."""

from bridle.gateway.keys import key_digest, mint_key, presented_keys, redact


def test_a_key_has_its_prefix_and_256_bits():
    keys = {mint_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(key.startswith("bk-") and len(key) == 3 + 43 for key in keys)


def test_a_key_s_digest_is_32_bytes_and_differs_per_key():
    key = mint_key()
    assert len(key_digest(key)) == 32
    assert key_digest(key) == key_digest(key) != key_digest(key + "x")


def test_keys_are_found_in_every_place_where_clients_put_them():
    assert presented_keys({"authorization": "Bearer bk-1"}, "") == ["bk-1"]
    assert presented_keys({"authorization": "bearer  bk-1 "}, "") == ["bk-1"]
    assert presented_keys({"x-api-key": "bk-2"}, "") == ["bk-2"]
    assert presented_keys({"x-goog-api-key": "bk-3"}, "") == ["bk-3"]
    assert presented_keys({}, "alt=sse&key=bk%2D4") == ["bk-4"]


def test_a_request_may_carry_several_credentials_or_none():
    headers = {"authorization": "Bearer a", "x-goog-api-key": "b"}
    assert presented_keys(headers, "key=c") == ["a", "b", "c"]
    assert presented_keys({"authorization": "Basic abc"}, "monkey=1") == []
    assert presented_keys({"authorization": "Bearer "}, "key=") == []


def test_a_key_is_redacted_wherever_it_stands():
    key = mint_key()
    text = f"GET /s/{key}/v1/models?key={key} failed"
    assert redact(text) == "GET /s/bk-***/v1/models?key=bk-*** failed"
