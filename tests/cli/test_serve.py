"""`bridle serve`: the rollout server and its nodes."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from structlog.testing import capture_logs
from tests.disks import full_disk
from tests.node.house import AGENT
from tests.server.house import until

from bridle.cli.config import load_config
from bridle.cli.serve import _owner, open_node, server_of, workers_of
from bridle.client import AsyncClient, Client
from bridle.config import AgentSpec, Task
from bridle.credentials import announce_server
from bridle.errors import ConfigError, ServerError
from bridle.folders import FolderLock

pytestmark = pytest.mark.timeout(180)

SCRIPT = {"conversations": [{"turns": [{"shell": ["echo done > out.txt"]}, {"content": "Done."}]}]}


def tasks(count, samples=2):
    return [
        {
            "task_id": f"task-{number}",
            "instruction": "Write done to out.txt.",
            "num_samples": samples,
            "runtime": {"backend": "local"},
            "agent": {"harness": "command", "command": AGENT},
            "evaluator": {"strategy": "command", "config": {"command": "grep -q done out.txt"}},
        }
        for number in range(count)
    ]


def readable_by_others(folder):
    found = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    assert any(path.name == "capture.sqlite-wal" for path in found)
    return [str(path) for path in found if path.stat().st_mode & 0o077]


def script(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return path


@contextmanager
def a_server(tmp_path, *arguments):
    """A server's process; gives its URL."""
    command = [
        *(sys.executable, "-m", "bridle.cli", "serve", "--port", "0"),
        *("--engine", f"scripted:{script(tmp_path)}", "--data", str(tmp_path / "data")),
        *arguments,
    ]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline() if process.stdout else "")["url"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_tasks_are_submitted_watched_and_shown_from_the_command_line(tmp_path, say, monkeypatch):
    """With a token of the environment, which the server asks for and the verbs send."""
    monkeypatch.setenv("BRIDLE_SERVER_TOKEN", "a-token-of-sixteen-at-least")
    (tmp_path / "tasks.json").write_text(json.dumps(tasks(2)))
    with a_server(tmp_path) as url:
        at = ("--server", url)
        said = say("submit", tmp_path / "tasks.json", "--json", *at)
        assert [one["new"] for one in said.json["tasks"]] == [True, True]
        assert "2 were known already" in say("submit", tmp_path / "tasks.json", *at).out
        watched = say("watch", "task-0", "task-1", *at)
        assert (watched.code, watched.out.count("completed")) == (0, 2)
        shown = say("status", "task-0", "--json", *at).json
        assert [one["reward"] for one in shown["sessions"]] == [1.0, 1.0]
        assert "task-0.1" in say("status", "task-0", *at).out
        assert say("status", "--json", *at).json["tasks"] == {"completed": 2}
        assert "policy version 0" in say("status", *at).out
        assert say("cancel", "task-0", *at).code == 0
        stranger = say("status", "--token", "another", *at)
        assert (stranger.code, "a valid token is needed" in stranger.err) == (3, True)
        missing = say("cancel", "nobody", *at)
        assert (missing.code, "unknown: nobody" in missing.out) == (1, True)
        with Client(url) as client:
            groups = list(client.groups(quiet_s=0.5))
            assert sorted(group.task_id for group in groups) == ["task-0", "task-1"]
            assert all(
                one.trajectory.metadata["stats"]["tokens_trained"] > 0
                for group in groups
                for one in group.results
            )


async def test_a_reopened_server_knows_its_tasks_and_its_files_are_private(tmp_path):
    server = {"port": 0, "data": tmp_path / "data"}
    engines = [f"scripted:{script(tmp_path)}"]
    executor = {"node": {"run_slots": 2}}
    config = load_config(None, engines=engines, server=server, executor=executor)
    for expected in ([True], [False]):
        async with server_of(config) as opened, AsyncClient(opened.url) as client:
            assert await client.submit_many(tasks(1)) == expected
            assert (await client.wait("task-0", timeout_s=60))["state"] == "completed"
            assert readable_by_others(tmp_path / "data") == []


def test_a_server_whose_first_start_met_a_full_disk_has_a_name_at_the_next(tmp_path):
    with full_disk(0), pytest.raises(OSError, match="File too large"):
        _owner(tmp_path)

    assert _owner(tmp_path) == _owner(tmp_path) != ""


async def test_a_second_server_on_a_data_folder_is_refused_and_names_the_first(tmp_path):
    server = {"port": 0, "data": tmp_path / "data"}
    loaded = load_config(None, engines=[f"scripted:{script(tmp_path)}"], server=server)
    with (
        FolderLock(tmp_path / "data"),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"),
    ):
        async with server_of(loaded):
            raise AssertionError


def whole_config(tmp_path, **server):
    """The configuration of a whole server on loopback, as `bridle serve` has it without flags."""
    return load_config(
        None,
        engines=[f"scripted:{script(tmp_path)}"],
        server={"port": 0, "data": tmp_path / "data", **server},
        executor={"node": {"run_slots": 1}},
    )


async def test_a_dns_rebinding_request_gets_status_421_on_every_route(tmp_path):
    """DNS rebinding: to the browser the page and the server have one origin, `evil.example`."""
    page = {"host": "evil.example:8080", "origin": "http://evil.example:8080"}
    async with (
        server_of(whole_config(tmp_path), dashboard=True) as opened,
        httpx.AsyncClient(base_url=opened.url) as http,
    ):
        token = (tmp_path / "data" / "server.token").read_text().strip()
        for known in ({}, {"authorization": f"Bearer {token}"}):
            sent = {**page, **known}
            result = [await http.post("/v1/tasks", headers=sent, json={"tasks": tasks(1)})]
            paths = ("/v1/status", "/health", "/openapi.json", "/metrics", "/ui/", "/nowhere")
            result += [await http.get(path, headers=sent) for path in paths]
            assert {one.status_code for one in result} == {421}
            assert all("--allow-host" in one.text for one in result)
        async with AsyncClient(opened.url) as owner:
            assert (await owner.status())["tasks"] == {}


async def test_every_route_except_health_and_openapi_answers_401_without_the_token(tmp_path):
    async with (
        server_of(whole_config(tmp_path)) as opened,
        httpx.AsyncClient(base_url=opened.url) as http,
    ):
        described = (await http.get("/openapi.json")).json()["paths"]
        for path, methods in described.items():
            for method in methods:
                response = await http.request(method, path.replace("{", "").replace("}", ""))
                expected = 200 if path in ("/health", "/openapi.json") else 401
                assert response.status_code == expected, (method, path)
        assert (await http.post("/v1/tasks", json={"tasks": tasks(1)})).status_code == 401
    kept = tmp_path / "data" / "server.token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


async def test_a_client_of_the_same_user_finds_the_server_token(tmp_path, say):
    async with server_of(whole_config(tmp_path)) as opened:
        port = opened.url.rpartition(":")[2]
        token = (tmp_path / "data" / "server.token").read_text().strip()
        by_name = f"http://localhost:{port}"
        for url in (opened.url, by_name, f"http://x:{token}@127.0.0.1:{port}"):
            async with AsyncClient(url) as client:
                assert (await client.status())["tasks"] == {}
                assert client.url == opened.url
        said = await asyncio.to_thread(say, "status", "--server", by_name)
        assert said.code == 0
        async with AsyncClient(f"http://x:wrong@127.0.0.1:{port}") as stranger:
            with pytest.raises(ServerError, match="token") as refused:
                await stranger.status()
            assert "wrong" not in str(refused.value)
    async with AsyncClient(opened.url, patience_s=0.1) as late:
        with pytest.raises(ServerError, match="cannot be reached"):
            await late.status()


async def test_a_server_is_announced_before_its_http_task_starts(tmp_path, monkeypatch):
    found = []

    def announced(url, token_file):
        found.append([task for task in asyncio.all_tasks() if task.get_name() == "http"])
        return announce_server(url, token_file)

    monkeypatch.setattr("bridle.cli.serve.announce_server", announced)
    async with server_of(whole_config(tmp_path)):
        assert found == [[]]


async def test_a_public_server_needs_a_token_and_answers_421_to_unknown_hosts(tmp_path):
    """The names of `--allow-host` reach it, and addresses; other names do not."""
    config = whole_config(tmp_path, host="0.0.0.0", hosts=("trainer.example",))
    async with server_of(config) as opened, httpx.AsyncClient() as http:
        url = opened.url.replace("0.0.0.0", "127.0.0.1")
        for host, status in (
            *(("trainer.example", 401), ("trainer.example:80", 401), ("192.0.2.7:8080", 401)),
            *(("evil.example", 421), ("trainer.example.evil.example", 421)),
        ):
            response = await http.get(f"{url}/v1/status", headers={"host": host})
            assert response.status_code == status, host


def test_server_flags_are_merged_with_the_config_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'engines = ["scripted:x"]\n[server]\nport = 9\nmax_inflight_groups = 4\n'
        '[server.permits]\nruntimes = ["docker"]\nimport_paths = ["mine"]\n'
    )
    config = load_config(file, server={"port": 7, "permits": {"callbacks": ("h",)}}).server
    assert (config.port, config.max_inflight_groups) == (7, 4)
    assert (config.permits.runtimes, config.permits.callbacks) == (("docker",), ("h",))


def test_a_server_waiting_for_its_first_engine_ends_at_sigterm_with_code_0(tmp_path):
    command = [
        *(sys.executable, "-m", "bridle.cli", "serve", "--port", "0"),
        *("--engines-from", str(tmp_path / "none"), "--data", str(tmp_path / "data")),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("waiting_for_engines" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


async def test_serve_tries_to_join_engines_that_appear_in_its_engines_file(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "Done."}]}]}))
    source = tmp_path / "engines"
    server = {"engines_from": str(source), "data": tmp_path / "data", "port": 0}
    config = load_config(None, engines=[f"scripted:{script}"], server=server)
    with capture_logs() as logs:
        async with server_of(config) as opened:
            source.write_text(opened.url)  # a server, and no engine
            await until(lambda: any(one["event"] == "engine_cannot_join" for one in logs))


@pytest.fixture
def config(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "Well."}]}]}))
    file = tmp_path / "bridle.toml"
    file.write_text(f'engines = ["scripted:{script}"]\n[executor.node]\npost_slots = 3\n')
    return load_config(file)


async def test_a_node_opens_from_a_pickled_config_and_runs_a_task(tmp_path, config):
    opens = pickle.loads(pickle.dumps(partial(open_node, config)))  # noqa: S301 - our own
    async with opens(tmp_path / "n", cpus=1.5) as node:
        assert (node.settings.run_slots, node.settings.post_slots) == (3, 3)
        task = Task(task_id="t", instruction="x", agent=AgentSpec(harness="command", command=AGENT))
        assert (await node.run(task, run_id="s")).status == "COMPLETED"
        assert node.store.outcome("s") is not None
    assert (tmp_path / "n" / "capture.sqlite").exists()


async def test_sessions_run_in_the_server_process_by_default(tmp_path, config):
    async with workers_of(config, tmp_path, "owner") as workers:
        assert not workers.outlive
        assert not workers.expect("s")
        assert workers.capacity > 0


async def test_ray_executor_without_the_ray_package_is_refused_with_the_extra_to_install(
    tmp_path, config, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "bridle.node.ray", raising=False)
    on_ray = config.model_copy(
        update={"executor": config.executor.model_copy(update={"kind": "ray"})}
    )
    with pytest.raises(ConfigError, match=r"\[ray\]"):
        async with workers_of(on_ray, tmp_path, "owner"):
            raise AssertionError
