"""The server under what no client should send: no 500, nothing lost."""

import random
import string

import orjson
import pytest
from tests.server.house import an_app, body

FIELDS = (
    *("task_id", "instruction", "num_samples", "runtime", "agent", "builder", "evaluator"),
    *("metadata", "callback_url", "dispatch_priority", "budgets", "limits", "sampling", "train"),
    *("timeout_seconds", "max_refills", "version", "hold", "cursor", "task_ids", "tasks"),
)
VALUES = (None, True, 0, -1, 2**62, 1.5, "", "x", "\x00", "é", [], [1], {}, {"a": {}}, ["x"] * 3)
WORDS = ("known", "known.0", "%00", "..%2f..", "a" * 300, "é", "nobody")
QUERIES = ("-1", "0", "1", "x", str(2**80), "", "done", "true", "results")


def operations(description):
    """Method, path, query names of every route that answers at once."""
    for path, methods in description["paths"].items():
        if path == "/events":
            continue
        for method, operation in methods.items():
            names = [one["name"] for one in operation["parameters"] if one["in"] == "query"]
            yield method.upper(), path, names


def drawn_body(drawn):
    """Something that is no good, or nearly good."""
    changes = {drawn.choice(FIELDS): drawn.choice(VALUES) for _ in range(drawn.randint(0, 3))}
    one = body(f"t{drawn.randint(0, 9)}") | changes
    return drawn.choice([changes, one, {"tasks": [one]}, drawn.choice(VALUES)])


@pytest.mark.parametrize("seed", range(4))
async def test_no_route_answers_500_whatever_comes(tmp_path, seed):
    """Drawn from our own OpenAPI: every route, with wrong paths, queries and bodies."""
    drawn = random.Random(seed)
    async with an_app(tmp_path) as http:
        await http.post("/v1/tasks", json={"tasks": [body("known")]})
        description = (await http.get("/openapi.json")).json()
        for method, path, names in operations(description):
            for name in ("task_id", "session_id", "delivery_id", "name"):
                path = path.replace(f"{{{name}}}", drawn.choice(WORDS))  # noqa: PLW2901 - filled in
            values = {
                name: drawn.choice(QUERIES)
                for name in names
                if name not in ("wait_s", "timeout_s") and drawn.random() < 0.5
            }
            content = orjson.dumps(drawn_body(drawn))
            told = await http.request(method, path, params=values, content=content)
            assert told.status_code not in (500, 501, 502), (method, path, values, told.text)
            if told.status_code >= 400:
                assert {"error", "detail"} <= set(told.json())
        assert http.service.broken is None


@pytest.mark.parametrize("depth", [10, 100_000])
async def test_a_body_nested_without_end_is_refused(tmp_path, depth):
    async with an_app(tmp_path) as http:
        told = await http.post("/v1/tasks", content=b'{"tasks":' + b"[" * depth)
        assert told.status_code == 400
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        whole = orjson.dumps({"tasks": [body("x")]})[:-3] + b',"metadata":' + nested + b"}]}"
        assert (await http.post("/v1/tasks", content=whole)).status_code in (200, 400, 422)


async def test_a_task_may_hold_any_text(tmp_path):
    async with an_app(tmp_path) as http:
        text = string.printable + "\x00é\U0001f600\u202e"
        told = await http.post(
            "/v1/tasks", json={"tasks": [body("t", instruction=text, metadata={"k": text})]}
        )
        assert told.status_code == 200, told.text
        assert (await http.get("/v1/tasks/t?wait_s=20")).json()["state"] == "completed"
