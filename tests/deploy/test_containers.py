"""The image and the services of `deploy/` in a real Docker daemon (`make test-deploy`).

The trial of docs/guides/deploy.md runs as it stands there, with a real Docker Compose; images of
Debian's packages stand for those of a registry.
"""

import json
import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types
from tests.deploy.images import (
    BASE,
    BRIDLE,
    POSTGRES,
    docker,
    make_base,
    make_bridle,
    make_postgres,
)
from tests.ports import free_port

from bridle.client import AsyncClient

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TOKEN = "a-token-of-the-test"
PAGE = (DEPLOY.parent / "docs" / "guides" / "deploy.md").read_text()
[BLOCK] = re.findall(r'^```console title="trial"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
*TRIAL, END = re.findall(r"^\$ (.+)$", BLOCK, re.MULTILINE)
PROJECT = "bridle-test"
SCRIPT = {"conversations": [{"turns": [{"content": "It is done."}]}]}
ASK = """
import json, os, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Do it."}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(urllib.request.urlopen(asked).read())
"""
"""An agent: one call of the model."""
FIRST = {
    "task_id": "first",
    "instruction": "Do it.",
    "num_samples": 2,
    "max_attempts": 1,
    "runtime": {"backend": "bubblewrap"},
    "agent": {"harness": "command", "command": f"python3 -c '{ASK}'"},
}

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory):
    make_base()
    make_bridle()
    make_postgres(tmp_path_factory.mktemp("postgres"))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return path


def published(container):
    """URL of a container's port 8080 on this machine."""
    return "http://" + docker("port", container, "8080").split()[0]


def test_the_image_has_the_bridle_command_and_an_unprivileged_user():
    said = docker("run", "--rm", BRIDLE, "bridle", "--version")
    assert re.fullmatch(r"bridle \d\S+\n", said)
    assert docker("run", "--rm", BRIDLE, "id", "-un") == "bridle\n"
    config = json.loads(docker("inspect", BRIDLE))[0]["Config"]
    assert (config["User"], list(config["Volumes"])) == ("bridle", ["/var/lib/bridle"])


def test_doctor_passes_for_bubblewrap_in_a_container_with_the_compose_options():
    node = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["node"]
    options = [f"--security-opt={each}" for each in node["security_opt"]]
    done = subprocess.run(
        ["docker", "run", "--rm", *options, BRIDLE, "bridle", "doctor", "--runtime", "bubblewrap"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def as_the_page_says(script):
    """Starts a container by the command of the page; all of them share its volume."""
    [line] = re.findall(r"^\$ (docker run .*?[^\\])$", PAGE, re.DOTALL | re.MULTILINE)
    words = shlex.split(line.replace("\\\n", " "))
    for shown, given in (
        ("bridle", BRIDLE),  # the image; the next one is the command
        ("http://ENGINE:8000", "scripted:/script.json"),
        ("Qwen/Qwen3-4B", "builtin"),
        ("127.0.0.1:8080:8080", "127.0.0.1:0:8080"),
        ("bridle:/var/lib/bridle", "bridle-test-data:/var/lib/bridle"),
        ("BRIDLE_SERVER_TOKEN=...", f"BRIDLE_SERVER_TOKEN={TOKEN}"),
    ):
        words[words.index(shown)] = given
    started = []

    def start():
        more = ["-d", f"--volume={script}:/script.json:ro"]
        started.append(docker(*words[1:2], *more, *words[2:]).strip())
        return started[-1]

    yield start
    for each in started:
        docker("rm", "-f", each)
    docker("volume", "rm", "bridle-test-data")


async def test_a_server_container_keeps_its_tasks_in_its_volume_over_a_restart(as_the_page_says):
    container = as_the_page_says()
    url = published(container)
    async with AsyncClient(url, token=TOKEN, patience_s=60) as client:
        await client.submit(FIRST)
        await completed(client)
    assert b"ok" in fetched(f"{url}/health")
    docker("stop", "--time", "30", container)
    assert json.loads(docker("inspect", container))[0]["State"]["ExitCode"] == 0
    async with AsyncClient(published(as_the_page_says()), token=TOKEN) as client:
        assert await client.submit(FIRST) is False
        await completed(client)


async def completed(client):
    """Wait for the task, whose sessions ran in sandboxes."""
    group = await anext(client.groups(quiet_s=120))
    assert [(one.status, one.error) for one in group.results] == [("COMPLETED", None)] * 2
    assert all(one.trajectory.traces for one in group.results)


@pytest.fixture
def trial():
    """Runs commands with the names that a test needs; all services end with it."""
    given = {"BASE": BASE, "POSTGRES_IMAGE": POSTGRES, "PORT": str(free_port())}
    env = {**os.environ, **given, "COMPOSE_PROJECT_NAME": PROJECT, "BRIDLE_SERVER_TOKEN": TOKEN}

    def run(*commands):
        """Run commands in one shell, with the token of the test; their output."""
        text = "\n".join(commands).replace("BRIDLE_SERVER_TOKEN=$(openssl rand -hex 16)", "")
        line = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            line, check=False, capture_output=True, cwd=DEPLOY.parent, env=env, text=True
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    yield run
    run(*TRIAL[:2], END)


def test_the_compose_trial_completes_a_task_stored_in_postgresql(trial):
    said = trial(*TRIAL)
    assert 'bridle_server_sessions{state="COMPLETED"} 1.0' in said
    url = published(f"{PROJECT}-server-1")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetched(f"{url}/metrics")
    query = ["psql", "-U", "bridle", "-t", "-A", "-c", "select count(*) from sessions"]
    assert docker("exec", f"{PROJECT}-postgres-1", *query) == "1\n"
    # A disk in the place of shared memory would be slow.
    assert "The object store is using" not in docker("logs", f"{PROJECT}-node-1")
    # Data outlives the container: the volume belongs to the image's user.
    path = "/var/lib/bridle/server.token"
    assert docker("exec", f"{PROJECT}-server-1", "stat", "-c", "%U", path) == "bridle\n"


def fetched(url, token=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - loopback
        return answer.read()
