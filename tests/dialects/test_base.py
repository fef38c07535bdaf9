import hashlib

import pytest

from bridle.dialects import DIALECTS
from bridle.dialects.base import RouteKind, StreamEncoder, caller, models_route, retry_headers, tidy
from bridle.dialects.json_reader import content_digest
from bridle.errors import RequestError
from bridle.types import Dialect, FinishReason, Reply, ToolCall, Usage


def test_a_digest_is_sixteen_bytes_of_sha256():
    assert content_digest(b"x") == hashlib.sha256(b"x").digest()[:16]


def test_retry_headers_give_seconds_and_milliseconds():
    headers = retry_headers(RequestError("busy", code="rate_limit", retry_after_s=0.5))
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "500")
    assert "Retry-After" not in retry_headers(RequestError("bad"))


def test_exhausted_budget_has_x_should_retry_false():
    headers = retry_headers(RequestError("spent", code="budget_exhausted", retry_after_s=5))
    assert headers["x-should-retry"] == "false"
    assert "Retry-After" not in headers


def test_request_body_is_rebuilt_from_its_captured_parts():
    wire = DIALECTS[Dialect.GOOGLE]
    assert wire.body(b"{}", (), None) == b'{"contents":[]}'
    assert wire.body(b' {"a":1} ', (b"1", b"2"), b"[3]") == b'{"contents":[1,2],"tools":[3],"a":1}'


def test_a_refusal_is_an_http_answer_by_default():
    assert not DIALECTS[Dialect.OPENAI_CHAT].refuses_in_stream(RequestError("bad"))


@pytest.mark.parametrize(
    ("path", "clean"),
    [("", "/"), ("/", "/"), ("//v1//models/", "/v1/models"), ("v1/x", "/v1/x")],
)
def test_request_paths_are_normalised(path, clean):
    assert tidy(path) == clean


@pytest.mark.parametrize(
    ("path", "headers", "dialect"),
    [
        ("/v1/models", {}, Dialect.OPENAI_CHAT),
        ("/v1/models", {"anthropic-version": "x"}, Dialect.ANTHROPIC),
        ("/v1/models", {"x-goog-api-key": "k"}, Dialect.GOOGLE),
        ("/v1/models", {"x-goog-api-client": "c"}, Dialect.GOOGLE),
        ("/v1beta/models", {}, Dialect.GOOGLE),
    ],
)
def test_model_list_route_follows_the_caller_headers(path, headers, dialect):
    assert caller(path, headers) is dialect
    for asked in (Dialect.OPENAI_CHAT, Dialect.ANTHROPIC, Dialect.GOOGLE):
        route = models_route(asked, "GET", path, headers)
        assert (route is not None) is (asked is dialect)


def test_one_model_is_named_by_the_rest_of_the_path():
    route = models_route(Dialect.OPENAI_CHAT, "GET", "/x/v1/models/org%2Fa/b", {})
    assert route is not None
    assert (route.kind, route.model) == (RouteKind.MODEL, "org/a/b")
    assert models_route(Dialect.OPENAI_CHAT, "POST", "/v1/models", {}) is None
    assert models_route(Dialect.OPENAI_CHAT, "GET", "/v1/other", {}) is None


class Plain(StreamEncoder):
    """Writes its pieces as plain words."""

    def open(self) -> bytes:
        return b"<"

    def write_reasoning(self, text: str) -> bytes:
        return f"r:{text};".encode()

    def write_text(self, text: str) -> bytes:
        return f"t:{text};".encode()

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        return f"c{index}:{call_id}:{name}:{arguments};".encode()

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        return b"!", b">"

    def keepalive(self) -> bytes:
        return b"."

    def error(self, error: RequestError) -> bytes | None:
        return None


CALLS = (ToolCall("1", "f", "{}"), ToolCall(None, "g", "[]"))
REPLY = Reply("abc", "why", CALLS, FinishReason.STOP)


def test_stream_close_sends_the_unsent_rest():
    encoder = Plain()
    sent = encoder.reasoning("why") + encoder.text("a") + encoder.tool_call(0, "1", "f", "{}")
    assert sent == b"r:why;t:a;c0:1:f:{};"
    assert encoder.close(REPLY, Usage(1, 1)) == (b"t:bc;c1::g:[];!", b">")


def test_a_reply_that_was_not_begun_is_sent_whole():
    assert Plain().close(REPLY, Usage(1, 1)) == (b"r:why;t:abc;c0:1:f:{};c1::g:[];!", b">")


def test_empty_pieces_are_no_events():
    encoder = Plain()
    assert encoder.text("") == encoder.reasoning("") == b""


def test_stream_close_does_not_resend_changed_text():
    encoder = Plain()
    encoder.text("x")
    before, _ = encoder.close(Reply("abc", None, (), FinishReason.STOP), Usage(1, 1))
    assert before == b"!"
