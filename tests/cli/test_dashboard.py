"""`bridle dashboard` in a process of its own, and mounted by `bridle serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.cli.test_serve import a_server, script, tasks
from tests.dashboard.test_app import links_to

from bridle.cli.config import load_config
from bridle.cli.serve import access_control, may, server_of
from bridle.client import AsyncClient, Client
from bridle.errors import ConfigError
from bridle.server.http import ApiToken, Auth, TokenRole

STATE = os.environ["XDG_STATE_HOME"]
"""Where servers of these tests are found."""

pytestmark = pytest.mark.timeout(180)


@contextmanager
def serving(*arguments, **environment):
    """Return where a dashboard listens; leaving ends it as Ctrl-C does."""
    command = [sys.executable, "-m", "bridle.cli", "dashboard", *map(str, arguments)]
    process: Any = subprocess.Popen(
        [*command, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": STATE, **environment},
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line)["url"]
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:  # noqa: S310 - loopback
        return answer.status, answer.read().decode()


def test_dashboard_shows_a_finished_run_without_changing_its_files(finished_run):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()}

    with serving(finished_run) as url:
        status, page = fetch(url)
        with pytest.raises(urllib.error.HTTPError, match="421"):
            fetch(url, Host="evil.example")

    assert status == 200
    assert "captured" in page
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_dashboard_with_a_token_refuses_requests_without_the_token(finished_run):
    token = "a-token-for-the-browser"
    with serving(finished_run, BRIDLE_DASHBOARD_TOKEN=token + "\n") as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(url)
        status, _ = fetch(url, Authorization=f"Bearer {token}")

    assert status == 200


def test_dashboard_refuses_a_missing_or_empty_folder(say, tmp_path):
    gone = say("dashboard", tmp_path / "none")
    empty = say("dashboard", tmp_path)

    assert (gone.code, empty.code) == (2, 2)
    assert "no such file or folder" in gone.err
    assert "nothing to show" in empty.err


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "machine.example"])
def test_dashboard_on_a_public_address_needs_a_token(host):
    with pytest.raises(ConfigError, match="BRIDLE_DASHBOARD_TOKEN"):
        access_control(host, None)
    assert access_control(host, "a-token") is not None
    assert access_control("127.0.0.2", None) is None


TOKENS = """
[[tokens]]
name = "trainer"
token = "the-token-of-a-reader"
roles = ["read"]
[[tokens]]
name = "trainer"
token = "the-token-of-a-trainer"
roles = ["submit"]
[[tokens]]
name = "trainer"
token = "the-token-of-a-person"
[[tokens]]
name = "stranger"
token = "the-token-of-a-stranger"
roles = ["read"]
[[tokens]]
name = "chief"
token = "the-token-of-a-chief"
roles = ["admin"]
"""
HTML = {"accept": "text/html"}


def tenants(tmp_path):
    """The config of a server with `TOKENS`."""
    (tmp_path / "tokens.toml").write_text(TOKENS)
    return load_config(
        None,
        engines=[f"scripted:{script(tmp_path)}"],
        server={
            "port": 0,
            "data": tmp_path / "data",
            "tokens": tmp_path / "tokens.toml",
            "permits": {"runtimes": ("local",)},
        },
        executor={"node": {"run_slots": 2}},
    )


async def test_dashboard_under_ui_shows_only_the_sessions_of_the_token_s_owner(tmp_path):
    async with (
        server_of(tenants(tmp_path), dashboard=True) as opened,
        AsyncClient(opened.url, token="the-token-of-a-trainer") as trainer,
        httpx.AsyncClient(base_url=opened.url, headers=HTML) as browser,
    ):
        await trainer.submit_many(tasks(1))
        async with AsyncClient(opened.url, token="the-token-of-a-reader") as reader:
            await reader.wait("task-0", timeout_s=60)
            session, *_ = await reader.sessions("task-0")

        at = f"/ui/session/{session['session_id']}"
        closed = await browser.get(at)
        wrong = await browser.post("/ui/login", data={"token": "the-token-of-a-trainer"})
        right = await browser.post("/ui/login", data={"token": "the-token-of-a-reader"})
        first = await browser.get("/ui/")
        page = await browser.get(at)
        task = await browser.get("/ui/task?id=task-0")
        exchange = await browser.get(links_to("exchange", page.text)[0])
        traces = links_to("trace", page.text)
        tokens = await browser.get(next(one for one in traces if "/messages" not in one))
        log = await browser.get(links_to("file", page.text)[0])
        missing = await browser.get("/ui/session/none")
        browser.cookies.clear()
        await browser.post("/ui/login", data={"token": "the-token-of-a-stranger"})
        others = [await browser.get(path) for path in (at, "/ui/task?id=task-0", str(log.url))]
        theirs = [await browser.get(path) for path in ("/ui/", "/ui/sessions", "/ui/tasks")]
        api = await browser.get("/v1/status")
        whole = await browser.get("/ui/", headers={"authorization": "Bearer the-token-of-a-chief"})

    assert (closed.status_code, wrong.status_code, right.status_code) == (401, 401, 303)
    assert right.headers["location"] == "/ui/"
    assert "Path=/ui" in right.headers["set-cookie"]
    assert first.status_code == 200
    assert "captured" not in first.text
    assert "captured" in whole.text
    assert "groups not acknowledged by their trainer" in first.text
    assert "root: <b>first</b>" in page.text
    assert "Write done to out.txt." in exchange.text
    assert task.status_code == tokens.status_code == log.status_code == 200
    assert "trained, logprob" in tokens.text
    assert missing.status_code == 404
    assert [one.status_code for one in others] == [404, 404, 404]
    assert [(one.status_code, "task-0" in one.text) for one in theirs] == [(200, False)] * 3
    assert api.status_code == 401, "the cookie opens the dashboard and nothing else"


async def test_a_submit_token_forks_a_session_from_its_dashboard_page_and_a_read_token_cannot(
    tmp_path,
):
    async with (
        server_of(tenants(tmp_path), dashboard=True) as opened,
        AsyncClient(opened.url, token="the-token-of-a-person") as person,
        httpx.AsyncClient(base_url=opened.url, headers={"origin": opened.url}) as browser,
    ):
        await person.submit_many(tasks(1, samples=1))
        await person.wait("task-0", timeout_s=60)
        (session,) = await person.sessions("task-0")
        at = f"/ui/session/{session['session_id']}"
        pages, refused = {}, {}
        for name in ("reader", "stranger", "person"):
            browser.cookies.clear()
            await browser.post("/ui/login", data={"token": f"the-token-of-a-{name}"})
            pages[name] = await browser.get(f"{at}/attempts")
            if name != "person":
                refused[name] = await browser.post(f"{at}/fork", data={"at": "1"})
        moved = await browser.post(f"{at}/fork", data={"at": "1", "samples": "2"})
        late = await browser.post(f"{at}/fork", data={"at": "9"})
        (name,) = [one["task_id"] async for one in person.tasks() if one["task_id"] != "task-0"]
        await person.wait(name, timeout_s=60)
        task = await browser.get(moved.headers["location"])
        tree = await browser.get(f"{at}/attempts")
        fork, *_ = await person.sessions(name)
        below = await browser.get(f"/ui/session/{fork['session_id']}/attempts")

    assert 'class="fork"' in pages["person"].text
    assert 'class="fork"' not in pages["reader"].text
    assert pages["stranger"].status_code == 404
    assert {one.status_code for one in refused.values()} == {403}
    assert (moved.status_code, late.status_code, task.status_code) == (303, 422, 200)
    assert "replies, fewer than at = 9" in late.text
    for page in (tree, below):
        assert page.text.count(f"/ui/session/{name}") >= 2
        assert "<b>2 forks</b>, mean of 3" in page.text


def test_a_separate_dashboard_of_a_server_needs_the_token_of_the_server(tmp_path, say):
    from tests.cli.test_dashboard import fetch, serving

    with a_server(tmp_path, "--dashboard") as url, serving(url) as looking:
        with Client(url) as client:
            client.submit_many(tasks(1))
            client.wait("task-0", timeout_s=60)
        known = (tmp_path / "data" / "server.token").read_text().strip()
        bearer = {"Authorization": f"Bearer {known}"}
        for closed in (looking, f"{looking}/session/task-0.0"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                fetch(closed)
        status, page = fetch(looking, **bearer)
        _, session = fetch(f"{looking}/session/task-0.0", **bearer)
        own, _ = fetch(f"{url}/ui/", **bearer)

    assert status == own == 200
    assert "slots in use" in page
    assert "root: <b>first</b>" in session
    assert say("dashboard", "http://127.0.0.1:1").code == 3


def test_only_tokens_with_the_read_or_admin_role_may_read():
    roles = {"reads": TokenRole.READ, "submits": TokenRole.SUBMIT, "all": TokenRole.ADMIN}
    auth = Auth(
        [
            ApiToken(name=name, token=f"token-{name}-of-sixteen", roles=(role,))
            for name, role in roles.items()
        ]
    )

    able = {name for name in (*roles, "x") if may(auth, f"token-{name}-of-sixteen", TokenRole.READ)}

    assert able == {"reads", "all"}
