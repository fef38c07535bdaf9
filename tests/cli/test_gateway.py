"""`bridle gateway`: the model API in a process of its own."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

pytestmark = pytest.mark.timeout(60)


def test_a_session_over_http_is_captured_and_survives_the_end(tmp_path):
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
            with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - loopback
                return json.load(answer)

        session = post("/sessions", {}, token)
        asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        reply = post("/v1/chat/completions", asked, session["key"])
        streamed = urllib.request.Request(  # noqa: S310 - loopback
            f"{url}/v1/chat/completions",
            json.dumps({**asked, "stream": True}).encode(),
            {"Authorization": f"Bearer {session['key']}"},
        )
        with urllib.request.urlopen(streamed, timeout=20) as answer:  # noqa: S310 - loopback
            assert answer.read().endswith(b"data: [DONE]\n\n")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)

    assert reply["choices"][0]["message"]["content"] == "hi"
    assert session["base_url"]["openai"].endswith("/v1")
    assert process.returncode == 0
    from bridle.capture.sqlite import SqliteReader

    with SqliteReader(tmp_path / "data" / "capture.sqlite") as reader:
        exchanges = reader.exchanges(session["session_id"])
        assert [exchange.extra.get("stream") for exchange in exchanges] == [None, "live"]
        assert [exchange.extra.get("prompt") for exchange in exchanges] == ["engine", "engine"]


def test_without_an_engine_it_says_where_one_is_named(say):
    said = say("gateway", "--data", "nowhere")
    assert said.code == 2
    assert "--engine" in said.err
    assert "engines = [" in said.err
