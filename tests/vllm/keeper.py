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
import time
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
    """Send a signal to the server's whole group, which outlives its leader.

    `kill -9` spares Python's resource trackers: they end by themselves, and remove the shared
    memory that the others leave.
    """
    if number != signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        return
    while members := group_of(server.pid):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def group_of(leader: int) -> list[int]:
    """Living processes of a group, resource trackers left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            name = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(group) == leader and state != "Z" and b"resource_tracker" not in name:
            found.append(int(stat.parent.name))
    return found


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
