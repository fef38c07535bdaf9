import pytest

from bridle.dialects.base import RouteKind, caller, models_route, tidy
from bridle.types import Dialect


@pytest.mark.parametrize(
    ("path", "clean"),
    [("", "/"), ("/", "/"), ("//v1//models/", "/v1/models"), ("v1/x", "/v1/x")],
)
def test_paths_are_tidied(path, clean):
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
def test_the_caller_decides_whose_list_it_is(path, headers, dialect):
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
