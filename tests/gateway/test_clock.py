"""A gateway whose clock jumps an hour: budgets, grace and retries count seconds that passed."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from tests.gateway.house import user

JUMPING = """
import time
from pathlib import Path
now, ahead_s = time.time, Path(__file__).parent / "ahead"
time.time = lambda: now() + float(ahead_s.read_text())
"""
"""The `sitecustomize` of a machine whose clock is ahead by the seconds that a file names."""

SCRIPT = {
    "conversations": [
        {
            "turns": [
                {"content": "first"},
                {"content": "second", "delay_s": 1.5},
                {"content": "third", "delay_s": 1.5},
            ]
        }
    ]
}
GRACE_S = 3.0


def set_clock(folder, ahead_s):
    """Put the gateway's clock so many seconds ahead."""
    (folder / "new").write_text(str(ahead_s))
    (folder / "new").rename(folder / "ahead")


@asynccontextmanager
async def a_gateway(folder, workers):
    """An HTTP client of a gateway in processes of its own."""
    set_clock(folder, 0)
    (folder / "sitecustomize.py").write_text(JUMPING)
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    (folder / "bridle.toml").write_text(f"[gateway]\nretry_grace_s = {GRACE_S}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bridle.cli", "gateway", "--port", "0", "--workers", str(workers)),
        *("--engine", f"scripted:{folder / 'script.json'}", "--data", folder / "data"),
        *("--config", folder / "bridle.toml"),
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "999"},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        line = (await process.stderr.readline()).decode()
        [url] = re.findall(r"control routes at (\S+)", line)
        token = (folder / "data" / "control.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(url, headers=headers) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def opened(client, **options):
    """Id of a new session, and its URL among the headers of its harness."""
    async with client.post("/sessions", json=options) as answer:
        shown = await answer.json()
    headers = {"url": shown["base_url"]["openai"], "Authorization": f"Bearer {shown['key']}"}
    return shown["session_id"], headers


async def ask(client, headers, *messages):
    """Status and JSON of a call."""
    body = {"model": "m", "messages": [*messages]}
    url = f"{headers['url']}/chat/completions"
    async with client.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def until(look, wanted):
    """Wait until `look()` gives what is wanted."""
    async with asyncio.timeout(60):
        while await look() != wanted:  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.1)


async def leave(client, session_id, headers, *messages):
    """Make a call, and leave when it has begun."""

    async def calls():
        async with client.get(f"/sessions/{session_id}") as answer:
            return (await answer.json())["calls"]

    begun = await calls() + 1
    async with asyncio.TaskGroup() as group:
        call = group.create_task(ask(client, headers, *messages))
        await until(calls, begun)
        call.cancel()


async def deliveries(client, session_id):
    """States of the deliveries of a session's exchanges."""
    async with client.get(f"/sessions/{session_id}/exchanges") as answer:
        return [one["delivery"] for one in (await answer.json())["exchanges"]]


def said(reply):
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [1, 2])
async def test_budgets_grace_and_retries_outlive_a_clock_that_jumps_an_hour_both_ways(
    tmp_path, workers
):
    async with a_gateway(tmp_path, workers) as client:
        session_id, key = await opened(client, limits={"max_seconds": 600})
        _, short = await opened(client, limits={"max_seconds": 2})
        assert (await ask(client, short, user("go")))[0] == 200
        _, reply = await ask(client, key, user("go"))
        asked = [user("go"), said(reply), user("on")]
        await leave(client, session_id, key, *asked)
        set_clock(tmp_path, 3600)
        status, reply = await ask(client, {**key, "x-stainless-retry-count": "1"}, *asked)
        assert (status, said(reply)["content"]) == (200, "second")
        set_clock(tmp_path, -3600)
        asked += [said(reply), user("more")]
        await leave(client, session_id, key, *asked)  # and nobody asks again
        states = ["delivered", "delivered", "abandoned"]
        await until(lambda: deliveries(client, session_id), states)
        async with client.get(f"/sessions/{session_id}/trajectory") as answer:
            traces = (await answer.json())["traces"]
        assert [len(trace["exchange_ids"]) for trace in traces] == [2]
        status, refusal = await ask(client, short, user("go"))
        assert status != 200
        assert "budget of seconds" in refusal["error"]["message"]
        set_clock(tmp_path, 3600)
        assert (await ask(client, key, user("another")))[0] == 200
