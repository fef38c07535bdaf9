"""Two tenants on one server: neither sees, ends or acknowledges anything of the other."""

import gc
import json
import tracemalloc
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest
from starlette.routing import Route
from tests.server.house import (
    FakeWorkers,
    a_service,
    an_app,
    body,
    ended,
    served,
    submission,
    until,
)

from bridle.config import AgentSpec, Task
from bridle.gateway.listener import most_connections
from bridle.server.app import make_app
from bridle.server.http import OWNERS, ApiToken, TokenRole
from bridle.server.settings import OwnerSettings

ALICE, BOB, ADMIN = "the-token-of-alice", "the-token-of-bob", "the-token-of-admin"
TOKENS = (
    ApiToken(name="alice", token=ALICE),
    ApiToken(name="bob", token=BOB),
    ApiToken(name="operator", token=ADMIN, roles=(TokenRole.ADMIN,)),
)

OWN = {
    "POST /v1/tasks",
    "GET /v1/tasks",
    "POST /v1/tasks/cancel",
    "GET /v1/tasks/{task_id}",
    "DELETE /v1/tasks/{task_id}",
    "GET /v1/tasks/{task_id}/sessions",
    "GET /v1/sessions",
    "GET /v1/sessions/{session_id}",
    "DELETE /v1/sessions/{session_id}",
    "POST /v1/sessions/{session_id}/fork",
    "POST /v1/sessions/{session_id}/reward",
    "GET /v1/sessions/{session_id}/trajectory",
    "GET /v1/sessions/{session_id}/artifacts/{name:path}",
    "GET /v1/groups",
    "POST /v1/groups/ack",
    "GET /v1/callbacks",
    "GET /v1/status",
    "POST /rollout/task/submit",
    "GET /rollout/task/{task_id}",
    "DELETE /rollout/task/{task_id}",
    "GET /rollout/status",
    "GET /tasks",
    "GET /tasks/{task_id}/sessions",
    "GET /events",
}
"""Routes that show and change what belongs to the token's owner."""

OPERATORS = {
    "POST /v1/callbacks/replay",
    "POST /v1/callbacks/{delivery_id}/replay",
    "GET /metrics",
    "POST /v1/pause",
    "POST /v1/drain",
    "POST /v1/resume",
    "POST /policy",
    "POST /engines/{name:path}",
    "POST /v1/nodes/{name}/drain",
    "POST /v1/replicas",
    "DELETE /v1/replicas",
}
"""Routes for the operator's tokens; a tenant's gets 403."""

SHARED = {"GET /policy", "GET /engines", "GET /v1/nodes", "GET /health", "GET /openapi.json"}
"""Routes that answer every tenant the same and name no task."""


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def routes_of(http):
    """Every route of the application as `METHOD /path`."""
    return {
        f"{method} {route.path}"
        for route in make_app(served(http.service, tokens=TOKENS)).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }


@asynccontextmanager
async def tenants(tmp_path, workers=None, **settings):
    """Clients of alice, bob and the operator on one server."""
    async with an_app(tmp_path, workers, tokens=TOKENS, **settings) as http:
        clients = [
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=http.app),
                base_url="http://server",
                headers=bearer(token),
            )
            for token in (ALICE, BOB, ADMIN)
        ]
        yield http.service, *clients


async def submit(http, *bodies):
    response = await http.post("/v1/tasks", json={"tasks": [*bodies]})
    assert response.status_code == 200, response.text
    return response.json()["tasks"]


async def wait(http, task_id):
    response = await http.get(f"/v1/tasks/{task_id}?wait_s=30")
    assert response.json()["cursor"] is not None, response.text
    return response.json()


async def test_every_route_is_classified_as_owner_operator_or_shared(tmp_path):
    async with an_app(tmp_path, tokens=TOKENS) as http:
        assert routes_of(http) == OWN | OPERATORS | SHARED
    assert len(OWN | OPERATORS | SHARED) == len(OWN) + len(OPERATORS) + len(SHARED)


@pytest.mark.parametrize(
    ("method", "path"),
    [tuple(one.split()) for one in sorted(OWN) if "{task_id}" in one or "{session_id}" in one],
)
async def test_another_owners_objects_give_404(tmp_path, method, path):
    log = tmp_path / "stdout.log"
    log.write_text("secret")
    workers = FakeWorkers()
    async with tenants(tmp_path, workers) as (_, alice, bob, _admin):
        await submit(alice, body("hers"))
        await wait(alice, "hers")
        (session,) = (await alice.get("/v1/tasks/hers/sessions")).json()["sessions"]
        workers.artifacts[session["session_id"], "x.log"] = log
        workers.artifacts[session["session_id"], "capture.sqlite"] = b"captured"

        def at(task, session_id, name):
            parts = {"{task_id}": task, "{session_id}": session_id, "{name:path}": name}
            url = path
            for part, value in parts.items():
                url = url.replace(part, value)
            return url

        for name in ("x.log", "capture.sqlite"):
            url = at("hers", session["session_id"], name)
            never = await bob.request(method, at("nobodys", "nobodys.0", name))
            refused = await bob.request(method, url)
            assert (never.status_code, refused.status_code) == (404, 404)
            named = refused.text.replace(session["session_id"], "nobodys.0")
            assert named.replace("hers", "nobodys") == never.text
            bodies = {"reward": {"reward": 1}, "fork": {"at": 1}}
            own = await alice.request(method, url, json=bodies.get(path.rpartition("/")[2]))
            assert own.status_code == (409 if path.endswith("/fork") else 200)


async def test_lists_show_only_the_owners_rows_and_all_to_an_admin(tmp_path):
    async with tenants(tmp_path) as (service, alice, bob, admin):
        url = "http://127.0.0.1:9/x"
        await submit(alice, body("hers", callback_url=url))
        await submit(bob, body("his", callback_url=url), body("his-2"))
        await wait(alice, "hers")
        await wait(bob, "his")
        await wait(bob, "his-2")

        async def found(http, path, what):
            rows = (await http.get(path)).json()[what]
            return sorted(row["task_id"].partition("-")[0] for row in rows)

        for path, what in (
            ("/v1/tasks", "tasks"),
            ("/v1/tasks?state=completed", "tasks"),
            ("/tasks", "tasks"),
            ("/v1/sessions", "sessions"),
            ("/v1/sessions?state=COMPLETED", "sessions"),
            ("/v1/groups", "groups"),
            ("/v1/groups?order=submitted", "groups"),
            ("/v1/groups?order=priority", "groups"),
        ):
            assert await found(alice, path, what) == ["hers"]
            assert await found(bob, path, what) == ["his", "his"]
            assert await found(admin, path, what) == ["hers", "his", "his"]
        assert await found(alice, "/v1/callbacks", "callbacks") == ["hers"] * 2
        assert await found(admin, "/v1/callbacks", "callbacks") == ["hers"] * 2 + ["his"] * 2
        for path in ("/v1/status", "/rollout/status"):
            response = (await alice.get(path)).json()
            assert response["tasks"] == {"completed": 1}
            assert response["sessions"] == {"COMPLETED": 1}
            assert response["callbacks"] == {"pending": 2}
            assert response["groups_unacked"] == 1
            assert (await admin.get(path)).json()["tasks"] == {"completed": 3}
        assert service.failure is None


async def test_cursor_and_ack_reach_only_the_owners_groups(tmp_path):
    async with tenants(tmp_path) as (_, alice, bob, admin):
        await submit(alice, body("hers"))
        await wait(alice, "hers")
        await submit(bob, body("his"))
        cursor = (await wait(bob, "his"))["cursor"]
        await bob.post("/v1/groups/ack", json={"cursor": cursor})
        response = await bob.post("/v1/groups/ack", json={"task_ids": ["hers", "his"]})
        assert response.json() == {"acked": 0, "unknown": ["hers"]}
        (left,) = (await alice.get("/v1/groups")).json()["groups"]
        assert left["task_id"] == "hers"
        assert (await bob.get("/v1/groups")).json()["groups"] == []
        assert (await admin.post("/v1/groups/ack", json={"cursor": cursor})).json()["acked"] == 1
        assert (await alice.get("/v1/groups")).json()["groups"] == []


async def test_full_quota_of_one_owner_does_not_affect_others(tmp_path):
    owners = {"alice": OwnerSettings(max_queued_samples=5)}
    async with tenants(tmp_path, max_queued_samples=2, owners=owners) as (_, alice, bob, admin):
        await admin.post("/v1/pause")
        await submit(alice, body("t", 5))
        refused = await alice.post("/v1/tasks", json={"tasks": [body("u")]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        await submit(bob, body("t", 2))
        assert (await bob.post("/v1/tasks", json={"tasks": [body("u")]})).status_code == 429
        await admin.post("/v1/resume")
        await wait(alice, "t")
        await submit(alice, body("u"))


async def test_batch_cancel_affects_only_tasks_of_the_caller(tmp_path):
    workers = FakeWorkers(held=True)
    async with tenants(tmp_path, workers) as (_, alice, bob, _admin):
        await submit(alice, body("hers"))
        await until(lambda: workers.living)
        response = await bob.post("/v1/tasks/cancel", json={"task_ids": ["hers", "nobodys"]})
        assert response.json() == {"unknown": ["hers", "nobodys"]}
        assert (await alice.get("/v1/tasks/hers")).json()["state"] == "running"
        response = await alice.post("/v1/tasks/cancel", json={"task_ids": ["hers"]})
        assert response.json() == {"unknown": []}
        assert (await wait(alice, "hers"))["state"] == "cancelled"


async def test_two_owners_may_use_one_task_id(tmp_path):
    async with tenants(tmp_path) as (service, alice, bob, admin):
        assert await submit(alice, body("t", 2)) == [{"task_id": "t", "new": True}]
        assert await submit(bob, body("t", 3)) == [{"task_id": "t", "new": True}]
        assert await submit(admin, body("t", 1)) == [{"task_id": "t", "new": True}]
        assert await submit(bob, body("t", 3)) == [{"task_id": "t", "new": False}]
        for http, count in ((alice, 2), (bob, 3), (admin, 1)):
            assert (await wait(http, "t"))["total_sessions"] == count
            response = await http.get("/rollout/task/t")
            assert {one["task_id"] for one in response.json()["results"]} == {"t"}
            assert len(response.json()["results"]) == count
        rows = (await admin.get("/v1/tasks")).json()["tasks"]
        assert [one["owner"] for one in rows] == ["alice", "bob", "operator"]
        for one in rows:  # an operator's ids of them differ, and lead to them
            found = (await admin.get(f"/v1/tasks/{one['task_id']}")).json()
            assert found["owner"] == one["owner"]
        refused = await bob.post("/v1/tasks", json={"tasks": [body("t", 9)]})
        assert refused.status_code == 409
        assert len(await service.queries.groups(after=0, limit=9)) == 3


async def test_id_reserved_by_one_owner_is_free_for_another(tmp_path):
    async with tenants(tmp_path) as (_, alice, bob, _admin):
        response = await bob.delete("/rollout/task/t?register_if_missing=true")
        assert response.status_code == 200
        assert await submit(alice, body("t")) == [{"task_id": "t", "new": True}]
        assert (await wait(alice, "t"))["state"] == "completed"
        assert (await bob.post("/v1/tasks", json={"tasks": [body("t")]})).status_code == 409


async def test_events_go_to_their_owner_and_to_admins(tmp_path):
    async with tenants(tmp_path) as (service, alice, bob, _admin):
        with (
            service.events.subscribe("alice") as hers,
            service.events.subscribe("bob") as his,
            service.events.subscribe(None) as all_of_them,
        ):
            await submit(alice, body("t"))
            await wait(alice, "t")
            await submit(bob, body("t"))
            await wait(bob, "t")
            service.events.publish({"type": "policy", "version": 1})

            async def outcome(reader):
                found = []
                while (event := await reader.next(0.01)) is not None:
                    found.append(event)
                return found

            for reader in (hers, his):
                result = await outcome(reader)
                assert [one["type"] for one in result] == ["task", "task", "policy"]
                assert {one["task_id"] for one in result[:-1]} == {"t"}
            result = await outcome(all_of_them)
            assert [one.get("owner") for one in result] == ["alice"] * 2 + ["bob"] * 2 + [None]
            assert len({one.get("task_id") for one in result}) == 3


async def test_operators_routes_refuse_a_tenants_token(tmp_path):
    async with tenants(tmp_path) as (_, alice, _bob, _admin):
        for one in sorted(OPERATORS):
            method, path = one.split()
            url = path.replace("{delivery_id}", "x").replace("{name}", "x")
            assert (await alice.request(method, url)).status_code == 403


async def test_shared_routes_disclose_no_task_of_a_tenant(tmp_path):
    async with tenants(tmp_path, FakeWorkers(held=True)) as (service, alice, bob, _admin):
        await submit(alice, body("hers-4711"))
        await until(lambda: service.scheduler.running)
        for one in sorted(SHARED):
            response = await bob.get(one.split()[1])
            assert response.status_code == 200
            assert "hers-4711" not in json.dumps(response.json())


async def test_tasks_without_an_owner_belong_to_admins(tmp_path):
    async with tenants(tmp_path) as (service, alice, _bob, admin):
        await service.submit([submission("old")], owner="")
        await ended(service, "old")
        assert (await alice.get("/v1/tasks/old")).status_code == 404
        assert (await admin.get("/v1/tasks/old")).json()["owner"] == ""
        assert await submit(admin, body("old")) == [{"task_id": "old", "new": False}]


DEEP = json.loads('{"a":' * 300 + "1" + "}" * 300)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"num_samples": 10_000, "metadata": {"x": "y" * 10_000}}, "metadata: each of the 10000"),
        ({"instruction": "y" * (5 << 20)}, "at most 4194304 bytes"),
        ({"metadata": DEEP}, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/tasks", "/rollout/task/submit"])
async def test_a_task_that_would_fill_the_server_s_memory_is_refused_by_name(
    tmp_path, path, more, named
):
    async with tenants(tmp_path) as (_, alice, *_rest):
        task = {"task_id": "t", "instruction": "x", "agent": {"harness": "command"}} | more
        response = await alice.post(path, json=task if "rollout" in path else {"tasks": [task]})
        assert response.status_code == 422, response.text[:300]
        assert named in response.json()["error"]["message"]


async def test_cached_task_checks_take_bounded_memory(tmp_path):
    async with a_service(tmp_path) as service:

        def check(n):
            agent = AgentSpec(harness="command", command=f"#{n}" * 250_000)
            service.check(Task(task_id=f"t{n}", instruction="Do it.", agent=agent))

        check(0)  # loads what every check needs
        tracemalloc.start()
        try:
            for n in range(1, 9):
                check(n)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 100_000
        finally:
            tracemalloc.stop()


async def test_one_owners_requests_leave_connections_to_others(tmp_path):
    async with a_service(tmp_path) as service:
        whole = served(service, tokens=TOKENS)
        transport = httpx.ASGITransport(app=make_app(whole))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            with ExitStack() as long:
                for _ in range(most_connections() // OWNERS):
                    long.enter_context(whole.counted("alice"))
                hers = await http.get("/v1/tasks", headers=bearer(ALICE))
                assert (hers.status_code, "retry-after" in hers.headers) == (429, True)
                assert (await http.get("/v1/tasks", headers=bearer(BOB))).status_code == 200
            assert (await http.get("/v1/tasks", headers=bearer(ALICE))).status_code == 200
        assert not whole.in_progress.total()
