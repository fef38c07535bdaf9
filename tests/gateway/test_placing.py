"""Whose a connection is, by the head of its first request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.capture.records import Outcome, SessionRecord
from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.config import Limits, SamplingPolicy
from bridle.gateway.keys import key_digest, mint_key
from bridle.gateway.placing import Places, read_head
from bridle.gateway.registry import STORED_AS, stored_settings

KEY = mint_key()


@pytest.fixture
def places():
    made = Places(3)
    made.add("s-1", key_digest(KEY), 2)
    return made


def head(target: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {target} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    "asked",
    [
        head("/v1/chat/completions", f"Authorization: Bearer {KEY}"),
        head("/v1/messages", f"X-API-Key: {KEY}"),
        head("/v1beta/models/m:generateContent", f"x-goog-api-key: {KEY}"),
        head(f"/v1beta/models/m:generateContent?key={KEY}"),
        head("/s/s-1/v1/chat/completions"),
        head(f"/s/{KEY}/v1/chat/completions", "Authorization: Bearer dummy"),
        head("http://x/s/s-1/v1/messages"),
    ],
)
def test_a_session_is_found_wherever_a_client_names_it(places, asked):
    assert places.owner(asked) == 2


def test_who_names_nobody_is_the_first_workers_to_refuse(places):
    assert places.owner(head("/v1/models", "Authorization: Bearer bk-nobody-knows-this")) == 0
    assert places.owner(head("http://[/v1")) == 0


@pytest.mark.parametrize("path", ["/health", "/sessions", "/policy?x=1", "/sessions/s-1/exchanges"])
def test_control_requests_are_nobodys_own(places, path):
    assert places.owner(head(path)) is None


def test_an_ended_session_counts_no_more_and_is_still_known(places):
    assert [places.load(worker) for worker in range(3)] == [0, 0, 1]
    places.ended("s-1")
    assert places.load(2) == 0
    assert places.of("s-1") == 2


def test_an_id_is_taken_while_its_session_is_being_opened(places):
    places.reserve("s-2", 1)
    assert places.of("s-2") == 1
    places.forget("s-2")
    assert places.of("s-2") is None


async def test_sessions_of_a_store_are_known_and_those_that_ended_do_not_count(tmp_path):
    path, keys = tmp_path / "capture.sqlite", [mint_key(), mint_key()]
    async with await SqliteStore.open(path) as store:
        for number, key in enumerate(keys):
            kept = stored_settings(key_digest(key), SamplingPolicy(), Limits())
            await store.open_session(SessionRecord(f"s-{number}", 1.0, None, {STORED_AS: kept}))
        await store.open_session(SessionRecord("aside", 1.0, None, {}))
        await store.close_session(Outcome("s-1", "COMPLETED", 2.0, None, metadata={}))
    places = Places(2)
    with SqliteReader(path) as reader:
        places.read(1, reader)
    assert [places.owner(head("/v1/messages", f"x-api-key: {key}")) for key in keys] == [1, 1]
    assert places.load(1) == 1
    assert places.of("aside") is None


@given(st.binary(max_size=200))
def test_any_bytes_have_an_owner(told):
    assert Places(1).owner(told) in {0, None}
    read_head(told)
