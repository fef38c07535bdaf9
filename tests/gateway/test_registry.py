"""Sessions and their keys."""

import pytest

from bridle.capture.records import SessionRecord
from bridle.config import Limits, SamplingPolicy
from bridle.errors import ConfigError, RequestError
from bridle.gateway.keys import key_digest, mint_key
from bridle.gateway.registry import GatewaySession, Registry, new_session_id, stored_settings


def opened(registry: Registry, session_id: str) -> tuple[GatewaySession, str]:
    key = mint_key()
    session = GatewaySession(
        SessionRecord(session_id, 0.0), sampling=SamplingPolicy(), limits=Limits()
    )
    registry.add(session, key_digest(key))
    return session, key


@pytest.fixture
def registry():
    return Registry()


def refused(registry: Registry, token, keys, match="unknown or missing"):
    with pytest.raises(RequestError, match=match) as error:
        registry.authenticate(token, keys)
    assert error.value.status == 401


def test_a_key_alone_names_its_session(registry):
    session, key = opened(registry, "a")
    assert registry.authenticate(None, [key]) is session


def test_path_and_key_must_agree(registry):
    session, key = opened(registry, "a")
    opened(registry, "b")
    assert registry.authenticate("a", [key]) is session
    refused(registry, "b", [key], match="belongs to another session")
    refused(registry, "c", [key], match="belongs to another session")


def test_a_session_id_without_its_key_opens_nothing(registry):
    opened(registry, "a")
    refused(registry, "a", [])
    refused(registry, "a", ["bk-wrong"])
    refused(registry, None, ["a"])
    refused(registry, None, [])


def test_a_key_in_the_path_serves_clients_that_send_none_or_a_dummy(registry):
    session, key = opened(registry, "a")
    assert registry.authenticate(key, []) is session
    assert registry.authenticate(key, ["dummy", key]) is session
    refused(registry, "bk-wrong", [key])


def test_keys_of_two_sessions_in_one_request_are_refused(registry):
    _, one = opened(registry, "a")
    _, other = opened(registry, "b")
    refused(registry, None, [one, other])
    refused(registry, one, [other])


def test_the_key_of_a_sealed_session_is_dead(registry):
    session, key = opened(registry, "a")
    session.sealed = True
    refused(registry, None, [key], match="ended")
    registry.remove(session, key_digest(key))
    for token, keys in ((None, [key]), (key, []), ("a", [key])):
        refused(registry, token, keys, match="ended")


def test_the_key_of_a_session_that_could_not_be_opened_is_unknown(registry):
    session, key = opened(registry, "a")
    registry.remove(session, key_digest(key))
    refused(registry, key, [key])


@pytest.mark.parametrize("session_id", ["", "bk-abc", "a/b", "a b", "-a", "a" * 201, "ä"])
def test_an_id_that_cannot_stand_in_a_path_is_refused(registry, session_id):
    with pytest.raises(ConfigError, match="session id"):
        registry.check_new_id(session_id)


def test_a_session_id_in_use_is_refused(registry):
    registry.check_new_id("a")
    opened(registry, "a")
    with pytest.raises(ConfigError, match="'a' exists already"):
        registry.check_new_id("a")
    assert [session.session_id for session in registry] == ["a"]
    assert len(registry) == 1


def test_stored_session_settings_do_not_contain_the_key():
    key = mint_key()
    kept = stored_settings(key_digest(key), SamplingPolicy(), Limits(max_turns=3))
    assert key not in str(kept)
    assert Limits.model_validate(kept["limits"]) == Limits(max_turns=3)
    assert SamplingPolicy.model_validate(kept["sampling"]) == SamplingPolicy()


def test_session_facts_report_the_last_error():
    session, _ = opened(Registry(), "a")
    assert not session.facts().failed_last
    session.note_error(RequestError("busy"))
    facts = session.facts()
    assert (facts.failed_last, facts.last_error) == (True, "busy")


def test_made_ids_are_valid_and_differ():
    made = [new_session_id() for _ in range(2)]
    assert len(set(made)) == 2
    for one in made:
        Registry().check_new_id(one)
