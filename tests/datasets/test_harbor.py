"""Folders in Harbor's format, as its own documentation and sets have them."""

import json
from pathlib import Path

import pytest

from bridle.datasets.harbor import folder_digest, harbor_task, is_harbor
from bridle.datasets.jsonl import load_tasks
from bridle.errors import ConfigError

OLD = """version = "1.0"
[metadata]
author_name = "Someone"
difficulty = "easy"
{metadata}
[verifier]
timeout_sec = 120.0
[agent]
timeout_sec = 90.0
[environment]
build_timeout_sec = 60.0
cpus = 2
memory = "2G"
storage = "512M"
{environment}
"""
PORTABLE = "[metadata.bridle]\nportable = true"


@pytest.fixture
def folder(tmp_path):
    """Writes a task folder; `texts` are laid over an ordinary one, `None` leaves a file out."""

    def make(*, name="fix-it", metadata="", environment="", **texts):
        ordinary = {
            "task.toml": OLD.format(metadata=metadata, environment=environment),
            "instruction.md": "Fix it.\n",
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY in.txt .\n",
            "environment/in.txt": "broken\n",
            "tests/test.sh": "echo 1 > ${LOGS_DIR:-/logs}/verifier/reward.txt\n",
            "solution/solve.sh": "echo fixed > in.txt\n",
        }
        for path, text in {**ordinary, **texts.pop("files", {})}.items():
            if text is not None:
                (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / path).write_text(text)
        return tmp_path / name

    return make


def loaded(folder, backend=None, harness=None):
    overrides = {"agent": {"harness": harness}} if harness else {}
    if backend is not None:
        overrides["runtime"] = {"backend": backend}
    (task,) = load_tasks(folder, overrides=overrides)
    return task


def test_an_old_task_toml_loads_as_a_docker_task(folder):
    task = loaded(folder())
    assert (task.task_id, task.instruction) == ("fix-it", "Fix it.\n")
    assert task.runtime.backend == "docker"
    assert task.runtime.image.startswith("bridle-harbor:")
    assert Path(task.runtime.kwargs["build"]).name == "environment"
    limits = (task.runtime.cpus, task.runtime.memory_mb, task.runtime.storage_mb)
    assert limits == (2, 2048, 512)
    budgets = task.budgets
    assert (budgets.init_s, budgets.agent_s, budgets.evaluate_s) == (360, 90, 120)
    assert task.evaluator.strategy == "harbor"
    assert task.evaluator.config == {"tests": str(folder() / "tests")}
    assert task.metadata["difficulty"] == "easy"


def test_a_task_toml_of_schema_1_4_is_read_with_its_image_and_health_check(folder):
    text = """schema_version = "1.4"
    [task]
    name = "org/fix-it"
    [verifier]
    env = { LIMIT = "${LIMIT:-3}" }
    [environment]
    docker_image = "org/image:1"
    memory_mb = 100
    gpus = 0
    workdir = "/srv"
    skills_dir = "/skills"
    env = { MODE = "test" }
    [environment.healthcheck]
    command = "test -e ready"
    [[environment.mcp_servers]]
    name = "files"
    transport = "stdio"
    command = "serve"
    """
    task = loaded(folder(files={"task.toml": text}))
    assert (task.runtime.image, task.runtime.kwargs) == ("org/image:1", {})
    assert (task.runtime.memory_mb, task.runtime.gpus) == (100, None)
    assert (task.runtime.workdir, task.runtime.env) == ("/srv", {"MODE": "test"})
    assert [(step.command, step.max_attempts) for step in task.runtime.prepare] == [
        ("test -e ready", 3)
    ]
    assert task.evaluator.env == {"LIMIT": "3"}
    assert [server.command for server in task.agent.mcp_servers] == ["serve"]
    harbor = task.metadata["harbor"]
    assert (harbor["name"], harbor["unused"]) == ("org/fix-it", ["environment.skills_dir"])


def test_a_relative_folder_loads_the_same_task_as_its_absolute_path(folder, monkeypatch):
    home = folder(metadata=PORTABLE)
    monkeypatch.chdir(home.parent)
    assert loaded(Path(home.name), "local", "oracle") == loaded(home, "local", "oracle")


def test_allow_internet_in_task_toml_does_not_open_the_network(folder):
    task = loaded(folder(environment="allow_internet = true"))
    assert task.runtime.network == "gateway_only"


def test_a_portable_task_runs_without_an_image(folder):
    home = folder(metadata=PORTABLE)
    sandboxed, local = loaded(home, "bubblewrap"), loaded(home, "local")
    assert (sandboxed.runtime.workdir, local.runtime.workdir) == ("/app", None)
    assert sandboxed.runtime.kwargs["folders"] == ["/tests", "/logs", "/solution"]
    assert [step.target for step in local.runtime.prepare] == ["in.txt"]
    assert (local.runtime.memory_mb, sandboxed.runtime.memory_mb) == (None, 2048)
    assert loaded(home).runtime.backend in ("bubblewrap", "local")


@pytest.mark.parametrize(("backend", "target"), [("docker", "/solution"), ("local", None)])
def test_the_oracle_gets_the_solution_of_its_task(folder, backend, target):
    home = folder(metadata=PORTABLE + "\n[solution]\nenv = { A = '1' }")
    task = loaded(home, backend, "oracle")
    solution = str(home / "solution")
    assert task.agent.settings == {"solution": solution, "script": "solve.sh", "target": target}
    assert task.agent.env == {"A": "1"}


@pytest.mark.parametrize(
    ("changes", "backend", "why"),
    [
        ({}, "bubblewrap", "needs the image of its environment: use runtime 'docker'"),
        ({"environment": 'os = "windows"'}, None, "asks for os 'windows'"),
        ({"environment": 'tpu = "v5e-4"'}, None, "asks for a TPU"),
        ({"environment": 'memory = "lots"'}, None, "'lots' is not a size"),
        ({"environment": 'cpus = "many"'}, None, r"task\.toml: environment\.cpus"),
        ({"environment": '[environment.env]\nK = "${K}"'}, None, r"environment\.env\.K: wants"),
        ({"files": {"environment/docker-compose.yaml": ""}}, None, "asks for a compose file"),
        ({"files": {"trajectory.json": ""}}, None, "asks for a trajectory that was begun"),
        ({"files": {"tests/test.sh": None}}, None, "test.sh: no such file"),
        ({"files": {"environment/Dockerfile": None}}, None, "set environment.docker_image"),
        ({"environment": "[[steps]]\nname = 'one'"}, None, "asks for several steps"),
        (
            {"metadata": PORTABLE, "files": {"tests/test.sh": "echo 1 > /logs/x"}},
            "local",
            "which runtime 'local' does not have",
        ),
    ],
)
def test_unsupported_task_settings_are_refused_at_load(folder, changes, backend, why):
    if changes.get("environment", "").startswith(("memory =", "cpus =")):
        text = f"[environment]\n{changes.pop('environment')}\n"
        changes = {"files": {"task.toml": text}}
    with pytest.raises(ConfigError, match=why):
        loaded(folder(**changes), backend)


def test_oracle_harness_is_refused_for_a_task_without_a_solution(folder):
    with pytest.raises(ConfigError, match="harness 'oracle' needs this script"):
        loaded(folder(files={"solution/solve.sh": None}), None, "oracle")


def test_harbor_folders_and_json_tasks_load_from_one_folder(folder, tmp_path):
    folder(name="a"), folder(name="b")
    (tmp_path / "c.json").write_text(json.dumps({"task_id": "c", "instruction": "x"}))
    assert [task.task_id for task in load_tasks(tmp_path)] == ["a", "b", "c"]
    assert is_harbor(tmp_path / "a" / "task.toml")
    assert not is_harbor(tmp_path / "c.json")


def test_folder_digest_depends_on_contents_modes_and_links_only(folder):
    one = folder(name="one") / "environment"
    two = folder(name="two") / "environment"
    assert folder_digest(one) == folder_digest(two)
    (two / "in.txt").chmod(0o755)
    other_mode = folder_digest(two)
    (two / "link").symlink_to("in.txt")
    assert len({folder_digest(one), other_mode, folder_digest(two)}) == 3


def test_a_folder_name_is_converted_to_a_valid_task_id(folder):
    assert harbor_task(folder(name="_two words"), {})["task_id"] == "two-words"
