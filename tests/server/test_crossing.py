"""Attacks of a submitter who has a token and one permitted import path."""

import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from tests.cli.test_serve import tasks, whole_config
from tests.server.house import KNOWN, TOKEN, an_app, body

from bridle.capture.records import SessionRecord
from bridle.capture.sqlite import SqliteStore
from bridle.cli.serve import server_of
from bridle.client import AsyncClient
from bridle.errors import ServerError
from bridle.folders import private_file
from bridle.node import session as node_session
from bridle.server.http import ApiToken, TokenRole
from bridle.server.settings import SubmissionPolicy

TENANT = ApiToken(
    name="tenant", token="the-token-of-a-tenant", roles=(TokenRole.SUBMIT, TokenRole.READ)
)
ADMIN, HELPER = "the-token-of-the-admin", "the-token-of-a-helper"
TENANTS = ("alice", "bob", "carol")
SCORING = "tests.evaluators.scoring"
POLAR = {"task_id": "t", "instruction": "x", "agent": {"harness": "codex"}}


@pytest.mark.parametrize(
    ("param", "change"),
    [
        (
            "agent.settings.modules[0]",
            {
                "agent": {
                    "harness": "function",
                    "function": f"{SCORING}:of_file",
                    "settings": {"modules": ["runs"]},
                }
            },
        ),
        (
            "agent.settings.solution",
            {"agent": {"harness": "oracle", "settings": {"solution": "/var/lib/bridle"}}},
        ),
        (
            "evaluator.env.PYTHONPATH",
            {
                "evaluator": {
                    "strategy": "function",
                    "config": {"function": f"{SCORING}:of_everything"},
                    "env": {"PYTHONPATH": "."},
                }
            },
        ),
    ],
)
async def test_fields_that_reach_the_servers_machine_are_refused_by_name(tmp_path, param, change):
    """The data folder as a `module` or a `solution`; a variable for a function on the host."""
    permits = SubmissionPolicy(
        local=True, import_paths=(SCORING,), trusted=(f"{SCORING}:of_everything",)
    )
    async with an_app(tmp_path, permits=permits) as http:
        for path, sent in (
            ("/v1/tasks", {"tasks": [body() | change]}),
            ("/rollout/task/submit", {**POLAR, **change}),
        ):
            response = await http.post(path, json=sent)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (422, param), error


async def test_local_runtime_is_for_admins_unless_the_operator_lists_it(tmp_path):
    own = {"authorization": f"Bearer {TENANT.token}"}
    for runtimes, status in ((None, 422), (("local",), 200)):
        permits = SubmissionPolicy(local=True, runtimes=runtimes)
        folder = tmp_path / str(status)
        folder.mkdir()
        async with an_app(folder, permits=permits, tokens=[TENANT, TOKEN]) as http:
            name = f"t{status}"
            response = await http.post("/v1/tasks", json={"tasks": [body(name)]}, headers=own)
            assert response.status_code == status
            response = await http.post(
                "/v1/tasks", json={"tasks": [body(f"a-{name}")]}, headers=KNOWN
            )
            assert response.status_code == 200


@pytest.mark.sandbox
@pytest.mark.timeout(120)
async def test_scoring_function_of_a_task_runs_in_the_sandbox(tmp_path):
    """`PYTHONPATH=.` beside the files that a scoring function asked for ran them on the host."""
    marker = tmp_path / "marker"
    planted = f"""
mkdir -p tests/evaluators
touch tests/__init__.py tests/evaluators/__init__.py
cat > tests/evaluators/scoring.py <<'END'
def of_file(session):
    open({str(marker)!r}, "w").close()
    return 1.0
END
"""
    task = {
        **tasks(1, samples=1)[0],
        "runtime": {"backend": "local", "prepare": [{"type": "exec", "command": planted}]},
        "evaluator": {
            "strategy": "function",
            "config": {"function": f"{SCORING}:of_file", "files": ["tests"], "sandbox": False},
            "env": {"PYTHONPATH": "."},
        },
    }
    config = whole_config(tmp_path, permits={"import_paths": (SCORING,)})
    async with server_of(config) as opened, AsyncClient(opened.url) as client:
        assert await client.submit(task)
        await client.wait("task-0", timeout_s=90)
        session = await client.session("task-0.0")
    assert str(marker) in session["error"], "the function was called, inside"
    assert not marker.exists()


async def fork(client, session_id, **wanted):
    path = f"/v1/sessions/{session_id}/fork"
    headers = {"authorization": f"Bearer {client.token}"}
    async with httpx.AsyncClient(base_url=client.url, headers=headers, timeout=60) as http:
        answer = await http.post(path, json=wanted)
        return answer.status_code, answer.json()


@pytest.mark.timeout(120)
async def test_only_the_owner_of_a_session_forks_it_and_its_forks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the data folder is relative, as by default
    tokens = tmp_path / "tokens.toml"
    both = ("the-token-of-alice", "the-token-of-bob")
    rows = (f'[[tokens]]\nname = "{token[13:]}"\ntoken = "{token}"\n' for token in both)
    private_file(tokens).write_text("".join(rows))
    permits = {"runtimes": ("local",)}
    config = whole_config(tmp_path, permits=permits, tokens=tokens, data=Path("data"))
    async with (
        server_of(config) as opened,
        AsyncClient(opened.url, token=both[0]) as alice,
        AsyncClient(opened.url, token=both[1]) as bob,
    ):
        await alice.submit(tasks(1, samples=1)[0])
        await alice.wait("task-0", timeout_s=60)
        (original,) = await alice.sessions("task-0")
        session_id = original["session_id"]
        for _ in range(2):  # the second one changes nothing
            name = await alice.fork(session_id, at=1, samples=2)
        assert name == f"{session_id}.at1"
        await alice.wait(name, timeout_s=60)
        forks = await alice.sessions(name)
        assert [one["status"] for one in forks] == ["COMPLETED"] * 2
        async for group in alice.groups(quiet_s=1):
            found = [one.metadata.get("fork", {}).get("verdict") for one in group.results]
            assert found == ([None] if group.task_id == "task-0" else ["exact", "exact"])
        for one in forks:
            stats = (await alice.trajectory(one["session_id"])).metadata["stats"]
            assert stats["tokens_excluded"]["replayed"] > 0
        again = await alice.fork(forks[0]["session_id"], at=1, task_id="again")
        assert (await alice.wait(again, timeout_s=60))["usable_sessions"] == 1

        assert (await fork(bob, session_id, at=1))[0] == 404
        status, response = await fork(alice, session_id, at=9)
        assert (status, response["error"]["param"]) == (422, "at")
        assert "replies, fewer than at = 9" in response["detail"]
        status, response = await fork(alice, session_id, at=1, task_id="no name")
        assert (status, response["error"]["param"]) == (422, "task_id")
        monkeypatch.setattr(node_session, "FORK_BYTES", 100)
        status, response = await fork(alice, session_id, at=1, task_id="large")
        assert (status, response["error"]["param"]) == (422, "at")
        assert "MiB of captured calls" in response["detail"]


@pytest.mark.timeout(120)
async def test_a_captured_session_of_another_owner_is_forked_by_admins_alone(tmp_path):
    tokens = tmp_path / "tokens.toml"
    rows = (f'[[tokens]]\nname = "{name}"\ntoken = "the-token-of-{name}"\n' for name in TENANTS)
    private_file(tokens).write_text("".join([*rows, 'roles = ["admin"]\n']))
    permits = {"runtimes": ("local",), "host_paths": (tmp_path,)}
    async with AsyncExitStack() as stack:
        config = whole_config(tmp_path, permits=permits, tokens=tokens)
        url = (await stack.enter_async_context(server_of(config))).url
        alice, bob, admin = [
            await stack.enter_async_context(AsyncClient(url, token=f"the-token-of-{name}"))
            for name in TENANTS
        ]
        await alice.submit(tasks(1, samples=1)[0])
        await alice.wait("task-0", timeout_s=60)
        (hers,) = await alice.sessions("task-0")
        own = tmp_path / "own.sqlite"
        async with await SqliteStore.open(own) as store:
            await store.open_session(SessionRecord("of-bridle-run", time.time()))

        async def submit(client, capture, session):
            fork = {"capture": str(capture), "session": session, "at": 1}
            task = {**tasks(1, samples=1)[0], "task_id": f"fork-of-{session}", "fork": fork}
            return await client.submit(task)

        capture = tmp_path / "data" / "capture.sqlite"
        with pytest.raises(ServerError, match="was never opened") as refused:
            await submit(bob, capture, hers["session_id"])
        with pytest.raises(ServerError, match="was never opened") as absent:
            await submit(bob, capture, "nobody-s")
        assert (refused.value.status, absent.value.status) == (422, 422)
        for client in (alice, admin):
            assert await submit(client, capture, hers["session_id"])
        assert await submit(bob, own, "of-bridle-run")
        with pytest.raises(ServerError, match="is set by the server"):
            await bob.submit({**tasks(1, samples=1)[0], "owner": "alice"})


@pytest.mark.timeout(120)
async def test_fork_is_checked_against_the_callers_current_policy(tmp_path):
    """A session of `local` that an admin's token submitted, forked with another of its owner's."""
    tokens = tmp_path / "tokens.toml"
    private_file(tokens).write_text(
        f'[[tokens]]\nname = "operator"\ntoken = "{ADMIN}"\nroles = ["admin"]\n'
        f'[[tokens]]\nname = "operator"\ntoken = "{HELPER}"\n'
    )
    async with (
        server_of(whole_config(tmp_path, tokens=tokens)) as opened,
        AsyncClient(opened.url, token=ADMIN) as admin,
        AsyncClient(opened.url, token=HELPER) as helper,
    ):
        await admin.submit(tasks(1, samples=1)[0])
        await admin.wait("task-0", timeout_s=60)
        status, response = await fork(helper, "task-0.0", at=1)
        assert (status, response["error"]["code"]) == (422, "not_permitted")
