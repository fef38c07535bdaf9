"""Schemathesis itself, run on the server's own description: whatever it sends, there is no 5xx.

`BRIDLE_TEST_EXAMPLES` is how many requests it draws per route (`make long`: many).
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from tests.server.house import KNOWN, TOKEN, database_of
from tests.server.killing import Killed

from bridle.client import AsyncClient

EXAMPLES = int(os.environ.get("BRIDLE_TEST_EXAMPLES", "3"))

SETTINGS = """
[parameters]
wait_s = 0
timeout_s = 0
"""
"""Long polls are answered at once."""


@pytest.mark.postgres
@pytest.mark.timeout(150 + 10 * EXAMPLES)
async def test_schemathesis_finds_no_server_error(tmp_path):
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    server = Killed(tmp_path, database_of(tmp_path))
    url = f"http://127.0.0.1:{server.port}"
    phases = "examples,coverage,fuzzing,stateful" if EXAMPLES > 50 else "examples,fuzzing,stateful"
    server.start()
    try:
        async with AsyncClient(url, token=TOKEN.token, patience_s=100) as client:
            await client.status()
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name("schemathesis"),
                *("--config-file", "schemathesis.toml", "run", f"{url}/openapi.json"),
                *("--checks", "not_a_server_error", "--phases", phases, "--seed", "1"),
                # The event stream has no end.
                *("--exclude-path", "/events", "--max-examples", str(EXAMPLES), "--no-color"),
                *("--header", f"Authorization: {KNOWN['authorization']}"),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            result, _ = await process.communicate()
            assert process.returncode == 0, result.decode()
            tested = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", result.decode())
            assert tested, result.decode()
            assert int(tested[1]) == int(tested[2]) - 1 == int(tested[3])  # all but the events
            assert server.process.poll() is None
            assert (await client.status())["tasks"]
    finally:
        server.end()
