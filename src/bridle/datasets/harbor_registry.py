"""Harbor registries -> the task folders of a set, by its name and version.

A registry is a JSON list of sets, each with `name`, `version` and `tasks`; a task has a `name`, the
`path` of its folder, and `git_url` with `git_commit_id` where the folder lies in a repository
(`harbor.models.registry` of the package harbor). A path without a repository is relative to the
registry's file. Of a repository one commit is fetched by `git`, once, into the cache; its symbolic
links become plain files, so that none leads to a file of this machine.

`FILE.json:NAME[@VERSION]` names a set. The version may be left out if the set has one alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from bridle.config import cache_dir, explain
from bridle.errors import ConfigError
from bridle.folders import private_folder

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
    """Return the task folders of `FILE.json:NAME[@VERSION]`, in the registry's order.

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
        raise explain(error, f"{file}: no registry of Harbor") from None
    same = [each for each in sets if each.name == name]
    if not same:
        names = sorted({each.name for each in sets})
        raise ConfigError(f"{file}: no set {name!r}{_meant(name, names)}; known: {names}")
    versions = [each.version for each in same]
    if version is None and len(same) > 1:
        raise ConfigError(f"{file}: set {name!r} has versions {versions}: write {name}@VERSION")
    wanted = versions[0] if version is None else version
    if wanted not in versions:
        message = f"{file}: set {name!r} has no version {wanted!r}"
        raise ConfigError(f"{message}{_meant(wanted, versions)}; known: {versions}")
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
            message = f"path {str(task.path)!r} leads out of its repository"
            raise ConfigError(f"{where}: task {task.name!r}: {message}")
    if not folder.is_dir():
        raise ConfigError(f"{where}: task {task.name!r}: no such folder: {folder}")
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
            raise ConfigError(f"{where}: cannot keep {url}: {error}") from error
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
