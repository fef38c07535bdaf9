"""Several workers behind one port; the workers are small programs that answer with their name."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from bridle.capture.records import SessionRecord
from bridle.capture.sqlite import SqliteStore
from bridle.config import Limits, SamplingPolicy
from bridle.errors import ConfigError, EngineError
from bridle.gateway.front import CAPTURE, Front, check_folder, worker_folder
from bridle.gateway.keys import key_digest, mint_key
from bridle.gateway.registry import STORED_AS, stored_settings
from bridle.gateway.settings import GatewaySettings

SMALL = (sys.executable, str(Path(__file__).parent / "small_worker.py"))
OLD_KEY = mint_key()


class Stand:
    """A front of small workers and a client."""

    def __init__(self, front: Front, client: aiohttp.ClientSession) -> None:
        self.front = front
        self.client = client

    async def ask(self, method: str, path: str, body: object = None, **headers: str):
        data = None if body is None else orjson.dumps(body)
        url = self.front.own_url + path
        async with self.client.request(method, url, data=data, headers=headers) as reply:
            raw = await reply.read()
            return reply.status, orjson.loads(raw) if raw[:1] in {b"{", b"["} else raw.decode()

    async def on_a_new_connection(self, path: str, **headers: str):
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client:
            return await Stand(self.front, client).ask("POST", path, **headers)


@asynccontextmanager
async def stand(folder: Path, told: Any = None, **settings: Any):
    """Two workers; the second knows a session of before, `s-old`. `told` adds to what one reads."""
    for number in range(2):
        worker_folder(folder, number).mkdir(exist_ok=True)
        async with await SqliteStore.open(worker_folder(folder, number) / CAPTURE) as store:
            if number and not store.sessions():
                kept = stored_settings(key_digest(OLD_KEY), SamplingPolicy(), Limits())
                await store.open_session(SessionRecord("s-old", 1.0, None, {STORED_AS: kept}))
    front = Front(
        settings=GatewaySettings(data_dir=folder, control_token="0123456789abcdef", **settings),
        data=folder,
        workers=2,
        command=SMALL,
        told=lambda number, _: orjson.dumps(
            {"name": f"w{number}", **((told or {}).get(number, {}))}
        ),
    )
    async with front, aiohttp.ClientSession() as client:
        yield Stand(front, client)


async def test_sessions_go_where_the_fewest_live_and_their_requests_after_them(tmp_path):
    async with stand(tmp_path) as it:
        opened = [(await it.ask("POST", "/sessions", {}))[1] for _ in range(3)]
        assert [one["session_id"] for one in opened] == ["s-w0-0", "s-w0-1", "s-w1-0"]
        for one in opened:
            key = {"x-api-key": one["key"]}
            status, said = await it.on_a_new_connection("/v1/messages", **key)
            assert (status, said["worker"]) == (200, one["session_id"][2:4])
        # On a connection that began with a control request, too, and by the path alone.
        assert (await it.ask("POST", "/s/s-w1-0/v1/messages"))[1]["worker"] == "w1"
        assert (await it.ask("GET", "/sessions/s-w1-0/exchanges"))[1]["worker"] == "w1"
        assert (await it.ask("GET", "/sessions/s-nobody"))[1]["worker"] == "w0"
        _, listed = await it.ask("GET", "/sessions")
        assert {one["session_id"] for one in listed["sessions"]} == {
            one["session_id"] for one in opened
        }
        assert "n_total 3.0" in (await it.ask("GET", "/metrics"))[1]
        assert (await it.ask("DELETE", "/sessions/s-w0-0"))[1]["method"] == "DELETE"
        assert (await it.ask("POST", "/sessions", {}))[1]["session_id"].startswith("s-w0")


async def test_sessions_of_before_are_where_they_were_and_names_are_given_once(tmp_path):
    async with stand(tmp_path) as it:
        bearer = {"Authorization": f"Bearer {OLD_KEY}"}
        assert (await it.on_a_new_connection("/v1/chat/completions", **bearer))[1]["worker"] == "w1"
        again = await it.ask("POST", "/sessions", {"session_id": "s-old"})
        assert again[1]["session_id"] == "s-old"  # the small worker refuses nobody
        named = [await it.ask("POST", "/sessions", {"session_id": f"n-{n}"}) for n in range(3)]
        assert [status for status, _ in named] == [200] * 3
        placed = [(await it.on_a_new_connection(f"/s/n-{n}/v1/x"))[1]["worker"] for n in range(3)]
        assert placed == ["w0", "w0", "w1"]  # where `s-old` lives


async def test_a_policy_is_set_on_all_or_on_none(tmp_path):
    async with stand(tmp_path, {1: {"refuse": "paused"}}) as it:
        assert (await it.ask("POST", "/policy", {"version": 4}))[1]["version"] == 4
        status, said = await it.ask("POST", "/policy", {"paused": True, "hold": "wait"})
        assert (status, said["error"]["message"]) == (400, "w1 refuses")
        _, policy = await it.ask("GET", "/policy")
        assert policy["hold"] is None, "the worker that held goes on"
        assert (await it.ask("POST", "/policy", b"no object".hex()))[0] == 200


async def test_weights_are_loaded_by_one_while_the_others_hold(tmp_path):
    async with stand(tmp_path) as it:
        wanted = {"weights": "/w", "version": 5, "timeout_s": 3}
        assert (await it.ask("POST", "/policy", wanted))[0] == 200
        _, policy = await it.ask("GET", "/policy")
        assert (policy["version"], policy["hold"]) == (5, None)
        status, said = await it.ask("POST", "/policy", {**wanted, "rolling": True})
        assert (status, said["error"]["message"]) == (400, "rolling: not with several workers")


async def test_weights_that_the_others_cannot_hold_for_are_not_loaded(tmp_path):
    async with stand(tmp_path, {1: {"refuse": "hold"}}) as it:
        status, said = await it.ask("POST", "/policy", {"weights": "/w", "version": 5})
        assert (status, said["error"]["message"]) == (400, "w1 refuses")
        assert (await it.ask("GET", "/policy"))[1]["version"] == 0


async def test_a_worker_that_dies_comes_back_with_what_the_others_know(tmp_path):
    async with stand(tmp_path) as it:
        await it.ask("POST", "/policy", {"version": 7, "paused": True})
        await it.ask("POST", "/replicas", {"engine": "http://second"})
        _, before = await it.ask("GET", "/s/s-old/v1/x")
        victim = it.front.workers[1]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        # Who comes meanwhile is served when the worker is back, or as soon as it is missed.
        status, after = await it.on_a_new_connection("/s/s-old/v1/x")
        assert (status, after["worker"]) == (200, before["worker"])
        async with asyncio.timeout(20):
            while (await it.ask("GET", "/health"))[0] != 200 or not victim.restarts:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert "bridle_worker_restarts_total 1.0" in (await it.ask("GET", "/metrics"))[1]
        _, policy = await it.ask("GET", "/policy")
        assert (policy["version"], policy["paused"]) == (7, True)
        _, told = await it.ask("GET", "/replicas")
        assert [one["name"] for one in told["replicas"]] == ["http://first", "http://second"]
        assert [one["prompt_tokens"] for one in told["replicas"]] == [2, 2]


async def test_a_control_port_of_its_own_leaves_only_health_on_the_first(tmp_path):
    async with stand(tmp_path, control_port=0) as it:
        assert it.front.control_url != it.front.own_url
        assert (await it.ask("GET", "/health"))[0] == 200
        status, said = await it.ask("POST", "/sessions", {})
        assert (status, said["error"]["message"]) == (404, "no such route: POST")
        async with it.client.post(f"{it.front.control_url}/sessions", data=b"{}") as reply:
            assert reply.status == 200


async def test_why_a_worker_cannot_start_is_told_and_the_others_end(tmp_path):
    refused = {1: {"error": "no logprobs", "kind": "EngineError"}}
    with pytest.raises(EngineError, match="no logprobs"):
        async with stand(tmp_path, refused):
            pass


@pytest.mark.parametrize(
    ("made", "workers", "why"),
    [
        (["capture.sqlite"], 2, "is the folder of one process"),
        (["worker-0/capture.sqlite", "worker-2/capture.sqlite"], 2, "give --workers 3"),
        (["worker-0/capture.sqlite", "worker-1/capture.sqlite"], 1, "give --workers 2"),
    ],
)
def test_a_folder_keeps_its_number_of_workers(tmp_path, made, workers, why):
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=why):
        check_folder(tmp_path, workers)
    check_folder(tmp_path / "fresh", workers)
