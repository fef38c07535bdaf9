"""Steps that every route shares: tokens, limits, bodies and errors."""

import pytest
from tests.server.house import an_app, body

from bridle.errors import EngineError, StateError, StoreError
from bridle.gateway.keys import AT_ONCE
from bridle.server.http import MAX_BODY, ApiToken, TokenRole
from bridle.server.settings import SubmissionPolicy

READER = ApiToken(name="submitter", token="a-reader-of-sixteen", roles=(TokenRole.READ,))
SUBMITTER = ApiToken(name="submitter", token="a-submitter-of-sixteen", roles=(TokenRole.SUBMIT,))


def bearer(token):
    return {"authorization": f"Bearer {token.token}"}


async def test_request_needs_a_token_with_the_role(tmp_path):
    permits = SubmissionPolicy(runtimes=("local",))
    async with an_app(tmp_path, tokens=[READER, SUBMITTER], permits=permits) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/status")).status_code == 401
        assert (await http.get("/v1/status", headers=bearer(READER))).status_code == 200
        response = await http.post("/v1/tasks", headers=bearer(READER), json={"tasks": [body()]})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        response = await http.post("/v1/tasks", headers=bearer(SUBMITTER), json={"tasks": [body()]})
        assert response.status_code == 200
        assert (await http.post("/policy", headers=bearer(SUBMITTER))).status_code == 403
        polar = {"x-polar-control-token": READER.token}
        assert (await http.get("/rollout/status", headers=polar)).status_code == 200
        assert (await http.get("/v1/tasks", headers=bearer(READER))).json()["tasks"][0][
            "owner"
        ] == "submitter"


async def test_basic_auth_password_is_accepted_as_the_token(tmp_path):
    """`http://x:TOKEN@host`: HTTP clients make `Authorization: Basic` of it."""
    async with an_app(tmp_path, tokens=[READER]) as http:
        for password, status in ((READER.token, 200), ("wrong", 401), ("", 401)):
            response = await http.get(f"http://x:{password}@server/v1/status")
            assert response.status_code == status
        for header in ("Basic ???", "Basic", "Basic é", f"Digest {READER.token}"):
            response = await http.get("/v1/status", headers={"authorization": header.encode()})
            assert response.status_code == 401


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "malformed"),
        (b"\xff\xfe", 400, "malformed"),
        (b"[]", 422, "invalid"),
        (b"", 422, "invalid"),
        (b'{"tasks": 3}', 422, "invalid"),
        (b'{"tasks": [], "x": 1}', 422, "invalid"),
    ],
)
async def test_a_malformed_or_invalid_body_gets_400_or_422(tmp_path, content, status, code):
    async with an_app(tmp_path) as http:
        response = await http.post("/v1/tasks", content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.json()["detail"] == response.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1 << 20
            yield b" " * (1 << 20)

    async with an_app(tmp_path) as http:
        response = await http.post("/v1/tasks", content=endless())
        assert response.status_code == 413
        assert sent <= MAX_BODY + (4 << 20)
        response = await http.post(
            "/v1/tasks", headers={"content-length": str(100 << 20)}, content=b" "
        )
        assert response.status_code == 413


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-5", "9" * 400, "1.5", ""])
async def test_query_parameter_out_of_bounds_is_named(tmp_path, limit):
    async with an_app(tmp_path) as http:
        response = await http.get("/v1/tasks", params={"limit": limit})
        assert (response.status_code, response.json()["error"]["param"]) == (422, "limit")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StateError("locked"), 503, "store_error"),
        (StoreError("full"), 503, "store_error"),
        (EngineError("gone"), 502, "engine_error"),
        (KeyError("a bug"), 500, "internal"),
    ],
)
async def test_service_errors_map_to_http_statuses_and_bugs_are_not_disclosed(
    tmp_path, error, status, code
):
    async with an_app(tmp_path) as http:

        async def fail(_):
            raise error

        http.service.status = fail
        response = await http.get("/v1/status")
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert ("retry-after" in response.headers) == (status == 503)
        assert "a bug" not in response.text


@pytest.mark.parametrize(
    ("accept", "status"),
    [("*/*", 200), ("application/msgpack;q=1", 200), ("text/html, */*;q=0.1", 200), ("a/b", 406)],
)
async def test_accept_header_selects_the_media_type(tmp_path, accept, status):
    async with an_app(tmp_path) as http:
        response = await http.get("/v1/groups", headers={"accept": accept})
        assert response.status_code == status


async def test_a_full_quota_gets_429_and_a_conflicting_task_gets_409(tmp_path):
    async with an_app(tmp_path, max_queued_samples=2) as http:
        await http.service.pause()
        assert (await http.post("/v1/tasks", json={"tasks": [body(samples=2)]})).status_code == 200
        response = await http.post("/v1/tasks", json={"tasks": [body("u")]})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "quota")
        assert response.headers["retry-after"] == "5"
        assert "2 samples queued (max_queued_samples)" in response.json()["detail"]
        never = await http.post("/v1/tasks", json={"tasks": [body("v", samples=3)]})
        assert (never.status_code, never.json()["error"]["code"]) == (422, "invalid")
        response = await http.post("/v1/tasks", json={"tasks": [body(samples=1)]})
        assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")


async def test_guessing_tokens_gives_429_and_the_right_token_still_works(tmp_path):
    async with an_app(tmp_path) as http:
        guess = {"authorization": "Bearer wrong"}
        for _ in range(AT_ONCE):
            assert (await http.get("/v1/status", headers=guess)).status_code == 401
        refused = await http.get("/v1/status", headers=guess)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_attempts")
        assert refused.headers["retry-after"] == "2"
        assert (await http.get("/v1/status")).status_code == 200
        assert (await http.get("/health", headers=guess)).status_code == 200
