"""A path says whose session it is and what the provider is asked for."""

import orjson
import pytest

from bridle.gateway.routing import Target, asked, split_target
from bridle.types import Dialect, Kind, Message, ModelRequest, Role, Sampling, TextPart


@pytest.mark.parametrize(
    ("raw", "target"),
    [
        ("/s/abc/v1/chat/completions", Target("abc", "/v1/chat/completions", "")),
        ("/v1/models?limit=5", Target(None, "/v1/models", "limit=5")),
        ("/s/bk-key/v1/models?key=x", Target("bk-key", "/v1/models", "key=x")),
        ("/s/abc", Target("abc", "/", "")),
        ("/s/abc/", Target("abc", "/", "")),
        ("/s//v1", Target("", "/v1", "")),
        ("/", Target(None, "/", "")),
        (
            "/v1beta/models/m%3AgenerateContent",
            Target(None, "/v1beta/models/m:generateContent", ""),
        ),
        ("http://host:1/s/abc/v1/models?a=b", Target("abc", "/v1/models", "a=b")),
        ("http://host", Target(None, "/", "")),
        ("*", Target(None, "/*", "")),
    ],
)
def test_a_request_target_is_split_into_session_path_and_query(raw, target):
    assert split_target(raw) == target


@pytest.mark.parametrize("path", ["/sessions", "/sessions/a/exchanges", "/health", "/metrics"])
def test_control_routes_are_recognised_by_their_first_word(path):
    assert split_target(path).is_control


@pytest.mark.parametrize("path", ["/v1/sessions", "/s/a/health", "/", "/healthy"])
def test_no_data_route_is_a_control_route(path):
    assert not split_target(path).is_control


REQUEST = ModelRequest(
    dialect=Dialect.OPENAI_CHAT,
    model="m",
    messages=(Message(Role.USER, (TextPart("go"),)),),
    tools=(),
    sampling=Sampling(),
    stream=False,
)


def test_only_a_positive_retry_count_is_proof_of_a_retry():
    counts = {"0": 0, "2": 2, "x": 0, "-1": 0, "²": 0, "": 0, "9" * 5000: 0}
    for given, read in counts.items():
        assert asked({"x-stainless-retry-count": given}, REQUEST).retry_count == read
    assert asked({}, REQUEST).idempotency_key is None
    keys = [asked({"idempotency-key": key}, REQUEST).idempotency_key for key in ("k", "\udce9")]
    assert len({None, *keys}) == 3
    assert orjson.loads(orjson.dumps(keys)) == keys


def test_a_call_s_kind_comes_with_the_rule_that_decided_it():
    assert asked({}, REQUEST).kind is Kind.AGENT
    assert asked({}, REQUEST).kind_rule is None
    subagent = asked({"x-parent-session-id": "p"}, REQUEST)
    assert (subagent.kind, subagent.kind_rule) == (Kind.SUBAGENT, "subagent_header")
