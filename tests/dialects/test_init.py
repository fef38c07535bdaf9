import pytest

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import RouteKind
from bridle.types import Dialect

CHAT, RESPONSES = Dialect.OPENAI_CHAT, Dialect.OPENAI_RESPONSES
ANTHROPIC, GOOGLE = Dialect.ANTHROPIC, Dialect.GOOGLE
KIND = RouteKind


def test_every_dialect_has_a_registered_wire_format():
    assert set(DIALECTS) == set(Dialect)
    assert all(wire.dialect is dialect for dialect, wire in DIALECTS.items())


@pytest.mark.parametrize(
    ("method", "path", "dialect", "kind"),
    [
        ("POST", "/v1/chat/completions", CHAT, KIND.GENERATE),
        ("POST", "/chat/completions/", CHAT, KIND.GENERATE),
        ("POST", "/any/prefix/v1/chat/completions", CHAT, KIND.GENERATE),
        ("GET", "/v1/models", CHAT, KIND.MODELS),
        ("GET", "/v1/chat/completions", CHAT, KIND.UNSUPPORTED),
        ("POST", "/v1/embeddings", CHAT, KIND.UNSUPPORTED),
        ("POST", "/v1/completions", CHAT, KIND.UNSUPPORTED),
        ("GET", "/v1/batches/b1", CHAT, KIND.UNSUPPORTED),
        ("POST", "/v1/responses", RESPONSES, KIND.GENERATE),
        ("POST", "/v1/responses/input_tokens", RESPONSES, KIND.COUNT_TOKENS),
        ("GET", "/v1/responses/resp_1", RESPONSES, KIND.STORED),
        ("DELETE", "/v1/responses/resp_1", RESPONSES, KIND.STORED),
        ("POST", "/v1/responses/resp_1/cancel", RESPONSES, KIND.STORED),
        ("POST", "/v1/responses/compact", RESPONSES, KIND.GENERATE),
        ("POST", "/v1/responses/resp_1/other", RESPONSES, KIND.UNSUPPORTED),
        ("POST", "/v1/messages", ANTHROPIC, KIND.GENERATE),
        ("POST", "/v1/messages/count_tokens", ANTHROPIC, KIND.COUNT_TOKENS),
        ("POST", "/v1/messages/batches", ANTHROPIC, KIND.UNSUPPORTED),
        ("HEAD", "/", ANTHROPIC, KIND.PROBE),
        ("HEAD", "/api/hello", ANTHROPIC, KIND.PROBE),
        ("POST", "/v1beta/models/m:generateContent", GOOGLE, KIND.GENERATE),
        ("POST", "/v1/models/m:streamGenerateContent", GOOGLE, KIND.GENERATE),
        ("POST", "/models/m:countTokens", GOOGLE, KIND.COUNT_TOKENS),
        ("POST", "/v1beta/models/m:embedContent", GOOGLE, KIND.UNSUPPORTED),
        ("GET", "/v1beta/models", GOOGLE, KIND.MODELS),
    ],
)
def test_a_request_path_is_routed_to_its_dialect_and_kind(method, path, dialect, kind):
    route = recognise(method, path, "", {})
    assert route is not None
    assert (route.dialect, route.kind) == (dialect, kind)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/chat"), ("GET", "/"), ("POST", "/"), ("POST", "/v1/models/m")],
)
def test_an_unknown_path_is_routed_to_no_dialect(method, path):
    assert recognise(method, path, "", {}) is None


def test_a_websocket_upgrade_is_routed_as_an_upgrade():
    route = recognise("GET", "/v1/responses", "", {"upgrade": "WebSocket"})
    assert route is not None
    assert route.kind is KIND.UPGRADE


def test_files_route_belongs_to_anthropic_by_caller_headers():
    route = recognise("GET", "/v1/files", "", {"anthropic-version": "x"})
    assert route is not None
    other = recognise("GET", "/v1/files", "", {})
    assert other is not None
    assert {route.kind, other.kind} == {KIND.UNSUPPORTED}


@pytest.mark.parametrize("query", ["alt=sse", "key=k&alt=sse"])
def test_google_streaming_is_decided_by_the_path(query):
    route = recognise("POST", "/v1beta/models/a%2Fb:streamGenerateContent", query, {})
    assert route is not None
    assert (route.model, route.stream, route.sse) == ("a/b", True, True)
    whole = recognise("POST", "/v1beta/models/m:generateContent", "", {})
    assert whole is not None
    assert whole.stream is False


def test_the_providers_own_tools_are_removed():
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"web_search"}]}'
    )
    route = recognise("POST", "/v1/chat/completions", "", {})
    assert route is not None
    assert DIALECTS[CHAT].parse(route, body, {}).tools == ()


HEADERS = (
    {},
    {"anthropic-version": "2023-06-01"},
    {"x-goog-api-key": "k"},
    {"x-api-key": "k", "content-type": "application/json", "upgrade": "h2c"},
    {"upgrade": "websocket"},
)


@pytest.mark.parametrize("headers", HEADERS)
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/files", "/v1/embeddings"),
        *("/v1beta/models/m:generateContent", "/models/m:embedContent", "/v1/completions"),
        *("/v1/messages/count_tokens", "/v1/responses/compact", "/nothing"),
    ],
)
def test_routing_of_a_path_does_not_depend_on_earlier_requests(path, headers):
    asked = [wire.route("POST", path, "", headers) for wire in DIALECTS.values()]
    expected = next((route for route in asked if route is not None), None)
    for other in (headers, *HEADERS, headers):  # in whatever order the clients come
        recognise("POST", path, "", other)
    assert recognise("POST", path, "", headers) == expected
