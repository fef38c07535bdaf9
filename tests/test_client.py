"""The client against a real server with workers whose results a test sets."""

import asyncio
import re
import socket
import sys
import time
from contextlib import ExitStack, asynccontextmanager, closing

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs
from tests.server import house
from tests.server.house import FakeWorkers, a_service, body, ended, failure, served, until
from tests.server.killing import Killed

from bridle.client import CONNECT_S, SOON_S, AsyncClient, Client
from bridle.config import AgentSpec, RuntimeSpec, Task
from bridle.credentials import announce_server
from bridle.errors import ConfigError, ServerError
from bridle.server.app import serve_api
from bridle.server.http import ApiToken, TokenRole

TOKEN = ApiToken(name="admin", token="a-token-of-sixteen", roles=(TokenRole.ADMIN,))


@asynccontextmanager
async def a_client(tmp_path, workers=None, *, port=0, **settings):
    async with (
        a_service(tmp_path, workers, **settings) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=port) as url,
        AsyncClient(url, token=TOKEN.token, patience_s=10) as client,
    ):
        client.service = service  # type: ignore[attr-defined]  # for the tests
        yield client


def task(task_id, samples=1):
    return Task(
        task_id=task_id,
        instruction="Do it.",
        num_samples=samples,
        runtime=RuntimeSpec(backend="local"),
        agent=AgentSpec(harness="command", command="true"),
    )


@pytest.mark.parametrize("made", [Client, AsyncClient])
def test_a_server_url_without_a_scheme_is_refused_with_an_example(made):
    with pytest.raises(
        ConfigError, match=r"^server 'localhost:8080' is not a URL; give for instance"
    ):
        made("localhost:8080")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://", "http://[::1", "http://a..b"])
def test_a_server_url_without_host_or_valid_port_is_refused(url):
    with pytest.raises(ConfigError, match="is not a URL; give for instance"):
        Client(url)


def test_a_token_s_line_break_at_its_end_is_dropped_and_one_inside_is_refused(monkeypatch):
    monkeypatch.setenv("BRIDLE_SERVER_TOKEN", "from-a-file\n")
    assert AsyncClient("http://127.0.0.1:1").token == "from-a-file"

    with pytest.raises(ConfigError, match="BRIDLE_SERVER_TOKEN takes the token alone") as raised:
        AsyncClient("http://127.0.0.1:1", token="one\ntwo")
    assert "two" not in str(raised.value)


async def test_https_for_a_server_without_tls_is_reported_as_such(tmp_path):
    async with a_client(tmp_path) as client:
        https = client.url.replace("http:", "https:")
        async with AsyncClient(https, patience_s=0) as wrong:
            with pytest.raises(ServerError, match=r"cannot be reached: \[SSL: [A-Z_]+\] \w"):
                await wrong.status()


async def test_a_client_looks_up_the_server_s_token_again_after_a_401(tmp_path):
    (tmp_path / "token").write_text(TOKEN.token)
    with ExitStack() as announced:

        async def tasks(request):
            if "authorization" not in request.headers:
                announced.enter_context(announce_server(client.url, tmp_path / "token"))
                raise web.HTTPUnauthorized
            return web.json_response({"tasks": {}})

        app = web.Application()
        app.router.add_get("/v1/status", tasks)
        async with TestServer(app) as server, AsyncClient(str(server.make_url(""))) as client:
            assert await client.status() == {"tasks": {}}


async def test_client_retries_while_the_quota_is_full(tmp_path):
    async with a_client(tmp_path, max_queued_samples=1) as client:
        await client.pause()
        await client.submit(task("a"))
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(client.submit(task("b")))

            async def refused():
                return b'status="429"' in await client.service.metrics.render(client.service)

            await until(refused)
            await client.resume()
        assert submitting.result() is True


async def taken(groups, count):
    """The first `count` groups."""
    found = []
    async for group in groups:
        found.append(group)
        if len(found) == count:
            break
    await groups.aclose()
    return found


async def test_submitted_tasks_are_returned_as_groups_of_results(tmp_path):
    workers = FakeWorkers(answers={"b": failure("harness_crash", "it fell")})
    async with a_client(tmp_path, workers) as client:
        assert await client.submit_many([task("a", 2), body("b")], dispatch_priority=3) == [
            *(True, True)
        ]
        assert await client.submit(task("a", 2), dispatch_priority=3) is False
        groups = {one.task_id: one for one in await taken(client.groups(), 2)}
        assert (groups["a"].state, groups["a"].usable, groups["a"].version_lag) == (
            *("completed", 2, 0),
        )
        first, second = groups["a"].results
        assert (first.session_id, second.sample_index, first.reward) == ("a.0", 1, 1.0)
        assert first.trajectory.traces[0].response_ids.tolist() == [0, 1, 2, 3]
        (failed,) = groups["b"].results
        assert (failed.status, failed.cause, failed.error) == ("ERROR", "harness_crash", "it fell")
        assert failed.trajectory.traces == ()
        assert [one["session_id"] for one in groups["b"].missing] == ["b.0"]


async def test_consumer_gets_unacknowledged_groups_again_after_a_crash(tmp_path):
    async with a_client(tmp_path, FakeWorkers(capacity=1)) as client:
        await client.submit_many([task(name) for name in "abcd"])
        for name in "abcd":
            await ended(client.service, name)
        seen = await taken(client.groups(page=2), 3)  # it dies with the third in hand
        assert [one.task_id for one in seen] == ["a", "b", "c"]
        again = await taken(client.groups(), 2)
        assert [one.task_id for one in again] == ["c", "d"]


async def test_a_consumer_acknowledges_groups_explicitly_and_continues_from_its_cursor(tmp_path):
    async with a_client(tmp_path, FakeWorkers(capacity=1)) as client:
        await client.submit_many([task(name) for name in "abc"])
        for name in "abc":
            await ended(client.service, name)
        first, second = await taken(client.groups(ack=False, trajectories=False), 2)
        assert first.results == ()
        rest = await taken(client.groups(cursor=second.cursor, ack=False), 1)
        assert [one.task_id for one in rest] == ["c"]
        assert await client.ack(cursor=second.cursor) == 2
        assert await client.ack(task_ids=["c"]) == 1


async def test_more_tasks_than_one_request_takes_are_cancelled_and_acknowledged(tmp_path):
    async with a_client(tmp_path) as client:
        await client.pause()
        names = [f"t{number}" for number in range(1001)]
        await client.submit_many([task(names[0]), task(names[-1])])
        assert await client.cancel(*names) == names[1:-1]
        assert await client.ack(task_ids=names) == 2


@pytest.mark.parametrize("ack", [True, False])
async def test_groups_by_priority_are_yielded_once(tmp_path, ack):
    async with a_client(tmp_path, FakeWorkers(capacity=1)) as client:
        await client.pause()
        for name, priority in (("low", 1), ("high", 9), ("mid", 5)):
            await client.submit(task(name), dispatch_priority=priority)
        await client.resume()
        for name in ("low", "mid", "high"):
            await ended(client.service, name)
        groups = client.groups(order="priority", ack=ack, page=1, quiet_s=0.2)
        assert [one.task_id async for one in groups] == ["high", "mid", "low"]


async def test_groups_end_after_quiet_s(tmp_path):
    async with a_client(tmp_path) as client:
        assert [one async for one in client.groups(quiet_s=0.05)] == []


async def test_client_waits_for_a_restarting_server(tmp_path):
    async with a_client(tmp_path) as client:
        port = int(client.url.rpartition(":")[2])
        await client.submit(task("a"))
        await ended(client.service, "a")
    async with (
        AsyncClient(f"http://127.0.0.1:{port}", token=TOKEN.token) as client,
        asyncio.TaskGroup() as group,
    ):
        taking = group.create_task(taken(client.groups(), 2))
        submitting = group.create_task(client.submit(task("b")))
        await asyncio.sleep(0.05)
        async with a_client(tmp_path, port=port):
            await submitting
            await until(taking.done)
    assert [one.task_id for one in taking.result()] == ["a", "b"]


@pytest.mark.timeout(120)
async def test_waiting_client_logs_that_its_server_is_down_and_up_again(tmp_path, record_property):
    server = Killed(tmp_path, tmp_path / "server.sqlite")
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncClient(url, token=house.TOKEN.token, patience_s=600) as client:
        server.start()
        try:
            await client.status()
        except BaseException:
            server.end()
            raise
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(anext(client.groups()))
            await client.status()  # what was sent before has arrived too
            with capture_logs() as log:
                server.kill()
                killed_at = time.monotonic()
                await until(lambda: log)
                record_property("dead_server_logged_s", round(time.monotonic() - killed_at, 2))
                assert (log[0]["event"], log[0]["url"]) == ("waiting for the server", url)
                assert "cannot be reached: " in log[0]["error"]
                assert not waiting.done()
                new = tmp_path / "new"
                new.mkdir()
                async with (
                    a_service(new) as service,
                    serve_api(served(service), host="127.0.0.1", port=server.port),
                ):
                    assert await client.submit(body("a"))
                    assert (await waiting).task_id == "a"
            assert log[-1]["event"] == "the server answers again"


async def test_waiting_client_logs_a_server_that_does_not_answer_a_connection():
    """Its machine drops packets, as this listener does whose queue is full."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        address = listener.getsockname()
        first, second = (socket.socket() for _ in range(2))
        with closing(first), closing(second), capture_logs() as log:
            first.connect(address)
            second.setblocking(False)
            second.connect_ex(address)
            async with (
                AsyncClient(f"http://127.0.0.1:{address[1]}", patience_s=600) as client,
                asyncio.TaskGroup() as group,
            ):
                waiting = group.create_task(client.status())
                await until(lambda: log)
                assert "timeout" in log[0]["error"].lower()
                waiting.cancel()
    assert CONNECT_S < SOON_S <= 2


async def test_the_client_raises_server_refusals_with_their_reason(tmp_path):
    async with a_client(tmp_path) as client:
        with pytest.raises(ServerError, match="unknown harness 'nope'; known: ") as caught:
            await client.submit(body("a", agent={"harness": "nope"}))
        assert (caught.value.status, caught.value.code) == (422, "invalid")
        with pytest.raises(ServerError, match="no task 'nobody'"):
            await client.task("nobody")
        async with AsyncClient(client.url, token="wrong") as stranger:
            with pytest.raises(ServerError, match="a valid token is needed"):
                await stranger.status()
            with pytest.raises(ServerError, match="token"):
                async for _ in stranger.events():
                    pass


@pytest.mark.parametrize(
    ("status", "text", "shown"),
    [
        (200, "<html>\n <b>Hi</b>", "<html> <b>Hi</b>"),
        (501, "<html>\n <b>Hi</b>", "<html> <b>Hi</b>"),
        (200, '{"data":[]}', '{"data":[]}'),
        (200, "[]", "[]"),
    ],
)
async def test_an_answer_that_is_no_rollout_server_s_is_an_error(status, text, shown):
    async def page(_):
        return web.Response(text=text, status=status)

    other = web.Application()
    other.router.add_route("*", "/{path:.*}", page)
    said = rf"the server answered {status} and not as .* is it one\? {re.escape(shown)}$"
    async with (
        TestServer(other) as server,
        AsyncClient(str(server.make_url("")), token="t" * 16) as client,
    ):
        with pytest.raises(ServerError, match=said):
            await client.status()


async def test_unreachable_server_raises_after_patience_s():
    async with AsyncClient("http://127.0.0.1:1", patience_s=0.2) as client:
        with pytest.raises(
            ServerError, match=r"reached: Connection refused; is `bridle serve` running there\?$"
        ) as caught:
            await client.status()
        assert caught.value.code == "unreachable"


async def test_client_messages_do_not_contain_the_urls_token():
    url = f"http://x:{TOKEN.token}@127.0.0.1:1"
    async with AsyncClient(url, patience_s=0.2) as client:
        with pytest.raises(ServerError, match="cannot be reached") as caught:
            await client.status()
        assert TOKEN.token is not None
        assert TOKEN.token not in f"{caught.value} {client.url} {client!r}"


async def test_the_client_lists_waits_for_and_cancels_tasks_and_sessions(tmp_path):
    workers = FakeWorkers(capacity=2, held=True)
    async with a_client(tmp_path, workers) as client:
        await client.submit_many([task("a", 2), task("b"), task("c")])
        await until(lambda: len(workers.living) == 2)
        assert [one["status"] for one in await client.sessions("a")] == ["RUNNING", "RUNNING"]
        with pytest.raises(TimeoutError):
            await client.wait("a", timeout_s=0.05)
        await client.cancel_session("a.0")
        assert await client.cancel("a", "c", "nobody") == ["nobody"]
        assert (await client.wait("a", timeout_s=10))["state"] == "cancelled"
        await until(lambda: "b.0" in workers.living)
        workers.let("b.0")
        await client.wait("b", timeout_s=10)
        states = {one["task_id"]: one["state"] async for one in client.tasks()}
        assert states == {"a": "cancelled", "b": "completed", "c": "cancelled"}
        assert [one["task_id"] async for one in client.tasks(state="completed")] == ["b"]
        assert (await client.trajectory("b.0")).session_id == "b.0"
        with pytest.raises(ServerError, match="no log or artifact"):
            await client.artifact("b.0", "stdout.log")


async def test_the_client_sets_the_policy_drains_resumes_and_replays_callbacks(tmp_path):
    async with a_client(tmp_path) as client:
        assert (await client.set_policy(version=3))["version"] == 3
        assert (await client.policy())["version"] == 3
        assert (await client.drain(1))["paused"] is True
        assert (await client.resume())["paused"] is False
        assert (await client.status())["slots"] == 4
        assert await client.dead_callbacks() == []
        assert await client.replay() == 0
        with pytest.raises(ServerError, match="no dead callback"):
            await client.replay("nothing")


async def test_client_streams_events(tmp_path):
    async with a_client(tmp_path) as client:
        events = client.events()
        async with asyncio.TaskGroup() as group:
            hearing = group.create_task(anext(events))
            await until(lambda: client.service.events.subscribers)
            await client.submit(task("a"))
        assert hearing.result()["task_id"] == "a"
        await events.aclose()


async def test_the_blocking_client_submits_waits_and_iterates_groups_in_a_thread(tmp_path):
    """In a thread, as a trainer has it, while this loop serves."""
    async with a_client(tmp_path) as served_client:

        def train():
            with Client(served_client.url, token=TOKEN.token) as client:
                assert client.submit_many([task("a", 2), task("b")]) == [True, True]
                assert client.submit(task("b")) is False
                names = []
                for group in client.groups():
                    names.append(group.task_id)
                    if len(names) == 2:
                        break
                assert client.wait("a", timeout_s=10)["state"] == "completed"
                assert {one["task_id"] for one in client.tasks()} == {"a", "b"}
                assert len(client.sessions("a")) == 2
                assert client.trajectory("a.0").reward == 1.0
                assert client.set_policy(version=2)["version"] == client.policy()["version"]
                assert client.pause()["paused"]
                assert client.drain(0)["running"] == 0
                assert not client.resume()["paused"]
                assert client.ack(cursor=9) == 1  # the one that was in hand
                assert client.cancel("a") == []
                assert client.cancel_session("a.0")["status"] == "COMPLETED"
                assert client.give_reward("a.0", 0.5, why="later")["reward"] == 0.5
                assert client.trajectory("a.0").reward == 0.5
                assert client.dead_callbacks() == []
                assert client.replay() == 0
                assert client.task("a")["usable_sessions"] == 2
                assert client.status()["groups_unacked"] == 0
                with pytest.raises(ServerError):
                    client.artifact("a.0", "none")
            return sorted(names)

        assert await asyncio.to_thread(train) == ["a", "b"]


def test_client_outside_its_context_manager_raises():
    with pytest.raises(RuntimeError, match="use it inside `async with"):
        asyncio.run(AsyncClient().status())


@pytest.mark.timeout(20)
def test_blocking_client_outside_its_context_manager_raises():
    client, refused = Client(), "use it inside `with Client"
    with pytest.raises(RuntimeError, match=refused):
        client.status()
    with client:
        pass
    with pytest.raises(RuntimeError, match=refused):
        next(client.tasks())


async def test_an_event_stream_whose_server_is_gone_raises_a_server_error():
    async def cut(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b'data: {"type": "hello"}\n\n')
        request.transport.abort()
        return answer

    app = web.Application()
    app.router.add_get("/events", cut)
    async with TestServer(app) as server, AsyncClient(str(server.make_url(""))) as client:
        events = client.events()
        assert await anext(events) == {"type": "hello"}
        with pytest.raises(ServerError, match="cannot be reached") as caught:
            await anext(events)
        assert caught.value.code == "unreachable"
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(
            ServerError, match=r"reached: Connection refused; is `bridle serve` running there\?$"
        ):
            await anext(client.events())


LEFT_OPEN = """
import sys
from bridle.client import Client

client = Client(sys.argv[1], token=sys.argv[2]).__enter__()
groups = client.groups(ack=False)
print(next(groups).task_id)
"""


@pytest.mark.timeout(90)
async def test_a_program_exits_although_its_client_and_group_iterator_are_open(tmp_path):
    async with (
        a_service(tmp_path, FakeWorkers()) as service,
        serve_api(served(service, tokens=[TOKEN]), host="127.0.0.1", port=0) as url,
        AsyncClient(url, token=TOKEN.token) as client,
    ):
        await client.submit(task("a"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LEFT_OPEN, url, str(TOKEN.token), stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(45):
                assert (await process.communicate())[0] == b"a\n"
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0
