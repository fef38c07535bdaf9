"""`bridle dashboard` in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import Any

import pytest

from bridle.cli.dashboard import guard_of
from bridle.errors import ConfigError

STATE = os.environ["XDG_STATE_HOME"]
"""Where servers of these tests are found."""

pytestmark = pytest.mark.timeout(180)


@contextmanager
def serving(*arguments, **environment):
    """Return where a dashboard listens; leaving ends it as Ctrl-C does."""
    command = [sys.executable, "-m", "bridle.cli", "dashboard", *map(str, arguments)]
    process: Any = subprocess.Popen(
        [*command, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": STATE, **environment},
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line)["url"]
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:  # noqa: S310 - loopback
        return answer.status, answer.read().decode()


def test_a_finished_run_is_shown_and_the_run_is_not_changed(finished_run):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()}

    with serving(finished_run) as url:
        status, page = fetch(url)
        with pytest.raises(urllib.error.HTTPError, match="421"):
            fetch(url, Host="evil.example")

    assert status == 200
    assert "captured" in page
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_with_a_token_it_is_needed(finished_run):
    token = "a-token-for-the-browser"
    with serving(finished_run, BRIDLE_DASHBOARD_TOKEN=token) as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(url)
        status, _ = fetch(url, Authorization=f"Bearer {token}")

    assert status == 200


def test_a_folder_that_is_not_there_or_empty_is_refused(say, tmp_path):
    gone = say("dashboard", tmp_path / "none")
    empty = say("dashboard", tmp_path)

    assert (gone.code, empty.code) == (2, 2)
    assert "there is no" in gone.err
    assert "nothing to show" in empty.err


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "machine.example"])
def test_others_may_look_only_with_a_token(host):
    with pytest.raises(ConfigError, match="BRIDLE_DASHBOARD_TOKEN"):
        guard_of(host, None)
    assert guard_of(host, "a-token") is not None
    assert guard_of("127.0.0.2", None) is None
