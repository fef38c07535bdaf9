"""Registries in the form that Harbor documents: sets by name and version."""

import json
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from bridle.cli.run import load_task_set
from bridle.datasets import harbor
from bridle.datasets.jsonl import load_tasks
from bridle.errors import ConfigError

TASK = {
    "task.toml": 'version = "1.0"\n[metadata.bridle]\nportable = true\n',
    "instruction.md": "Fix it.\n",
    "tests/test.sh": "echo 1 > ${LOGS_DIR:-/logs}/verifier/reward.txt\n",
}


def write_task(folder):
    for name, text in TASK.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder, *arguments):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    ended = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return ended.stdout.strip()


@pytest.fixture
def registry(tmp_path):
    """Writes a registry with two versions of one set and one of another."""

    def make(**changes):
        for name in ("one", "two"):
            write_task(tmp_path / "tasks" / name)
        one, two = ({"name": name, "path": f"tasks/{name}"} | changes for name in ("one", "two"))
        sets = [
            {"name": "shell", "version": "1.0", "description": "", "tasks": [one]},
            {"name": "shell", "version": "2.0", "description": "", "tasks": [two, one]},
            {"name": "org/other", "version": "1.0", "description": "", "tasks": [two]},
        ]
        (tmp_path / "registry.json").write_text(json.dumps(sets))
        return tmp_path / "registry.json"

    return make


def names(path):
    return [task.task_id for task in load_tasks(Path(path))]


def test_a_registry_task_set_is_loaded_by_name_and_version(registry):
    file = registry()
    assert names(f"{file}:shell@1.0") == ["one"]
    assert names(f"{file}:shell@2.0") == ["two", "one"]


def test_a_registry_task_set_with_one_version_is_loaded_without_naming_it(registry):
    assert names(f"{registry()}:org/other") == ["two"]


def test_task_set_name_in_metadata_includes_its_version(registry):
    (task,) = load_task_set(Path(f"{registry()}:shell@1.0"), {})
    assert task.metadata["task_set"] == "shell@1.0"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "shel@1.0",
            r"no data set 'shel', did you mean 'shell'\?; known: \['org/other', 'shell'\]",
        ),
        ("shell@2.1", r"no version '2.1', did you mean '2.0'\?; known: \['1.0', '2.0'\]"),
        ("shell", r"has the versions \['1.0', '2.0'\]: choose one with shell@VERSION"),
    ],
)
def test_an_unknown_task_set_or_version_is_refused_with_the_known_ones(registry, wanted, message):
    with pytest.raises(ConfigError, match=message):
        load_tasks(Path(f"{registry()}:{wanted}"))


def test_a_malformed_or_missing_registry_file_is_refused_by_name(tmp_path):
    (tmp_path / "a.json").write_text('[{"name": "shell"}]')
    with pytest.raises(
        ConfigError, match=r"a\.json: not a registry of Harbor's data sets: .*version"
    ):
        load_tasks(Path(f"{tmp_path}/a.json:shell"))
    with pytest.raises(ConfigError, match=r"b\.json: cannot be read"):
        load_tasks(Path(f"{tmp_path}/b.json:shell"))


def test_a_missing_task_folder_of_a_registry_is_named_with_its_task(registry):
    with pytest.raises(
        ConfigError, match=r"shell@1\.0: task 'one': its folder does not exist: .*gone"
    ):
        load_tasks(Path(f"{registry(path='gone')}:shell@1.0"))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a task and a link out of it; its address and its commit."""
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    origin = tmp_path / "origin"
    write_task(origin / "inside")
    (tmp_path / "secret").write_text("secret")
    (origin / "inside" / "tests" / "link").symlink_to(tmp_path / "secret")
    git(origin, "init", "--quiet")
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "A task")
    return origin.as_uri(), git(origin, "rev-parse", "HEAD")


def test_a_task_in_a_repository_is_fetched_once_at_its_commit(registry, repository, tmp_path):
    url, commit = repository
    (tmp_path / "origin" / "inside" / "instruction.md").write_text("Later.\n")
    git(tmp_path / "origin", "commit", "--quiet", "-am", "Later")
    file = registry(git_url=url, git_commit_id=commit, path="inside")
    (task,) = load_tasks(Path(f"{file}:shell@1.0"))
    assert task.instruction == "Fix it.\n"
    (tmp_path / "origin").rename(tmp_path / "unreachable")
    assert names(f"{file}:shell@1.0") == ["inside"]


def test_the_head_of_a_repository_is_fetched_each_time(registry, repository, tmp_path):
    file = registry(git_url=repository[0], path="inside")
    load_tasks(Path(f"{file}:shell@1.0"))
    (tmp_path / "origin" / "inside" / "instruction.md").write_text("Later.\n")
    git(tmp_path / "origin", "commit", "--quiet", "-am", "Later")
    (task,) = load_tasks(Path(f"{file}:shell@1.0"))
    assert task.instruction == "Later.\n"


def test_a_symbolic_link_in_a_fetched_repository_is_not_kept_as_a_link(registry, repository):
    url, commit = repository
    file = registry(git_url=url, git_commit_id=commit, path="inside")
    (task,) = load_tasks(Path(f"{file}:shell@1.0"))
    assert not (Path(str(task.task_dir)) / "tests" / "link").is_symlink()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"git_url": "ext::sh -c true"}, "transport 'ext' not allowed"),
        ({"git_url": "--upload-pack=true"}, "cannot fetch"),
        ({"git_commit_id": "0" * 40}, "cannot fetch '0{40}' of file:"),
        ({"path": "../.."}, "leads out of its repository"),
    ],
)
def test_an_unusable_repository_url_commit_or_path_is_refused_by_name(
    registry, repository, changes, message
):
    url, commit = repository
    given = {"git_url": url, "git_commit_id": commit, "path": "inside"} | changes
    with pytest.raises(ConfigError, match=message):
        load_tasks(Path(f"{registry(**given)}:shell@1.0"))


def test_git_fetch_from_a_silent_host_times_out_and_is_killed(registry, monkeypatch):
    monkeypatch.setattr(harbor, "FETCH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/tasks"
        with pytest.raises(ConfigError, match=r"cannot fetch 'HEAD' of git:.*no answer within 1 s"):
            load_tasks(Path(f"{registry(git_url=url)}:shell@1.0"))
        silent.setblocking(False)
        with suppress(BlockingIOError):  # a busy machine: git had not connected yet
            connection, _ = silent.accept()
            connection.setblocking(True)
            with connection:
                while connection.recv(1024):  # the request, then the end: nobody has it open
                    pass
