"""Our scripts, run with programs of a few lines in place of those that they call."""

import os
import signal
import subprocess
import time

import pytest


@pytest.fixture
def script(tmp_path):
    """Runs one of our scripts; each of `programs` is a shell script ahead on its PATH."""
    started: list[subprocess.Popen[str]] = []

    def run(path, programs, **env):
        for name, text in programs.items():
            program = tmp_path / name
            source = f"#!/bin/bash\n{text}\n"
            if not program.exists() or program.read_text() != source:  # it may run now: "text busy"
                program.write_text(source)
                program.chmod(0o755)
        given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(["bash", path], env=given, stdout=pipe, stderr=pipe, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def ended_first(tmp_path):
    """An environment that pauses a script while the child named by one of its variables runs."""

    def environment(variable):
        gone = f'while [ -n "${{{variable}:-}}" ] && kill -0 "${variable}" 2>/dev/null; do :; done'
        hook = tmp_path / "hook.sh"
        hook.write_text(f"[ \"${{0%/*}}\" = {tmp_path} ] || trap '{gone}' DEBUG\n")
        return {"BASH_ENV": str(hook)}

    return environment


@pytest.fixture
def often_signalled(tmp_path):
    """A server that ignores SIGTERM, a `sleep` that returns at once, and a function that sends
    SIGTERM to a script often, then has its server end with code 3.

    Bash 5.2 takes a trap in the middle of `$(...)` for a syntax error, and ends with code 2.
    """
    up, end = tmp_path / "up", tmp_path / "end"
    bridle = f"trap '' TERM; touch {up}; until [ -e {end} ]; do :; done; exit 3"

    def signal_often(process):
        while not up.exists():
            assert process.poll() is None
        for _ in range(2000):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.0005)
        end.touch()

    return bridle, {"sleep": '[ "$1" = 1 ] || exec /bin/sleep "$@"'}, signal_often
