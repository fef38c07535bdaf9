"""Keeps one server process for whoever holds its standard input.

Commands are lines of JSON: `{"start": [ARGV...], "env": {...}, "log": PATH}`, `{"signal": N}` for
the whole process group, `{"wait": SECONDS}` for its end. Each is answered by a line with the
server's process id, null when none runs. When standard input closes, for whatever reason, the
server is killed with all that it started: a killed test run leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

Server = subprocess.Popen[bytes]


def obey(server: Server | None, command: dict[str, Any]) -> Server | None:
    """Do one command; the server that runs afterwards."""
    if "start" in command:
        with Path(command["log"]).open("ab") as log:
            return subprocess.Popen(
                command["start"],
                env=command["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    if server is not None and "signal" in command:
        end(server, command["signal"])
    if server is not None and "wait" in command:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(command["wait"])
    return server


def end(server: Server, number: int) -> None:
    """Send a signal to the server's whole group, which outlives its leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


def main() -> None:
    """Obey until nobody holds standard input any more."""
    server: Server | None = None
    try:
        for line in sys.stdin:
            server = obey(server, json.loads(line))
            running = server is not None and server.poll() is None
            sys.stdout.write(f"{json.dumps(server.pid if server and running else None)}\n")
            sys.stdout.flush()
    finally:
        if server is not None:
            end(server, signal.SIGKILL)
            server.wait()


if __name__ == "__main__":
    main()
