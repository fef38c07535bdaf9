"""Harbor task folders -> tasks, so that sets of its registry run as they are.

    task.toml            metadata, [agent], [verifier], [environment]
    instruction.md       the task for the agent
    environment/         Dockerfile and its build context (or `environment.docker_image`)
    tests/test.sh        put at /tests after the harness is dead; writes /logs/verifier/reward.*
    solution/solve.sh    what harness `oracle` runs, put at /solution

The format is that of `harbor.models.task` (package harbor 0.25, schema 1.0 to 1.4). Its fields
become those of our task: timeouts are budgets, sizes are limits, `environment.env` is the runtime's
environment. With runtime `docker` the Dockerfile is built, once for each content of the folder.
Without one, a task runs only if its author says that any Linux will do (`[metadata.bridle]
portable = true`); its Dockerfile is then read as steps that mean the same on any Linux: `WORKDIR`
(one), `COPY` into it, `ENV` and `RUN`; any other step is refused by its name. What has no
counterpart here (several steps, compose files, Windows, a verifier's own environment) is refused.

The network is not opened by what a task says: `gateway_only` unless whoever runs it asks for more.

A registry of Harbor is a JSON list of sets, each with `name`, `version` and `tasks`; a task has a
`name`, the `path` of its folder, and `git_url` with `git_commit_id` where the folder lies in a
repository (`harbor.models.registry` of the package harbor). A path without a repository is relative
to the registry's file. Of a repository one commit is fetched by `git`, once, into the cache; its
symbolic links become plain files, so that none leads to a file of this machine.

`FILE.json:NAME[@VERSION]` names a set. The version may be left out if the set has one alone.

`write_harbor` writes a task from releases as such a folder. Its image has the repository of the
older release and what tests need; nothing of the newer one, which lies in `tests/` and `solution/`
alone. Tests run where the agent worked, as Harbor runs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bridle.config import McpServer, cache_dir, explain, load_toml, validated
from bridle.errors import ConfigError
from bridle.evaluators import summary
from bridle.evaluators.base import OBEYED, RUN_PYTEST, start_pytest
from bridle.folders import private_folder
from bridle.harnesses.base import as_toml
from bridle.runtimes import default_backend
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.datasets.environments import VirtualEnvironment

TASK, INSTRUCTION = "task.toml", "instruction.md"
SOLUTION, TESTS, LOGS = "/solution", "/tests", "/logs"
"""Paths at which Harbor's scripts expect them inside; sandboxes get them as folders of the
session's own."""
SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
"""Unit -> MiB, as the old fields `memory` and `storage` write sizes."""
IMAGE = "bridle-harbor"
"""Name of the images that are built; the tag is a digest of the folder."""


class _Part(BaseModel):
    """A table of `task.toml`: what is not named here is kept as it is, and reported unused."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Healthcheck(_Part):
    """`[environment.healthcheck]`."""

    command: str
    interval_sec: float = 5.0
    retries: int = 3


class Environment(_Part):
    """`[environment]`."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    env: dict[str, str] = Field(default_factory=dict)
    mcp_servers: tuple[McpServer, ...] = ()
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None
    network_mode: str | None = None


class Phase(_Part):
    """`[agent]`, `[verifier]` and `[solution]`."""

    timeout_sec: float | None = None
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str | None = None


class HarborTask(_Part):
    """A `task.toml`."""

    version: str | None = None
    schema_version: str | None = None
    metadata: JSON = Field(default_factory=dict)
    task: JSON = Field(default_factory=dict)
    agent: Phase = Phase()
    verifier: Phase = Phase()
    environment: Environment = Environment()
    solution: Phase = Phase()


def is_harbor(path: Path) -> bool:
    """Return whether a task file is the `task.toml` of a Harbor folder."""
    return path.name == TASK and (path.parent / INSTRUCTION).is_file()


def harbor_task(folder: Path, wanted: Mapping[str, Any]) -> JSON:
    """Return a Harbor folder as the fields of a `Task`.

    `wanted` are the caller's defaults and overrides: `runtime.backend` and `agent.harness` decide
    how the folder is read. Raises `ConfigError` naming the file and what it asks for that cannot be
    given.
    """
    folder = folder.resolve()
    file = folder / TASK
    read = validated(HarborTask, load_toml(file), str(file))
    _refuse_what_has_no_counterpart(folder, read)
    portable = bool(read.metadata.get("bridle", {}).get("portable"))
    # Harbor's own place is a container; what runs on any Linux needs no daemon.
    backend = wanted.get("runtime", {}).get("backend")
    backend = backend or (default_backend()[0] if portable else "docker")
    harness = wanted.get("agent", {}).get("harness")
    task: JSON = {
        "task_id": re.sub(r"[^A-Za-z0-9._:-]", "-", folder.name).lstrip("-._:"),
        "instruction": (folder / INSTRUCTION).read_text(encoding="utf-8"),
        "runtime": _runtime(folder, read, backend, portable=portable),
        "budgets": _budgets(read),
        "evaluator": {
            "strategy": "harbor",
            "config": {"tests": str(folder / "tests")},
            "env": _env(read.verifier.env, file, "verifier.env"),
        },
        "metadata": {**read.metadata, "harbor": {**read.task, "unused": _unused(read)}},
    }
    if backend == "local":
        _must_be_relative(folder / "tests" / "test.sh")
    agent: JSON = {}
    if read.environment.mcp_servers:
        agent["mcp_servers"] = [server.model_dump() for server in read.environment.mcp_servers]
    if harness == "oracle":
        agent["settings"] = oracle_settings(folder, None if backend == "local" else SOLUTION)
        agent["env"] = _env(read.solution.env, file, "solution.env")
    return {**task, "agent": agent} if agent else task


def oracle_settings(folder: Path, target: str | None) -> JSON:
    """Return the settings with which harness `oracle` runs the solution of a Harbor folder.

    `ConfigError` if the folder has no solution.
    """
    script = folder / "solution" / "solve.sh"
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such file; harness 'oracle' needs this script, the task's solution"
        )
    return {"solution": str(script.parent.resolve()), "script": script.name, "target": target}


def folder_digest(folder: Path) -> str:
    """Return the hex digest of a folder's files: names, modes, links and contents."""
    digest = hashlib.sha256()
    for entry in sorted(folder.rglob("*")):
        name = entry.relative_to(folder).as_posix()
        mode = entry.lstat().st_mode & 0o111
        digest.update(f"{name}\0{mode}\0".encode())
        if entry.is_symlink():
            digest.update(f"link {entry.readlink()}\0".encode())
        elif entry.is_file():
            digest.update(hashlib.sha256(entry.read_bytes()).digest())
    return digest.hexdigest()


def _refuse_what_has_no_counterpart(folder: Path, read: HarborTask) -> None:
    environment = folder / "environment"
    composed = any(environment.glob("*compose.y*ml"))
    asked = {
        "several steps": "steps" in (read.model_extra or {}),
        "a compose file": composed,
        f"os {read.environment.os!r}": read.environment.os.lower() != "linux",
        "a verifier in an environment of its own": read.verifier.environment_mode == "separate",
        "a TPU": "tpu" in (read.environment.model_extra or {}),
        "a trajectory that was begun": (folder / "trajectory.json").exists(),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{folder / TASK}: the task asks for {what}, which Bridle does not support"
            )
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(
            f"{folder / 'tests' / 'test.sh'}: no such file; a task of Harbor needs this script to "
            "be scored"
        )


def _runtime(folder: Path, read: HarborTask, backend: str, *, portable: bool) -> JSON:
    environment, file = read.environment, folder / TASK
    spec: JSON = {"backend": backend, "env": _env(environment.env, file, "environment.env")}
    if environment.workdir is not None and backend != "local":
        spec["workdir"] = environment.workdir
    if environment.healthcheck is not None:
        check = environment.healthcheck
        step = {"type": "exec", "command": check.command, "max_attempts": max(1, check.retries)}
        spec["prepare"] = [{**step, "retry_backoff_seconds": check.interval_sec}]
    if backend != "local":
        spec |= {
            "cpus": environment.cpus,
            "memory_mb": environment.memory_mb or _mib(environment.memory, file),
            "storage_mb": environment.storage_mb or _mib(environment.storage, file),
            "gpus": environment.gpus or None,
        }
    build = folder / "environment"
    if backend == "docker":
        return {**spec, **_image(environment, build, file)}
    if not portable:
        raise ConfigError(
            f"{file}: the task needs the image of its environment: use runtime 'docker', or let "
            "its author say that any Linux will do ([metadata.bridle] portable = true)"
        )
    if (build / "Dockerfile").is_file():
        steps = dockerfile_steps(build / "Dockerfile")
        spec["env"] = {**steps.env, **spec["env"]}
        spec["prepare"] = [*steps.prepare, *spec.get("prepare", [])]
        if steps.workdir is not None and backend != "local":
            spec.setdefault("workdir", steps.workdir)
    if backend == "bubblewrap":
        spec["kwargs"] = {"folders": [TESTS, LOGS, SOLUTION]}
    return spec


def _image(environment: Environment, build: Path, file: Path) -> JSON:
    if environment.docker_image is not None:
        return {"image": environment.docker_image}
    if not (build / "Dockerfile").is_file():
        raise ConfigError(
            f"{file}: the task has no image for runtime 'docker': set environment.docker_image, "
            "or add environment/Dockerfile"
        )
    image = f"{IMAGE}:{folder_digest(build)[:20]}"
    return {"image": image, "kwargs": {"build": str(build.resolve())}}


def _budgets(read: HarborTask) -> JSON:
    budgets = {
        "init_s": 300 + read.environment.build_timeout_sec,
        "agent_s": read.agent.timeout_sec,
        "evaluate_s": read.verifier.timeout_sec or 600.0,
    }
    return {name: seconds for name, seconds in budgets.items() if seconds is not None}


def _env(given: Mapping[str, str], file: Path, field: str) -> dict[str, str]:
    """Return the variables, with `${NAME:-default}` filled; nothing of our environment is given
    away.
    """
    filled = {}
    for name, value in given.items():
        found = re.fullmatch(r"\$\{(\w+)(?::-(.*))?\}", value, re.DOTALL)
        if found is not None and found[2] is None:
            raise ConfigError(
                f"{file}: {field}.{name}: wants {value} of the machine's environment, which no "
                "task gets: write the value, or a default (${NAME:-value})"
            )
        filled[name] = value if found is None else found[2]
    return filled


def _mib(size: str | None, file: Path) -> int | None:
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])I?B?", size.strip().upper())
    if found is None:
        raise ConfigError(f"{file}: {size!r} is not a size: write 512M or 2G")
    return max(1, round(float(found[1]) * SIZES[found[2]]))


def _unused(read: HarborTask) -> list[str]:
    """Fields that stand there and mean nothing to us, so that nobody has to guess."""
    parts = {"": read, "environment.": read.environment, "agent.": read.agent}
    parts |= {"verifier.": read.verifier, "solution.": read.solution}
    return sorted(f"{at}{name}" for at, part in parts.items() for name in part.model_extra or ())


def _must_be_relative(script: Path) -> None:
    """Refuse a test script that would write outside the session, where nothing contains it."""
    text = script.read_text(encoding="utf-8", errors="replace")
    if "LOGS_DIR" not in text:
        raise ConfigError(
            f"{script}: writes to {LOGS}, which runtime 'local' does not have: use 'bubblewrap' or "
            f"'docker', or let the script write to ${{LOGS_DIR:-{LOGS}}}/verifier"
        )


MEANS_NOTHING_HERE = frozenset({"FROM", "CMD", "LABEL", "EXPOSE", "MAINTAINER"})
"""About the image or the container's own process, which a session does not start."""


@dataclass(slots=True)
class Steps:
    """Steps of a Dockerfile as fields of `RuntimeSpec`."""

    workdir: str | None = None
    """Absolute; `None` = none is named."""
    env: dict[str, str] = field(default_factory=dict)
    prepare: list[JSON] = field(default_factory=list)
    """`Action` objects, with sources as absolute paths and targets relative to the workdir."""


def dockerfile_steps(path: Path) -> Steps:
    """Return the steps of a Dockerfile as fields of a runtime.

    `ConfigError` names a line that cannot be carried out without Docker.
    """
    steps = Steps()
    for number, word, rest in _instructions(path.read_text(encoding="utf-8")):
        where = f"{path}:{number}: {word}"
        match word:
            case "WORKDIR":
                if steps.workdir not in (None, rest) or not rest.startswith("/"):
                    raise ConfigError(
                        f"{where}: the folder must be absolute, and the same throughout the file; "
                        f"given: {rest!r}"
                    )
                steps.workdir = rest
            case "ENV":
                steps.env.update(_pairs(rest, where))
            case "COPY":
                steps.prepare += _copies(shlex.split(rest), path.parent, steps.workdir, where)
            case "RUN":
                steps.prepare.append({"type": "exec", "command": rest})
            case _ if word not in MEANS_NOTHING_HERE:
                raise ConfigError(
                    f"{where}: this instruction needs an image that is built: use runtime 'docker'"
                )
    return steps


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, instruction in capitals, its arguments), continued lines joined."""
    begun, held = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (held or line.strip()):
            continue
        begun = begun if held else number
        held += line
        if held.rstrip().endswith("\\"):
            held = held.rstrip()[:-1]
            continue
        word, _, rest = held.strip().partition(" ")
        held = ""
        yield begun, word.upper(), rest.strip()


def _pairs(rest: str, where: str) -> dict[str, str]:
    if re.match(r"[A-Za-z_]\w*=", rest) is None:
        name, _, value = rest.partition(" ")
        pairs = [(name, "", value.strip())]
    else:
        pairs = [word.partition("=") for word in shlex.split(rest)]
    if any("$" in value for _, _, value in pairs):
        raise ConfigError(
            f"{where}: a value refers to another variable, which only the build of an image fills "
            "in: use runtime 'docker'"
        )
    return {name: value for name, _, value in pairs}


def _copies(words: list[str], folder: Path, workdir: str | None, where: str) -> Iterator[JSON]:
    *sources, target = words
    if not sources or any(word.startswith("--") for word in words):
        raise ConfigError(
            f"{where}: without an image only 'COPY source... target' can be done: use runtime "
            "'docker' for other forms"
        )
    base = PurePosixPath(workdir or "/")
    inside = PurePosixPath(workdir or "/", target)
    if workdir is None or not inside.is_relative_to(base) or ".." in inside.parts:
        raise ConfigError(
            f"{where}: the target must lie in the WORKDIR, not at {target!r}: use runtime 'docker'"
        )
    relative = inside.relative_to(base)
    for source in sources:
        found = (folder / source).resolve()
        if not found.is_relative_to(folder.resolve()) or not found.exists():
            raise ConfigError(f"{where}: no such file beside the Dockerfile: {source!r}")
        if found.is_dir():
            yield {"type": "upload_dir", "source": str(found), "target": str(relative)}
            continue
        into = target.endswith(("/", ".")) or len(sources) > 1
        aim = relative / found.name if into else relative
        yield {"type": "upload_file", "source": str(found), "target": str(aim)}


# ---- registries


SET = re.compile(r"(.+\.json):([^@]+)(?:@([^@]+))?")
"""A registry's file, and the name and version of one of its sets."""
PROTOCOLS = "https:ssh:git:file"
"""Protocols that `git` may fetch by; others, such as `ext`, run programs."""
FETCH_S = 600.0
"""Timeout of one fetch."""


class RegistryTask(BaseModel):
    """A task of a set."""

    name: str
    path: Path
    git_url: str | None = None
    git_commit_id: str = "HEAD"


class RegistrySet(BaseModel):
    """A set in one version."""

    name: str
    version: str
    tasks: list[RegistryTask]


SETS = TypeAdapter(list[RegistrySet])


def registry_folders(path: Path) -> list[Path]:
    """Return the task folders of a set in a registry file, `FILE.json:NAME[@VERSION]`, in its
    order.

    Raises `ConfigError`: no such file, set, version or folder, no registry, a failed fetch.
    """
    named = SET.fullmatch(str(path))
    if named is None:
        raise ConfigError(f"{path}: no such file or folder")
    file, name, version = Path(named[1]), named[2], named[3]
    found = _chosen(file, name, version)
    where = f"{file}:{found.name}@{found.version}"
    return [_folder(file.resolve().parent, task, where) for task in found.tasks]


def _chosen(file: Path, name: str, version: str | None) -> RegistrySet:
    try:
        sets = SETS.validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    except ValidationError as error:
        raise explain(error, f"{file}: not a registry of Harbor's data sets") from None
    same = [each for each in sets if each.name == name]
    if not same:
        names = sorted({each.name for each in sets})
        raise ConfigError(f"{file}: no data set {name!r}{_meant(name, names)}; known: {names}")
    versions = [each.version for each in same]
    if version is None and len(same) > 1:
        raise ConfigError(
            f"{file}: data set {name!r} has the versions {versions}: choose one with {name}@VERSION"
        )
    wanted = versions[0] if version is None else version
    if wanted not in versions:
        raise ConfigError(
            f"{file}: data set {name!r} has no version {wanted!r}{_meant(wanted, versions)};"
            f" known: {versions}"
        )
    return same[versions.index(wanted)]


def _meant(given: str, known: list[str]) -> str:
    close = get_close_matches(given, known, 1)
    return f", did you mean {close[0]!r}?" if close else ""


def _folder(base: Path, task: RegistryTask, where: str) -> Path:
    if task.git_url is None:
        folder = base / task.path
    else:
        tree = _checkout(task.git_url, task.git_commit_id, f"{where}: task {task.name!r}")
        folder = (tree / task.path).resolve()
        if not folder.is_relative_to(tree):
            raise ConfigError(
                f"{where}: task {task.name!r}: path {str(task.path)!r} leads out of its repository"
            )
    if not folder.is_dir():
        raise ConfigError(f"{where}: task {task.name!r}: its folder does not exist: {folder}")
    return folder


def _checkout(url: str, commit: str, where: str) -> Path:
    """Return a folder with the files of one commit; a moving name such as HEAD is fetched anew."""
    kept = private_folder(cache_dir() / "registry").resolve()
    tree = kept / sha256(f"{url}\0{commit}".encode()).hexdigest()[:20]
    pinned = re.fullmatch(r"[0-9a-f]{40,64}", commit) is not None
    if tree.is_dir() and pinned:
        return tree
    made = Path(tempfile.mkdtemp(dir=kept))
    try:
        for arguments in (
            ("init", "--quiet"),
            ("fetch", "--quiet", "--depth", "1", "--end-of-options", url, commit),
            ("-c", "core.symlinks=false", "checkout", "--quiet", "FETCH_HEAD"),
        ):
            _git(made, arguments, f"{where}: cannot fetch {commit!r} of {url}")
        shutil.rmtree(made / ".git")
        shutil.rmtree(tree, ignore_errors=True)
        made.rename(tree)
    except OSError as error:
        if not tree.is_dir():
            raise ConfigError(f"{where}: cannot store the repository {url}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return tree


def _git(folder: Path, arguments: tuple[str, ...], what: str) -> None:
    """Run `git`; after `FETCH_S` its process group is killed, with the programs that it fetches by.

    Raises `ConfigError`.
    """
    quiet = {"GIT_ALLOW_PROTOCOL": PROTOCOLS, "GIT_TERMINAL_PROMPT": "0"}
    with subprocess.Popen(
        [shutil.which("git") or "/usr/bin/git", *arguments],
        cwd=folder,
        env=os.environ | quiet,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, error = process.communicate(timeout=FETCH_S)
        except BaseException as failure:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(failure, subprocess.TimeoutExpired):
                message = f"{what}: no answer within {FETCH_S:g} s; is the host reachable?"
                raise ConfigError(message) from None
            raise
    if process.returncode != 0:
        raise ConfigError(f"{what}: {error.strip()[-300:]}")


# ---- writing


DOCKERFILE: Final = """\
ARG BASE=python:{python}-slim
FROM ${{BASE}}
RUN command -v git || {{ apt-get update && apt-get install -y --no-install-recommends git; }}
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
COPY requirements.lock packages/ /opt/environment/
RUN cd /opt/environment \\
 && python -m pip install --no-cache-dir --only-binary :all: --require-hashes \\
    -r requirements.lock \\
 && rm requirements.lock \\
 && cp -r . "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
WORKDIR /work
COPY repo/ .
RUN {begin}
"""
TEST: Final = """\
#!/bin/bash
main() {{
  export PYTHONSAFEPATH=1
  cd /work || exit 1
  find . -path ./.git -prune -o \\( {obeyed} \\) -exec rm -rf {{}} +
  mapfile -d '' -t removed <"$tests/removed" && rm -rf -- "${{removed[@]}}"
  cp -a "$tests/files/." .
  output=$(mktemp)
  {command} >"$output"
  code=$?
  cat "$output"
  reward=0
  python -I "$tests/summary.py" "$tests/wanted.json" "$code" <"$output" && reward=1
  mkdir -p /logs/verifier && echo "$reward" >/logs/verifier/reward.txt
  exit
}}
tests=$(cd "$(dirname "$0")" && pwd)
main
"""
STARTUP_FILES: Final = sorted(name for name in OBEYED if "pytest" in name or name.endswith(".py"))
"""Files that `python` and `pytest` look for by themselves; deleted before the tests run."""


def write_harbor(
    made: Path,
    folder: Path,
    release: Path,
    environment: VirtualEnvironment,
    decides: Callable[[Path], bool],
) -> None:
    """Write the task in the folder `made` as a Harbor folder.

    Its tests take the files for which `decides` is true from the tree of the newer release.
    """
    task = json.loads((made / "task.json").read_text())
    config, facts, budgets = task["evaluator"]["config"], task["metadata"], task["budgets"]
    shutil.rmtree(folder, ignore_errors=True)
    image, tests = folder / "environment", folder / "tests"
    shutil.copytree(made / "repo", image / "repo", symlinks=True)
    shutil.copytree(made / "solution", folder / "solution")
    shutil.copy(made / "requirements.lock", image)
    python, begin = facts["python"].rpartition(".")[0], task["runtime"]["prepare"][1]["command"]
    _write_text(image / "Dockerfile", DOCKERFILE.format(python=python, begin=begin))
    for name, text in environment.files.items():
        _write_text(image / "packages" / name, text)
    before, after = (
        {path for path in _files_of(tree) if decides(path)} for tree in (made / "repo", release)
    )
    for path in after:
        (tests / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(release / path, tests / "files" / path, follow_symlinks=False)
    _write_text(tests / "removed", "".join(f"{path}\0" for path in sorted(before - after)))
    _write_text(tests / "wanted.json", json.dumps(config["fail_to_pass"] + config["pass_to_pass"]))
    for program in (Path(summary.__file__), RUN_PYTEST):
        shutil.copy(program, tests / program.name)
    obeyed = " -o ".join(f"-name {name}" for name in STARTUP_FILES)
    command = start_pytest(config["command"], f'"$tests/{RUN_PYTEST.name}"')
    _write_text(tests / "test.sh", TEST.format(obeyed=obeyed, command=command))
    _write_text(folder / "instruction.md", task["instruction"])
    fields: JSON = {
        "schema_version": "1.1",
        "metadata": facts,
        "agent": {"timeout_sec": float(budgets["agent_s"])},
        "verifier": {"timeout_sec": float(budgets["evaluate_s"])},
        "environment": {"build_timeout_sec": 900.0},
    }
    (folder / "task.toml").write_bytes(as_toml(fields))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def _files_of(tree: Path) -> Iterable[Path]:
    paths = (path for path in tree.rglob("*") if path.is_symlink() or not path.is_dir())
    return (path.relative_to(tree) for path in paths)
