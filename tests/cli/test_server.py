"""`bridle serve --dashboard`: pages under /ui, behind the server's tokens."""

import urllib.error

import httpx
import pytest
from tests.cli.test_serve import a_server, script, tasks
from tests.dashboard.test_app import links_to

from bridle.cli.config import load_config
from bridle.cli.serve import executor_flags, server_of
from bridle.cli.server import may_read
from bridle.client import AsyncClient, Client
from bridle.server.auth import ApiToken, Auth, TokenRole

pytestmark = pytest.mark.timeout(180)

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
name = "stranger"
token = "the-token-of-a-stranger"
roles = ["read"]
[[tokens]]
name = "chief"
token = "the-token-of-a-chief"
roles = ["admin"]
"""
HTML = {"accept": "text/html"}


async def test_a_reader_sees_conversations_under_ui(tmp_path):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    config = load_config(
        None,
        engines=[f"scripted:{script(tmp_path)}"],
        server={
            "port": 0,
            "data": tmp_path / "data",
            "tokens": tmp_path / "tokens.toml",
            "permits": {"runtimes": ("local",)},
        },
        executor=executor_flags(None, concurrency=2),
    )
    async with (
        server_of(config, dashboard=True) as opened,
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
        tokens = await browser.get(links_to("trace", page.text)[0])
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
    assert "groups wait for their trainer" in first.text
    assert "root: <b>first</b>" in page.text
    assert "Write done to out.txt." in exchange.text
    assert task.status_code == tokens.status_code == log.status_code == 200
    assert "trains, logprob" in tokens.text
    assert missing.status_code == 404
    assert [one.status_code for one in others] == [404, 404, 404]
    assert [(one.status_code, "task-0" in one.text) for one in theirs] == [(200, False)] * 3
    assert api.status_code == 401, "the cookie opens the dashboard and nothing else"


def test_a_dashboard_of_a_server_by_itself_asks_for_the_server_s_token(tmp_path, say):
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


def test_only_who_may_read_may_look():
    roles = {"reads": TokenRole.READ, "submits": TokenRole.SUBMIT, "all": TokenRole.ADMIN}
    auth = Auth(
        [
            ApiToken(name=name, token=f"token-{name}-of-sixteen", roles=(role,))
            for name, role in roles.items()
        ]
    )

    able = {name for name in (*roles, "x") if may_read(auth, f"token-{name}-of-sixteen")}

    assert able == {"reads", "all"}
