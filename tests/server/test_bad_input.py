"""The server under what no client should send: no 500, nothing lost."""

import asyncio
import random
import re
import sqlite3
import string
from contextlib import AsyncExitStack, contextmanager

import orjson
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool
from structlog.testing import capture_logs
from tests.server.house import FakeWorkers, an_app, body, ended, result, until

from bridle.config import Task
from bridle.server.http import MOST_VALUES

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
async def test_no_random_request_gets_a_5xx_status(tmp_path, seed):
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
            response = await http.request(method, path, params=values, content=content)
            assert response.status_code not in (500, 501, 502), (
                method,
                path,
                values,
                response.text,
            )
            if response.status_code >= 400:
                assert {"error", "detail"} <= set(response.json())
        assert http.service.failure is None


@pytest.mark.parametrize("depth", [10, 100_000])
async def test_a_deeply_nested_body_is_refused(tmp_path, depth):
    async with an_app(tmp_path) as http:
        response = await http.post("/v1/tasks", content=b'{"tasks":' + b"[" * depth)
        assert response.status_code == (400 if depth == 10 else 422)
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        whole = orjson.dumps({"tasks": [body("x")]})[:-3] + b',"metadata":' + nested + b"}]}"
        assert (await http.post("/v1/tasks", content=whole)).status_code in (200, 400, 422)


@pytest.mark.parametrize("place", ["metadata", "limits", "agent"])
async def test_a_field_nested_900_deep_is_refused_by_its_name(tmp_path, place):
    async with an_app(tmp_path) as http:
        deep = b'{"a":' * 900 + b"1" + b"}" * 900
        whole = orjson.dumps({"tasks": [body("x", **{place: "@"})]}).replace(b'"@"', deep)
        response = await http.post("/v1/tasks", content=whole)
        assert response.status_code == 422
        assert response.json()["error"]["param"] == f"tasks.0.{place}"


@pytest.mark.parametrize(
    "place", ["num_samples", "timeout_seconds", "metadata", "limits.max_turns"]
)
async def test_a_number_of_400_digits_is_refused_by_its_fields_name(tmp_path, place):
    async with an_app(tmp_path) as http:
        name, _, inner = place.partition(".")
        whole = orjson.dumps({"tasks": [body("x", **{name: {inner: "@"} if inner else "@"})]})
        response = await http.post("/v1/tasks", content=whole.replace(b'"@"', b"9" * 400))
        assert response.status_code == 422
        assert response.json()["error"]["param"] == f"tasks.0.{place}"


async def test_a_body_with_too_many_json_values_gets_413(tmp_path):
    fields = b",".join(b'"k%d":0' % number for number in range(MOST_VALUES + 1))
    async with an_app(tmp_path) as http:
        response = await http.post("/v1/tasks", content=b'{"tasks":[],"x":{%b}}' % fields)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
        assert f"more than {MOST_VALUES} JSON values" in response.json()["error"]["message"]


async def test_a_body_with_over_1000_errors_is_refused_with_their_count(tmp_path):
    rules = [{"wrong": 1}] * 1000
    agent = {"harness": "command", "command": "true", "kind_rules": rules}
    async with an_app(tmp_path) as http:
        for wanted in ([1] * 1001, [body("a", agent=agent)]):
            response = (await http.post("/v1/tasks", json={"tasks": wanted})).json()["error"]
            assert response["code"] == "invalid"
            assert re.search(r"the body: \d{4} of its values are wrong", response["message"])


async def test_null_for_a_list_is_refused_by_its_name(tmp_path):
    async with an_app(tmp_path) as http:
        for path, field in (("/v1/tasks", "tasks"), ("/v1/groups/ack", "task_ids")):
            response = await http.post(path, json={field: None})
            assert (response.status_code, response.json()["error"]["param"]) == (422, field)


async def test_a_task_may_hold_any_text(tmp_path):
    async with an_app(tmp_path) as http:
        text = string.printable + "\x00é\U0001f600\u202e"
        response = await http.post(
            "/v1/tasks", json={"tasks": [body("t", instruction=text, metadata={"k": text})]}
        )
        assert response.status_code == 200, response.text
        assert (await http.get("/v1/tasks/t?wait_s=20")).json()["state"] == "completed"


PRAGMAS: list[str] = []
"""Run on every connection before it is used."""


def tell(connection, *_):
    cursor = connection.cursor()
    for pragma in PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


@pytest.fixture(scope="module", autouse=True)
def pragma_listener():
    """For all tests here: a listener cannot leave while a connection is on its way out."""
    event.listen(Pool, "checkout", tell)
    yield
    event.remove(Pool, "checkout", tell)


@contextmanager
def pragmas_on_checkout(*pragmas):
    """Run these pragmas on every connection before it is used."""
    PRAGMAS[:] = pragmas
    yield
    PRAGMAS.clear()


async def refused_for_now(http, task_id):
    """A submit that is answered with 503 and the advice to come again."""
    task = body(task_id, metadata={"long": "x" * 200_000})
    response = await http.post("/v1/tasks", json={"tasks": [task]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1"), response.text
    assert response.json()["error"]["code"] == "store_error"
    return task


async def held_run(http):
    """An accepted task whose session runs until the test lets it end."""
    await http.post("/v1/tasks", json={"tasks": [body("a")]})
    await until(lambda: http.service.workers.living)


async def all_is_there(http, task):
    """Return what ran meanwhile goes on and ends once, and what was refused can be sent again."""
    if "a.0" in http.service.workers.living:
        http.service.workers.let("a.0")
    await ended(http.service, "a")
    assert http.service.workers.ran.count("a.0") == 1
    assert (await http.post("/v1/tasks", json={"tasks": [task]})).status_code == 200
    http.service.workers.held = False
    if living := http.service.workers.living:
        for run_id in list(living):
            http.service.workers.let(run_id)
    assert (await ended(http.service, task["task_id"]))["usable"] == 1
    assert http.service.failure is None


async def test_full_database_gives_503_and_loses_nothing(sqlite, tmp_path):
    async with an_app(tmp_path, FakeWorkers(held=True)) as http:
        await held_run(http)
        pages = await sqlite.pages(http.service)
        with pragmas_on_checkout(f"max_page_count={pages}"):
            task = await refused_for_now(http, "b")
            assert (await http.get("/v1/status")).status_code == 200  # what is there is read
        with pragmas_on_checkout("max_page_count=1000000"):
            await all_is_there(http, task)


LONG = {"error": "x" * 200_000}
"""What makes a result need room."""


async def full_with_a_result_in_hand(http, log):
    """Let the held run end; its result cannot be stored, which is said."""
    http.service.workers.let("a.0", **LONG)
    await until(lambda: any(one.get("doing") == "storing a.0" for one in log))
    assert {one["error"] for one in log if one.get("doing") == "storing a.0"} == {
        "the database cannot be used: database or disk is full"
    }


async def test_ended_run_waits_for_a_full_database_and_is_stored(sqlite, tmp_path):
    async with an_app(tmp_path, FakeWorkers(held=True)) as http:
        await held_run(http)
        pages = await sqlite.pages(http.service)
        with pragmas_on_checkout(f"max_page_count={pages}"), capture_logs() as log:
            await full_with_a_result_in_hand(http, log)
            assert (await http.get("/v1/tasks/a")).json()["state"] == "running"
            assert (await http.get("/v1/status")).json()["running"] == 1
            task = await refused_for_now(http, "b")
        with pragmas_on_checkout("max_page_count=1000000"):
            assert (await ended(http.service, "a"))["usable"] == 1
            (group,) = (await http.get("/v1/groups?include=trajectories")).json()["groups"]
            (one,) = group["results"]
            assert (one["session_id"], one["error"]) == ("a.0", LONG["error"])
            assert len(one["trajectory"]["traces"]) == 1
            await all_is_there(http, task)
            assert http.service.workers.ran == ["a.0", "b.0"]


async def test_stopping_server_leaves_an_unstored_result_to_the_next_one(sqlite, tmp_path):
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(an_app(tmp_path, FakeWorkers(held=True)))
        await held_run(http)
        pages = await sqlite.pages(http.service)
        with pragmas_on_checkout(f"max_page_count={pages}"), capture_logs() as log:
            await full_with_a_result_in_hand(http, log)
            await stack.aclose()
    workers = FakeWorkers()
    task = Task(task_id="a", instruction="Do it.")
    workers.recallable = {"a.0": result("a.0", task, 0, **LONG)}  # a node keeps what has ended
    async with an_app(tmp_path, workers) as http:
        assert (await ended(http.service, "a"))["usable"] == 1
        assert workers.ran == []


async def test_locked_database_gives_503_and_loses_nothing(sqlite, tmp_path):
    async with an_app(tmp_path, FakeWorkers(held=True)) as http:
        await held_run(http)
        other = sqlite3.connect(sqlite.path, isolation_level=None, check_same_thread=False)
        # In a thread: it may have to wait for a transaction that this loop is to end.
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        with pragmas_on_checkout("busy_timeout=20"):
            task = await refused_for_now(http, "b")
            assert (await http.get("/v1/tasks/a")).json()["state"] == "running"
            other.execute("ROLLBACK")
            await all_is_there(http, task)
        other.close()


class Sqlite:
    """The test's own SQLite database, also in the suite of another one."""

    def __init__(self, path):
        self.path = path

    async def pages(self, service):
        async with service.store.database.read() as connection:
            return (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()


@pytest.fixture
def sqlite(tmp_path, monkeypatch):
    path = tmp_path / "own.sqlite"
    monkeypatch.setenv("BRIDLE_TEST_DATABASE", str(path))
    return Sqlite(path)
