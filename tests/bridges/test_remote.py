"""Tasks played on a real server: one session per entry, in order."""

import asyncio

import pytest
from tests.server.house import FakeWorkers, a_service, served

from bridle.bridges.remote import ServerSessions
from bridle.client import Client
from bridle.config import AgentSpec, RuntimeSpec, Task
from bridle.errors import NodeLostError, ServerError
from bridle.server.app import serve_api
from bridle.server.http import ApiToken, TokenRole

TOKEN = ApiToken(name="admin", token="a-token-of-sixteen", roles=(TokenRole.ADMIN,))


def task(task_id):
    return Task(
        task_id=task_id,
        instruction="Do it.",
        runtime=RuntimeSpec(backend="local"),
        agent=AgentSpec(harness="command", command="true"),
    )


async def test_server_sessions_are_returned_in_task_order(tmp_path):
    async with (
        a_service(tmp_path, FakeWorkers()) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):

        def work():
            with ServerSessions(url, token=TOKEN.token) as sessions:
                sessions.set_version(3)
                first = sessions.play([task("a"), task("b"), task("a")])
                again = sessions.play([task("a")])
                return first, again

        first, again = await asyncio.to_thread(work)
        assert [one.metadata["task_id"] for one in first] == ["a", "b", "a"]
        assert len({one.session_id for one in (*first, *again)}) == 4
        assert all(one.traces for one in first)


class Lost(dict):
    """Answers of workers whose node is lost with every session."""

    def get(self, *_):
        return NodeLostError("its machine is gone")


async def test_a_failed_session_is_an_error_trajectory_and_a_wrong_token_raises(tmp_path):
    async with (
        a_service(tmp_path, FakeWorkers(answers=Lost(every="session"))) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):

        def work():
            with ServerSessions(url, token=TOKEN.token) as sessions:
                sessions.hand_in({"g": (task("a").model_copy(update={"max_attempts": 1}), 1)})
                return sessions.fetch("g", "a", 1)

        (missing,) = await asyncio.to_thread(work)
        assert (missing.status, missing.traces) == ("ERROR", ())
        assert "interrupted 20 times: each time its server or its node was lost" in missing.error

        def refused():
            with ServerSessions(url, token="another-token-of-16") as sessions:
                sessions.play([task("a")])

        with pytest.raises(ServerError):
            await asyncio.to_thread(refused)


async def test_a_sample_that_never_started_is_a_trajectory_without_traces(tmp_path):
    async with (
        a_service(tmp_path) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):

        def work():
            with (
                ServerSessions(url, token=TOKEN.token) as sessions,
                Client(url, token=TOKEN.token) as client,
            ):
                sessions.hand_in({"g": (task("a"), 1)})
                client.cancel("g")
                return sessions.fetch("g", "a", 1)

        await service.pause()
        (lost,) = await asyncio.to_thread(work)
        assert (lost.status, lost.traces, lost.metadata) == ("ERROR", (), {"task_id": "a"})


async def test_a_sample_that_the_server_has_removed_is_a_trajectory_that_says_so(tmp_path):
    async with (
        a_service(tmp_path, FakeWorkers()) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):
        sessions = ServerSessions(url, token=TOKEN.token)
        with sessions:
            await asyncio.to_thread(sessions.hand_in, {"g": (task("a"), 1)})
            await asyncio.to_thread(sessions.fetch, "g", "a", 1)
            await service.store.forget_rows((await service.queries.task("g"))["seq"])
            (gone,) = await asyncio.to_thread(sessions.fetch, "g", "a", 1)
        assert (gone.status, gone.traces) == ("ERROR", ())
        assert "the server has removed the session" in str(gone.error)


@pytest.mark.timeout(60)
async def test_a_batch_larger_than_the_unacknowledged_groups_allowed_is_played(tmp_path):
    async with (
        a_service(tmp_path, FakeWorkers(), max_unacked_groups=1) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
    ):

        def work():
            with ServerSessions(url, token=TOKEN.token) as sessions:
                return sessions.play([task(name) for name in "abcd"])

        played = await asyncio.to_thread(work)
        assert [one.metadata["task_id"] for one in played] == [*"abcd"]
        counts = await service.queries.counts()
        assert (counts.tasks, counts.unacked) == ({"completed": 4}, 0)
