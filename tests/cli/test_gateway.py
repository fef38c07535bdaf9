"""`bridle gateway` and `bridle engine` in processes of their own."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bridle.cli.config import load_config
from bridle.cli.gateway import open_gateway, worker_config
from bridle.config import ModelSpec
from bridle.errors import ConfigError
from bridle.folders import FolderLock
from bridle.node.results import sessions
from bridle.types import Kind

pytestmark = pytest.mark.timeout(180)


def test_a_session_over_http_is_captured_and_readable_after_the_gateway_ends(tmp_path):
    (tmp_path / "s.json").write_text(
        json.dumps({"conversations": [{"turns": [{"content": "hi"}]}]})
    )
    command = [
        *(sys.executable, "-m", "bridle.cli", "gateway", "--port", "0"),
        *("--engine", f"scripted:{tmp_path / 's.json'}", "--data", str(tmp_path / "data")),
        *("--stream", "live", "--prompt", "engine"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline() if process.stderr else ""
        [url] = re.findall(r"model API at (\S+),", line)
        token = (tmp_path / "data" / "control.token").read_text().strip()

        def post(path: str, body: dict, key: str) -> dict:
            request = urllib.request.Request(  # noqa: S310 - loopback
                f"{url}{path}", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
                return json.load(answer)

        session = post("/sessions", {}, token)
        asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        reply = post("/v1/chat/completions", asked, session["key"])
        streamed = urllib.request.Request(  # noqa: S310 - loopback
            f"{url}/v1/chat/completions",
            json.dumps({**asked, "stream": True}).encode(),
            {"Authorization": f"Bearer {session['key']}"},
        )
        with urllib.request.urlopen(streamed, timeout=60) as answer:  # noqa: S310 - loopback
            assert answer.read().endswith(b"data: [DONE]\n\n")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

    assert reply["choices"][0]["message"]["content"] == "hi"
    assert session["base_url"]["openai"].endswith("/v1")
    assert process.returncode == 0
    from bridle.capture.sqlite import SqliteReader

    with SqliteReader(tmp_path / "data" / "capture.sqlite") as reader:
        exchanges = reader.exchanges(session["session_id"])
        assert [exchange.extra.get("stream") for exchange in exchanges] == [None, "live"]
        assert [exchange.extra.get("prompt") for exchange in exchanges] == ["engine", "engine"]


def test_gateway_without_an_engine_is_refused_with_the_flag_and_the_config_key(say):
    said = say("gateway", "--data", "nowhere")
    assert said.code == 2
    assert "--engine" in said.err
    assert "engines = [" in said.err


async def test_a_second_gateway_on_a_data_folder_is_refused_and_names_the_first(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"conversations": [{"turns": [{"content": "x"}]}]}))
    config = load_config(None, engines=[f"scripted:{tmp_path / 's.json'}"])
    async with open_gateway(config, tmp_path / "data", fsync=False):
        with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on"):
            async with open_gateway(config, tmp_path / "data", fsync=False):
                raise AssertionError
    async with open_gateway(config, tmp_path / "data", fsync=False):
        pass


def test_a_gateway_on_a_folder_in_use_exits_with_one_line(say, tmp_path):
    with FolderLock(tmp_path / "data"):
        said = say("gateway", "--engine", "embedded:x", "--data", tmp_path / "data")
    assert (said.code, said.err.count("in use by process")) == (2, 1)
    assert "Traceback" not in said.err


def test_several_workers_with_an_embedded_engine_are_refused(say, tmp_path):
    said = say("gateway", "--workers", 2, "--engine", "embedded:x", "--data", tmp_path / "data")
    assert said.code == 2
    assert "bridle engine" in said.err


def test_start_error_of_a_worker_is_the_error_of_the_gateway_command(say, tmp_path):
    missing = f"scripted:{tmp_path / 'nothing.json'}"
    command = ("--workers", 2, "--port", 0, "--engine", missing, "--data", tmp_path / "data")
    said = say("gateway", *command)
    assert said.code == 2
    assert "nothing.json" in said.err


@contextmanager
def two_workers(folder: Path):
    """A gateway of two processes on `folder`: what it prints, and a way to ask it."""
    script = folder / "s.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "hi"}]}]}))
    command = [
        *(sys.executable, "-m", "bridle.cli", "gateway", "--port", "0", "--workers", "2"),
        *("--engine", f"scripted:{script}", "--data", str(folder / "data"), "--json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        token = Path(said["control_token"]).read_text().strip()

        def ask(url, method, body=None, key=token):
            where, sent = urlsplit(url), None if body is None else json.dumps(body)
            line = http.client.HTTPConnection(where.netloc, timeout=120)
            line.request(method, where.path, sent, {"Authorization": f"Bearer {key}"})
            reply = line.getresponse()
            answer = reply.status, reply.read()
            line.close()
            return answer

        yield process, said, ask
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            assert process.returncode == 0


def test_sessions_of_several_workers_survive_the_death_of_one(tmp_path):
    """One test for a whole life: each start of a process costs a second."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    chat = "/v1/chat/completions"
    numbers = itertools.count()
    opened: list[dict] = []
    with two_workers(tmp_path) as (process, said, ask):
        for _ in range(4):
            status, answer = ask(said["url"] + "/sessions", "POST", {})
            assert status == 200
            opened.append(json.loads(answer))
        bases = [session["base_url"]["openai"] for session in opened]
        assert sorted(urlsplit(base).port for base in bases) == sorted(said["worker_ports"] * 2)

        def call(session: dict, base: str | None = None) -> int:
            """Ask a new question: one that was asked before may join a call that the kill lost."""
            url = f"{base or session['base_url']['openai']}/chat/completions"
            messages = [{"role": "user", "content": str(next(numbers))}]
            return ask(url, "POST", {"model": "m", "messages": messages}, session["key"])[0]

        assert [call(session) for session in opened] == [200] * 4
        host = "http://127.0.0.1:{}/v1"
        by_port = {
            urlsplit(base).port: session for base, session in zip(bases, opened, strict=True)
        }
        one, other = said["worker_ports"]
        assert call(by_port[one], host.format(one)) == 200, "the key is enough"
        status, answer = ask(
            host.format(other) + "/chat/completions", "POST", body, by_port[one]["key"]
        )
        assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key")
        assert by_port[one]["session_id"].encode() not in answer
        assert ask(said["url"] + chat, "POST", body, by_port[one]["key"])[0] == 421
        assert ask(host.format(one).removesuffix("/v1") + "/sessions", "GET")[0] == 404
        assert json.loads(ask(said["url"] + "/policy", "POST", {"version": 7})[1])["version"] == 7

        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        while Path(f"/proc/{children[0]}").exists():
            pass  # what it accepts until then is reset
        assert [call(session) for session in opened] == [200] * 4, "on the same ports"
        while b"bridle_worker_restarts_total 1.0" not in ask(said["url"] + "/metrics", "GET")[1]:
            pass
        assert json.loads(ask(said["url"] + "/policy", "GET")[1])["version"] == 7
        ended = opened.pop()
        gone = said["url"] + f"/sessions/{ended['session_id']}"
        assert ask(gone, "DELETE")[0] == 200
        assert call(ended) == 401

    captured = {one.session.session_id: one for one in sessions(tmp_path / "data")}
    assert sorted(len(one.exchanges) for one in captured.values()) == [2, 2, 2, 3]
    versions = {one.exchanges[-1].versions[-1].version for one in captured.values()}
    assert versions == {7}, "the restarted worker has the policy of the other one"
    assert captured[ended["session_id"]].outcome is not None


def test_workers_end_when_their_supervisor_is_killed(tmp_path):
    with two_workers(tmp_path) as (process, _, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        assert len(children) == 2
        while any(Path(f"/proc/{child}/exe").exists() for child in children):
            time.sleep(0.01)


def test_a_worker_inherits_gateway_settings_except_its_ports_token_and_data_folder(tmp_path):
    config = load_config(
        None,
        engines=["http://e:1"],
        tokenizer="builtin",
        gateway={"port": 8100, "control_port": None, "stream": "live", "data_dir": tmp_path},
    )
    config = config.model_copy(update={"models": {"judge": ModelSpec(kinds=(Kind.SIDE,))}})
    own = {"port": 8102, "control_port": 4711, "control_token": "t" * 20, "data_dir": "worker-1"}

    read = worker_config(
        {"config": config.model_dump(mode="json", exclude_unset=True), "gateway": own}
    )

    assert (read.engines, read.tokenizer) == (config.engines, config.tokenizer)
    assert read.models == config.models
    assert read.gateway.stream == "live"
    assert read.gateway.model_dump(include=set(own), mode="json") == own


def test_engine_command_serves_a_script_in_vllm_s_format_until_sigterm(tmp_path):
    (tmp_path / "s.json").write_text(
        json.dumps({"conversations": [{"turns": [{"content": "hi"}]}]})
    )
    command = [
        *(sys.executable, "-m", "bridle.cli", "engine", f"scripted:{tmp_path / 's.json'}"),
        *("--port", "0", "--json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = json.loads(process.stdout.readline() if process.stdout else "")["url"]
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{url}/v1/chat/completions",
            json.dumps(body | {"return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
            reply = json.load(answer)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    assert reply["choices"][0]["message"]["content"] == "hi"
    assert reply["prompt_token_ids"]
    assert reply["choices"][0]["token_ids"]
    assert process.returncode == 0
