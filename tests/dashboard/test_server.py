"""A rollout server as a data source, over its API and a real client."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.dashboard.house import busy, write
from tests.dashboard.test_app import every_page
from tests.server.house import FakeWorkers, a_service, failure, served, submission, until
from tests.test_client import TOKEN

from bridle.capture.reader import excerpt
from bridle.client import Client
from bridle.dashboard.app import make_app
from bridle.dashboard.folder import FolderSource
from bridle.dashboard.server import ServerSource
from bridle.dashboard.source import DataSource
from bridle.dashboard.summaries import SessionFilter
from bridle.errors import ServerError
from bridle.server.app import serve_api
from bridle.types import Kind

ASKED = [name for name, _ in inspect.getmembers(DataSource, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("name", ASKED)
def test_folder_source_methods_have_the_parameters_of_the_data_source_protocol(name):
    given, taken = (inspect.signature(getattr(one, name)) for one in (DataSource, FolderSource))

    assert given.parameters == taken.parameters


WORKERS = {"a.1": failure("harness_crash", "it crashed <b>"), "b": {"reward": 0.0}}


@asynccontextmanager
async def a_server(tmp_path):
    """A server's URL; `a` has one good session and one that failed, `b` one worth nothing."""
    workers = FakeWorkers(
        answers=WORKERS, artifacts={("a.0", "stdout.log"): tmp_path / "stdout.log"}
    )
    (tmp_path / "stdout.log").write_text("hello")
    async with (
        a_service(tmp_path, workers) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a", 2, max_attempts=1), submission("b")], owner="me")

        async def done():
            return (await service.queries.counts()).sessions.keys() <= {"COMPLETED", "ERROR"} and (
                await service.queries.task("b")
            )["done_seq"]

        await until(done)
        yield url


def asked(url, ask, folder=None):
    """Return what `ask` gives of the source, in a thread, as pages are made."""

    def work():
        with Client(url, token=TOKEN.token, patience_s=2) as client:
            return ask(ServerSource(client, "server", folder))

    return asyncio.to_thread(work)


async def test_overview_shows_statuses_nodes_failures_and_groups_of_the_server(tmp_path):
    async with a_server(tmp_path) as url:
        seen = await asked(url, ServerSource.overview)

    assert seen.statuses == {"COMPLETED": 2, "ERROR": 1}
    assert seen.total == 3
    assert seen.server["groups_unacked"] == 2
    assert seen.nodes[0]["name"] == "fake"
    assert [(one.cause, one.count) for one in seen.failures] == [("harness_crash", 1)]
    assert [score.mean for score in seen.scores] == [0.5]
    assert seen.report is None


async def test_session_and_group_lists_come_from_the_server(tmp_path):
    async with a_server(tmp_path) as url:
        failed = await asked(
            url, lambda source: source.sessions(SessionFilter(status="failed"), 0, 10)
        )
        groups, total = await asked(url, lambda source: source.groups("", 0, 10))
        group = await asked(url, lambda source: source.group("a", ""))
        shown = await asked(url, lambda source: source.session("a.0", ""))
        none = [
            await asked(url, lambda source: source.session("none", "")),
            await asked(url, lambda source: source.group("none", "")),
            await asked(url, lambda source: source.file("a.0", "", "stdout.log")),
        ]

    assert [line.session_id for line in failed.lines] == ["a.1"]
    assert total == len(groups) == 2
    assert (group.state, group.total, len(group.lines)) == ("completed", 2, 2)
    assert shown.line.measured.stats["traces"] == 1
    assert len(shown.trajectory.traces) == 1
    assert shown.session is None
    assert none == [None, None, None]


async def test_every_linked_page_of_a_server_answers_200(tmp_path):
    def crawl(source):
        with TestClient(make_app(source)) as browser:
            return every_page(browser)

    async with a_server(tmp_path) as url:
        found = await asked(url, crawl)

    assert {answer.status_code for answer in found.values()} == {200}
    assert {"/session/a.0", "/session/a.1", "/session/a.0/trace/0"} <= set(found)
    assert "it crashed &lt;b&gt;" in found["/session/a.1"].text


async def test_server_source_with_a_local_capture_shows_the_conversation(tmp_path):
    made = busy("a.0")
    made.call(None, exchange_id="more", kind=Kind.AGENT)
    await write(tmp_path / "data", made)
    folder = FolderSource(tmp_path / "data" / "capture.sqlite")
    async with a_server(tmp_path) as url:
        shown = await asked(url, lambda source: source.session("a.0", ""), folder)
        seen = await asked(url, ServerSource.overview, folder)
        wanted = SessionFilter(text="you fix tests")
        found = await asked(url, lambda source: source.sessions(wanted, 0, 10), folder)
    folder.close()

    assert [line.session_id for line in found.lines] == ["a.0"]
    assert shown.session.size == 8
    assert shown.line.status == "COMPLETED"
    assert seen.exchanges == 8
    assert [line.exchanges for line in seen.newest if line.session_id == "a.0"] == [8]


async def test_a_remote_capture_is_fetched_once_for_an_ended_session_but_again_for_a_running_one(
    tmp_path,
):
    made = busy("a.0")
    await write(tmp_path / "far", made)
    content = excerpt(tmp_path / "far" / "capture.sqlite", "a.0")
    asked_for = []

    class Far:
        """A server that has a capture."""

        def session(self, session_id):
            ended = None if session_id == "a.1" else 2.0
            return {
                "session_id": "a.0", "sample_index": 0, "status": "COMPLETED", "ended_at": ended,
                "artifacts": ["stdout.log"],
            }  # fmt: skip

        def artifact(self, session_id, name):
            asked_for.append((session_id, name))
            return content

    def look(source: ServerSource, session_id: str) -> Any:
        return source.session(session_id, "")

    source = ServerSource(Far(), "far")  # type: ignore[arg-type]  # what a session's page asks for
    first = look(source, "a.0")
    assert first.session is look(source, "a.0").session
    assert first.session.size == 7
    assert first.logs == {"stdout.log": "stdout.log"}
    assert asked_for == [("a.0", "capture.sqlite")]
    source = ServerSource(Far(), "far")  # type: ignore[arg-type]  # as above
    assert look(source, "a.1").session.size == look(source, "a.1").session.size == 7
    assert len(asked_for) == 3, "one that goes on is looked at anew"


async def test_an_unreachable_server_gets_a_503_page(tmp_path):
    def gone(source):
        with TestClient(make_app(source)) as browser:
            return browser.get("/")

    answer = await asked("http://127.0.0.1:1", gone)

    assert answer.status_code == 503
    assert "cannot be reached" in answer.text


async def test_a_token_unknown_to_the_server_gets_a_401_page():
    class Closed:
        def status(self):
            raise ServerError("a known token is needed", status=401)

    with TestClient(make_app(ServerSource(Closed(), "server"))) as browser:  # type: ignore[arg-type]
        answer = browser.get("/")

    assert (answer.status_code, "a known token" in answer.text) == (401, True)


def test_server_source_methods_have_the_parameters_of_the_data_source_protocol():
    for name, method in inspect.getmembers(DataSource, inspect.isfunction):
        if name[0] != "_":
            assert inspect.signature(method).parameters == (
                inspect.signature(getattr(ServerSource, name)).parameters
            )
