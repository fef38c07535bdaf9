"""The supervisor of several workers; the workers are small programs that answer with their name."""

import asyncio
import os
import signal
import sys
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import orjson
import pytest

from bridle.capture.records import Outcome, SessionRecord
from bridle.capture.sqlite import SqliteStore
from bridle.config import Limits, SamplingPolicy
from bridle.errors import ConfigError, EngineError
from bridle.gateway import workers
from bridle.gateway.keys import key_digest, mint_key
from bridle.gateway.listener import listen
from bridle.gateway.registry import STORED_AS, stored_settings
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.workers import CAPTURE, Supervisor, check_folder, merged_replicas, worker_folder

SMALL = (sys.executable, str(Path(__file__).parent / "small_worker.py"))
TOKEN = "0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Stand:
    """A supervisor of small workers and a client."""

    def __init__(self, gateway: Supervisor, client: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.client = client

    async def ask(self, method: str, path: str, body: object = None, **headers: str):
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        url = path if "://" in path else self.gateway.url + path
        headers = headers or BEARER
        async with self.client.request(method, url, data=data, headers=headers) as reply:
            raw = await reply.read()
            return reply.status, orjson.loads(raw) if raw[:1] in {b"{", b"["} else raw.decode()

    async def open(self, session_id: str | None = None) -> str:
        """Open a session; the name of its worker."""
        body = {} if session_id is None else {"session_id": session_id}
        status, opened = await self.ask("POST", "/sessions", body)
        assert status == 200
        return opened["worker"]

    async def until_restarted(self, number: int) -> None:
        worker = self.gateway.workers[number]
        async with asyncio.timeout(60):
            while not worker.restarts:  # noqa: ASYNC110 - the counter has no event
                await asyncio.sleep(0.01)
            await worker.ready.wait()


def supervisor(folder: Path, own: dict, **settings) -> Supervisor:
    """Two workers; `own` is added to what they read, by their names."""
    made = GatewaySettings.model_validate({"data_dir": folder, "control_token": TOKEN, **settings})
    return Supervisor(settings=made, data=folder, workers=2, command=SMALL, spec=own)


def three_free_ports() -> int:
    """The first of three ports, one after the other, that nobody uses."""
    for first in range(20_000, 30_000, 3):
        with suppress(ConfigError), ExitStack() as stack:
            for port in range(first, first + 3):
                stack.enter_context(listen("127.0.0.1", port))
            return first
    raise AssertionError


@asynccontextmanager
async def stand(folder: Path, own: dict | None = None, **settings):
    """Two workers; the second has two sessions of earlier: `s-old` lives, `s-ended` does not."""
    for number in range(2):
        worker_folder(folder, number).mkdir(exist_ok=True)
        async with await SqliteStore.open(worker_folder(folder, number) / CAPTURE) as store:
            for name in ("s-old", "s-ended") if number and not store.sessions() else ():
                kept = stored_settings(key_digest(mint_key()), SamplingPolicy(), Limits())
                await store.open_session(SessionRecord(name, 1.0, None, {STORED_AS: kept}))
                if name == "s-ended":
                    await store.close_session(Outcome(name, "COMPLETED", 2.0, None, metadata={}))
    gateway = supervisor(folder, own or {}, **settings)
    async with gateway, aiohttp.ClientSession() as client:
        yield Stand(gateway, client)


async def test_a_session_opens_on_the_least_loaded_worker_and_its_requests_go_there(tmp_path):
    async with stand(tmp_path) as it:
        assert [await it.open(f"n-{number}") for number in range(3)] == [
            "worker-0",
            "worker-0",  # `s-old` lives on the other one, `s-ended` does not
            "worker-1",
        ]
        for path, worker in (
            ("/sessions/n-1/exchanges?x=%20a", "worker-0"),
            ("/sessions/n-2", "worker-1"),
            ("/sessions/s-old", "worker-1"),
            ("/sessions/s-ended/trajectory", "worker-1"),
            ("/sessions/s-nobody", "worker-0"),
        ):
            answer = {"worker": worker, "method": "GET", "path": path, "token": True}
            assert await it.ask("GET", path) == (200, answer)
        assert (await it.ask("DELETE", "/sessions/n-0"))[1]["method"] == "DELETE"
        assert await it.open() == "worker-0"
        _, listed = await it.ask("GET", "/sessions")
        assert len(listed["sessions"]) == 4
        assert "n_total 4.0" in (await it.ask("GET", "/metrics"))[1]


async def test_sessions_that_are_opened_at_once_are_spread_over_the_workers(tmp_path):
    async with stand(tmp_path) as it:
        placed = await asyncio.gather(*(it.open() for _ in range(5)))  # noqa: TID251 - a test
        assert sorted(placed) == ["worker-0"] * 3 + ["worker-1"] * 2


async def test_a_name_that_is_taken_is_answered_by_its_worker(tmp_path):
    async with stand(tmp_path) as it:
        assert await it.open("s-old") == "worker-1"  # a real one refuses
        for body in (b"[]", b"no JSON", b'{"session_id": 5}'):
            status, said = await it.ask("POST", "/sessions", body)
            assert (status, said["error"]["message"]) == (400, "session_id is missing")
    async with stand(tmp_path, {"worker-0": {"refuse": "bad"}}) as it:
        status, _ = await it.ask("POST", "/sessions", {"session_id": "again", "bad": 1})
        assert status == 400
        assert await it.open("again") == "worker-0", "a refused name is free"


async def test_opening_a_session_on_a_dying_worker_is_a_503_and_stays_on_that_worker(tmp_path):
    async with stand(tmp_path, {"worker-0": {"dies": "unlucky"}}) as it:
        status, answer = await it.ask("POST", "/sessions", {"session_id": "unlucky"})
        assert (status, answer["error"]["message"]) == (
            503,
            "worker-0 of this gateway died; ask again",
        )
        assert (await it.ask("GET", "/sessions/unlucky"))[1]["worker"] == "worker-0"


async def test_control_requests_need_the_token_and_health_does_not(tmp_path):
    async with stand(tmp_path) as it:
        for method, path in (("POST", "/sessions"), ("GET", "/metrics"), ("POST", "/policy")):
            status, answer = await it.ask(method, path, {}, Authorization="Bearer wrong")
            assert status == 401
            assert "control token" in answer["error"]["message"]
        assert (await it.ask("GET", "/health", Authorization="Bearer wrong"))[0] == 200


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/v1/chat/completions", lambda said: (said["error"]["type"], said["error"]["message"])),
        ("/s/n-0/v1/messages", lambda said: (said["error"]["type"], said["error"]["message"])),
        (
            "/v1beta/models/m:generateContent?key=bk-secret",
            lambda said: (said["error"]["status"].lower(), said["error"]["message"]),
        ),
    ],
)
async def test_a_model_call_to_the_control_port_is_refused_as_misdirected(tmp_path, path, read):
    async with stand(tmp_path) as it:
        status, said = await it.ask("POST", path, {}, Authorization="Bearer bk-secret")
        kind, message = read(said)
        assert status == 421
        assert kind.startswith("invalid_")
        assert "base_url that POST /sessions returned" in message
        assert "bk-" not in message


async def test_a_policy_is_set_on_all_workers_and_a_hold_refused_by_one_is_undone(tmp_path):
    async with stand(tmp_path, {"worker-1": {"refuse": "paused"}}) as it:
        assert (await it.ask("POST", "/policy", {"version": 4}))[1]["version"] == 4
        status, said = await it.ask("POST", "/policy", {"paused": True, "hold": "wait"})
        assert (status, said["error"]["message"]) == (400, "worker-1 refuses")
        _, policy = await it.ask("GET", "/policy")
        assert policy["hold"] is None, "the worker that held goes on"
        assert (await it.ask("POST", "/policy", b"no object"))[0] == 200  # the small worker's word


async def test_weights_are_loaded_by_one_worker_while_the_others_hold(tmp_path):
    async with stand(tmp_path) as it:
        wanted = {"weights": "/w", "version": 5, "timeout_s": 3}
        assert (await it.ask("POST", "/policy", wanted))[0] == 200
        _, policy = await it.ask("GET", "/policy")
        assert (policy["version"], policy["hold"]) == (5, None)
        status, said = await it.ask("POST", "/policy", {**wanted, "rolling": True})
        assert (status, said["error"]["message"]) == (400, "rolling: not with several workers")


async def test_a_pause_that_comes_with_weights_pauses_every_worker(tmp_path):
    async with stand(tmp_path) as it:
        await it.ask("POST", "/policy", {"weights": "/w", "version": 5, "paused": True})
        assert [(await policy_of(it, number))["paused"] for number in range(2)] == [True, True]


@pytest.mark.parametrize("more", [{}, {"released": False}])
async def test_an_adapter_is_loaded_by_every_worker(tmp_path, more):
    """A worker's calls name the adapters that it has loaded itself."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    wanted = {"weights": str(tmp_path / "adapter"), "version": 5, **more}
    async with stand(tmp_path) as it:
        status, said = await it.ask("POST", "/policy", wanted)
        assert (status, said["version"]) == (200, 5)
        for worker in it.gateway.workers:
            port = worker.sockets[1].getsockname()[1]
            _, policy = await it.ask("GET", f"http://127.0.0.1:{port}/policy")
            assert (policy["weights"], policy["hold"]) == (wanted["weights"], None)


async def test_a_hold_outlasts_the_weights_that_are_loaded_within_it(tmp_path):
    async with stand(tmp_path) as it:
        await it.ask("POST", "/policy", {"hold": "wait"})
        await it.ask("POST", "/policy", {"weights": "/w", "version": 5})
        for worker in it.gateway.workers:
            port = worker.sockets[1].getsockname()[1]
            _, policy = await it.ask("GET", f"http://127.0.0.1:{port}/policy")
            assert (policy["hold"], policy["version"]) == ("wait", 5)
        await it.ask("POST", "/policy", {"hold": False})
        assert (await it.ask("GET", "/policy"))[1]["hold"] is None


async def test_weights_that_the_others_cannot_hold_for_are_not_loaded(tmp_path):
    async with stand(tmp_path, {"worker-1": {"refuse": "hold"}}) as it:
        status, said = await it.ask("POST", "/policy", {"weights": "/w", "version": 5})
        assert (status, said["error"]["message"]) == (400, "worker-1 refuses")
        assert (await it.ask("GET", "/policy"))[1]["version"] == 0


@pytest.mark.parametrize("later", [{"version": 9}, {"version": 9, "weights": "/w"}])
async def test_a_policy_that_is_taken_back_leaves_one_that_was_set_meanwhile(tmp_path, later):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    own = {"worker-1": {"refuse": "paused", "refuses_after": str(gate)}}
    async with stand(tmp_path, own) as it, asyncio.TaskGroup() as group:
        first = group.create_task(it.ask("POST", "/policy", {"paused": True, "hold": "wait"}))
        await until_held(it)
        second = group.create_task(it.ask("POST", "/policy", later))
        for _ in range(20):  # the second one has been read
            await it.ask("GET", "/health")
        assert await asyncio.to_thread(gate.read_bytes) == b""
        assert ((await first)[0], (await second)[0]) == (400, 200)
        pid = it.gateway.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await it.until_restarted(0)
        for policy in [await policy_of(it, 0), await policy_of(it, 1)]:
            assert (policy["version"], policy["paused"], policy["hold"] or None) == (9, False, None)


async def policy_of(it, number):
    port = it.gateway.workers[number].sockets[1].getsockname()[1]
    return (await it.ask("GET", f"http://127.0.0.1:{port}/policy"))[1]


async def until_held(it):
    async with asyncio.timeout(30):
        while (await policy_of(it, 0))["hold"] is None:
            pass


async def test_a_killed_worker_comes_back_on_its_port_with_the_policy_of_the_others(tmp_path):
    async with stand(tmp_path) as it:
        await it.ask("POST", "/policy", {"version": 7, "paused": True, "hold": "abort"})
        await it.ask("POST", "/replicas", {"engine": "http://second"})
        victim = it.gateway.workers[1]
        address = f"http://127.0.0.1:{it.gateway.ports[1]}/s/s-old/v1/x"
        assert (await it.ask("GET", address))[1]["worker"] == "worker-1"
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        await it.until_restarted(1)
        assert (await it.ask("GET", address))[1]["worker"] == "worker-1"
        assert (await it.ask("GET", "/sessions/s-old"))[1]["worker"] == "worker-1"
        assert (await it.ask("GET", "/health"))[0] == 200
        metrics = (await it.ask("GET", "/metrics"))[1]
        assert "bridle_worker_restarts_total 1.0" in metrics
        assert "bridle_workers 2.0" in metrics
        port = victim.sockets[1].getsockname()[1]
        _, policy = await it.ask("GET", f"http://127.0.0.1:{port}/policy")
        assert (policy["version"], policy["paused"], policy["hold"]) == (7, True, "abort")
        _, listed = await it.ask("GET", "/replicas")
        assert [one["name"] for one in listed["replicas"]] == ["http://first", "http://second"]
        assert [one["prompt_tokens"] for one in listed["replicas"]] == [2, 2]


async def test_a_change_of_replicas_that_one_worker_missed_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "READY_S", 0.01)
    second = {"engine": "http://second"}
    async with stand(tmp_path) as it:
        restarting = it.gateway.workers[1].ready
        for method, path, body, found in (
            ("POST", "/replicas", second, {"http://first": 2, "http://second": 2}),
            ("DELETE", "/replicas?name=http%3A//second", {}, {"http://first": 2}),
        ):
            restarting.clear()
            assert (await it.ask(method, path, body))[0] == 503
            restarting.set()
            assert (await it.ask(method, path, body))[0] == 200
            _, listed = await it.ask("GET", "/replicas")
            assert {one["name"]: one["prompt_tokens"] for one in listed["replicas"]} == found
            status, said = await it.ask(method, path, body)
            assert (status, said["error"]["message"][:8]) == (400, "worker-0")


async def test_health_names_a_worker_that_is_down(tmp_path):
    async with stand(tmp_path) as it:
        it.gateway.workers[1].ready.clear()
        status, said = await it.ask("GET", "/health")
        assert (status, said) == (503, {"status": "worker_unavailable", "detail": "worker-1"})
        it.gateway.workers[1].ready.set()


async def test_with_a_control_port_the_first_port_serves_only_health(tmp_path):
    async with stand(tmp_path, control_port=0) as it:
        assert it.gateway.control_url != it.gateway.url
        assert (await it.ask("GET", "/health"))[0] == 200
        status, said = await it.ask("POST", "/sessions", {})
        assert status == 404
        assert "no such route for POST requests" in said["error"]["message"]
        assert (await it.ask("POST", f"{it.gateway.control_url}/sessions", {}))[0] == 200


async def test_workers_take_the_ports_after_the_first_one(tmp_path):
    port = three_free_ports()
    async with stand(tmp_path, port=port) as it:
        assert it.gateway.url == f"http://127.0.0.1:{port}"
        assert it.gateway.ports == [port + 1, port + 2]
        with pytest.raises(ConfigError, match=f":{port}: the port is in use"):
            async with supervisor(tmp_path / "another", {}, port=port):
                pass


async def test_the_error_of_a_worker_that_cannot_start_is_raised(tmp_path):
    with pytest.raises(EngineError, match="no logprobs"):
        async with stand(tmp_path, {"worker-1": {"error": "no logprobs", "kind": "EngineError"}}):
            pass


async def test_two_supervisors_do_not_share_a_data_folder(tmp_path):
    async with stand(tmp_path):
        with pytest.raises(ConfigError, match="is in use by process"):
            async with supervisor(tmp_path, {}):
                raise AssertionError


async def test_a_public_url_without_the_workers_port_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\{port\}: each worker has a port of its own"):
        async with supervisor(tmp_path, {}, public_url="http://gate.example"):
            pass


@pytest.mark.parametrize(
    ("made", "workers", "why"),
    [
        (["capture.sqlite"], 2, "holds the sessions of a gateway of one process"),
        (["worker-0/capture.sqlite", "worker-2/capture.sqlite"], 2, "give --workers 3"),
        (["worker-0/capture.sqlite", "worker-1/capture.sqlite"], 1, "give --workers 2"),
    ],
)
def test_a_data_folder_refuses_another_number_of_workers(tmp_path, made, workers, why):
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=why):
        check_folder(tmp_path, workers)
    check_folder(tmp_path / "fresh", workers)


def test_merged_replica_states_add_counts_and_keep_any_worker_s_down_state():
    counted = ("calls_in_flight", "sessions", "calls", "failures", "losses")
    tokens = ("prompt_tokens", "cached_tokens")
    live = {"name": "a", "state": "live", "error": None, "version": 3}
    live |= dict.fromkeys((*counted, *tokens), 2)
    down = {**live, "state": "down", "error": "gone", "version": 2, "calls": 5}
    other = {**live, "name": "b"}

    for order in ([[live, other], [down, other]], [[down, other], [live, other]]):
        first, second = merged_replicas(order)
        assert (first["state"], first["error"], first["version"]) == ("down", "gone", 3)
        assert (first["calls"], first["sessions"]) == (7, 4)
        assert (second["state"], second["calls"]) == ("live", 4)
