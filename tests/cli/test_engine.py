"""`bridle engine`: an engine over HTTP in a process of its own."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

pytestmark = pytest.mark.timeout(180)


def test_a_scripted_engine_answers_in_vllms_shape_until_it_is_asked_to_end(tmp_path):
    (tmp_path / "s.json").write_text(
        json.dumps({"conversations": [{"turns": [{"content": "hi"}]}]})
    )
    command = [
        *(sys.executable, "-m", "bridle.cli", "engine", f"scripted:{tmp_path / 's.json'}"),
        *("--port", "0"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = re.findall(r"at (\S+);", process.stderr.readline() if process.stderr else "")[0]
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
