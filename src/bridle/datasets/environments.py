"""Environments and builds of strangers' Python packages.

Build code and tests of a package run in a sandbox without network (`Bench`). What they need is
installed from outside by pip with the user's configuration, as wheels only, which run no code when
they are installed. An environment is made once for its requirements, and kept in the cache; its
lock names every version with its hash. `datasets.releases` is the caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bridle.config import RuntimeSpec, cache_dir
from bridle.errors import BridleError, ConfigError
from bridle.folders import exclusive
from bridle.runtimes import default_backend, opened
from bridle.runtimes.base import ExecResult, Runtime
from bridle.runtimes.process import Command, run_process
from bridle.types import JSON

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SAFE = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
PIP_S, BUILD_S = 600.0, 300.0
MOST_TEXT = 4 << 20
"""Bytes that are read of one file of a wheel."""
HOOK = """
import importlib, json, sys
hook, backend, paths, *arguments = sys.argv[1:]
sys.path[:0] = json.loads(paths)
module, _, name = backend.partition(":")
found = importlib.import_module(module)
for part in filter(None, name.split(".")):
    found = getattr(found, part)
call = getattr(found, hook, None)
print("\\n" + json.dumps(call(*arguments) if call else []))
"""
"""Calls a hook of PEP 517; its result is the last line."""


class Refused(BridleError):
    """A package or pair that gives no task; `cause` is the same for refusals of one kind."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Wheel:
    """A built wheel, as far as tasks need it."""

    name: str
    version: str
    requires: tuple[Requirement, ...]
    extras: frozenset[str]
    licence: str
    headers: str
    """Its metadata without the description."""
    entry_points: str
    files: frozenset[str]
    """Files that it installs into site-packages."""

    def needs(self, *extras: str) -> list[str]:
        """Return the wheel's requirements with some of its extras, for this Python, as pip takes
        them. Raises `Refused` for one that names a URL.
        """
        needed: dict[str, None] = {}
        for each in self.requires:
            marker = each.marker
            if marker is not None and not any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            if each.url is not None:
                raise Refused(
                    "environment", f"the requirement {each} names a URL, not a package on an index"
                )
            if canonicalize_name(each.name) == canonicalize_name(self.name):
                needed |= dict.fromkeys(self.needs(*(each.extras - set(extras))))
                continue
            named = f"[{','.join(sorted(each.extras))}]" if each.extras else ""
            needed[f"{each.name}{named}{each.specifier}"] = None
        return list(needed)


@dataclass(frozen=True, slots=True)
class VirtualEnvironment:
    """A virtual environment that sandboxes see read-only."""

    folder: Path
    lock: str
    """`requirements.txt` with a hash for each version."""
    files: Mapping[str, str] = field(default_factory=dict)
    """More files of its site-packages: path -> text."""

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


def safe_backend(wanted: str) -> str:
    """Return the runtime for code of unknown origin: `wanted`, or one that contains its programs.

    `ConfigError` where this machine has none and none was named.
    """
    if wanted != "auto":
        backend = wanted
    else:
        backend, reason = default_backend()
        if backend == "local":
            raise ConfigError(
                "source distributions are strangers' code, and no sandbox is available for their "
                f"build and tests ({reason}). Install bubblewrap, or accept it: --runtime local"
            )
    if backend not in ("bubblewrap", "local"):
        raise ConfigError(f"--runtime must be auto, bubblewrap or local, not {backend!r}")
    return backend


def runtime_fields(backend: str, environment: VirtualEnvironment | None) -> JSON:
    """Return the fields of a `RuntimeSpec` whose PATH begins with the Python of `environment`."""
    base = Path(sys.base_prefix)
    binds = [] if base.is_relative_to("/usr") else [str(base)]
    path = SYSTEM_PATH
    if environment is not None:
        binds.append(str(environment.folder))
        path = f"{environment.folder}/bin:{path}"
    fields: JSON = {"backend": backend, "env": {"PATH": path, **SAFE}}
    return fields | ({"kwargs": {"binds": binds}} if backend == "bubblewrap" else {})


@dataclass(frozen=True, slots=True)
class Bench:
    """The sandbox of other people's code, and the folder of the environments made for it."""

    backend: str

    def place(
        self, environment: VirtualEnvironment | None = None
    ) -> AbstractAsyncContextManager[Runtime]:
        """Open a fresh sandbox without network, with the Python of `environment` on its PATH."""
        fields = runtime_fields(self.backend, environment)
        spec = RuntimeSpec(**fields, network="open" if self.backend == "local" else "none")
        return opened(spec, "bench")

    async def wheel(self, tree: Path, package: str, version: Version) -> Wheel:
        """Build the wheel of a source tree, as PEP 517 says. Raises `Refused`."""
        backend, paths, requires = build_system(tree)
        arguments = (backend, json.dumps(paths))
        more = await self._hook(tree, requires, "get_requires_for_build_wheel", *arguments)
        requires += requirements_of(more)
        with tempfile.TemporaryDirectory(prefix="bridle-wheel-") as folder:
            target = Path(folder, "dist")
            await self._hook(tree, requires, "build_wheel", *arguments, "../dist", out=target)
            return await asyncio.to_thread(read_wheel, target, package, version)

    async def _hook(
        self, tree: Path, requires: Sequence[str], *words: str, out: Path | None = None
    ) -> Any:  # noqa: ANN401 - JSON of the hook
        environment = await make_environment(requires)
        async with self.place(environment) as runtime:
            await runtime.upload(tree, "source")
            await runtime.exec(["mkdir", "dist"])
            argv = [environment.python, "-P", "-c", HOOK, *words]
            result = await runtime.exec(argv, cwd="source", timeout_s=BUILD_S)
            await runtime.kill()
            if not result.ok:
                raise Refused("build", _reason(result, BUILD_S))
            if out is not None:
                await runtime.download("dist", out)
        try:
            return json.loads(last(result.stdout))
        except ValueError:
            return None


def build_system(tree: Path) -> tuple[str, list[str], list[str]]:
    """Return the build backend that a source tree's `pyproject.toml` names, its paths and
    requirements. Raises `Refused`.
    """
    table = read_pyproject(tree).get("build-system", {})
    paths = table.get("backend-path", []) if isinstance(table, dict) else None
    if not isinstance(paths, list):
        raise Refused(
            "build",
            "pyproject.toml: [build-system] does not have the form of PEP 517: backend-path must "
            "be a list",
        )
    requires = requirements_of(table.get("requires", ["setuptools"]))
    backend = table.get("build-backend", "setuptools.build_meta:__legacy__")
    return str(backend), [str(each) for each in paths], requires


def read_pyproject(tree: Path) -> JSON:
    """Return a source tree's `pyproject.toml`; empty where there is none. Raises `Refused`."""
    path = tree / "pyproject.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused("build", f"pyproject.toml cannot be read: {error}") from error


def requirements_of(asked: object) -> list[str]:
    """Return a package's list of requirements, each checked, for pip; `None` = none.

    Raises `Refused` for what pip should not be given.
    """
    if not isinstance(asked, list | None):
        raise Refused("environment", f"the requirements must be a list, not {asked!r:.80}")
    return [requirement(each) for each in asked or ()]


def requirement(text: object) -> str:
    """Return a requirement that pip finds on an index; `Refused` for any other text."""
    try:
        read = Requirement(str(text))
    except InvalidRequirement as error:
        raise Refused("environment", f"{text!r} is not a requirement: {error}") from error
    if read.url is not None:
        raise Refused(
            "environment", f"the requirement {text} names a URL, not a package on an index"
        )
    return str(read)


def read_wheel(folder: Path, package: str, version: Version) -> Wheel:
    """Read the metadata of the wheel in a folder, which untrusted code has written.

    Raises `Refused` if it is not pure Python, or another package or version.
    """
    path = next(folder.glob("*.whl"), None)
    if path is None:
        raise Refused("build", "the build of the package made no wheel")
    try:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            info = next(name for name in names if name.endswith(".dist-info/METADATA"))
            texts = {
                name: _text(wheel, f"{info.rpartition('/')[0]}/{name}")
                if f"{info.rpartition('/')[0]}/{name}" in names
                else ""
                for name in ("METADATA", "WHEEL", "entry_points.txt")
            }
    except (zipfile.BadZipFile, StopIteration, KeyError) as error:
        raise Refused(
            "build", f"{path.name}, which the build made, is not a readable wheel"
        ) from error
    if not path.stem.endswith("-none-any"):
        raise Refused("not pure Python", f"the wheel {path.name} is not for every platform")
    headers = texts["METADATA"].replace("\r\n", "\n").partition("\n\n")[0]
    fields = HeaderParser().parsestr(headers)
    try:
        requires = tuple(Requirement(each) for each in fields.get_all("Requires-Dist", ()))
        itself = canonicalize_name(str(fields["Name"])) == canonicalize_name(package)
        itself = itself and Version(str(fields["Version"])) == version
    except (InvalidRequirement, InvalidVersion) as error:
        raise Refused(
            "build", f"the metadata of the wheel {path.name} are invalid: {error}"
        ) from error
    if not itself:
        raise Refused(
            "build",
            f"the build made a wheel of {fields['Name']} {fields['Version']}, not of {package} "
            f"{version}",
        )
    return Wheel(
        name=package,
        version=str(version),
        requires=requires,
        extras=frozenset(fields.get_all("Provides-Extra", ())),
        licence=licence(fields),
        headers=headers,
        entry_points=texts["entry_points.txt"],
        files=frozenset(
            name for name in names if not name.partition("/")[0].endswith((".dist-info", ".data"))
        ),
    )


def licence(fields: Message) -> str:
    """Return the licence that metadata name; its SPDX expression, else classifiers, else free
    text.
    """
    prefix = "License :: "
    named = [each for each in fields.get_all("Classifier", ()) if each.startswith(prefix)]
    text = str(fields["License"] or "").strip().partition("\n")[0][:100]
    classified = "; ".join(each.rpartition(" :: ")[2] for each in named)
    return str(fields["License-Expression"] or classified or text or "unknown")


def _text(wheel: zipfile.ZipFile, name: str) -> str:
    with wheel.open(name) as file:
        return file.read(MOST_TEXT).decode(errors="replace")


async def make_environment(
    requirements: Sequence[str], files: Mapping[str, str] | None = None
) -> VirtualEnvironment:
    """Make a virtual environment with these requirements, and `files` in its site-packages.

    It is kept in the cache, and later calls return it. Raises `Refused` with pip's last error.
    """
    facts = [sys.version, sys.base_prefix, sorted(requirements), sorted((files or {}).items())]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    folder = cache_dir() / "environments" / key
    lock = folder / "requirements.lock"
    if not lock.exists():
        await asyncio.to_thread(folder.parent.mkdir, parents=True, exist_ok=True)
        async with exclusive(folder.with_name(f".{key}.lock")):
            if not lock.exists():
                await _fill(folder, requirements, files or {})
    return VirtualEnvironment(folder, lock.read_text(), files or {})


async def _fill(folder: Path, requirements: Sequence[str], files: Mapping[str, str]) -> None:
    """Make the environment anew; its lock, which says that it is whole, comes last."""
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    await host_python("-m", "venv", "--without-pip", "--symlinks", str(folder))
    locked = await _install(folder, requirements) if requirements else ""
    await asyncio.to_thread(_write_files, folder, files)
    (folder / "requirements.part").write_text(locked)
    (folder / "requirements.part").rename(folder / "requirements.lock")


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into an environment's site-packages."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name, text in files.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(text, encoding="utf-8")


async def _install(folder: Path, requirements: Sequence[str]) -> str:
    """Install wheels by one call of pip; return the lock of what it chose."""
    wanted, report = folder / "requirements.in", folder / "report.json"
    wanted.write_text("".join(f"{each}\n" for each in requirements))
    flags = ("--no-input", "--quiet", "--only-binary", ":all:", "--disable-pip-version-check")
    python = str(folder / "bin" / "python")
    words = ("pip", "--python", python, "install", *flags, "--report", str(report))
    await host_python("-m", *words, "-r", str(wanted))
    lines = []
    for each in json.loads(report.read_text())["install"]:
        name, version = each["metadata"]["name"], each["metadata"]["version"]
        hashes = each["download_info"]["archive_info"]["hashes"]
        lines.append(f"{name}=={version} --hash=sha256:{hashes['sha256']}\n")
    return "".join(sorted(lines, key=str.lower))


async def host_python(*words: str) -> bytes:
    """Run Bridle's own Python with these arguments and return its stdout.

    Raises `Refused` if it fails, `ConfigError` if it has no pip.
    """
    command = Command((sys.executable, *words), cwd="/", env=dict(os.environ), timeout_s=PIP_S)
    result = await run_process(command)
    if not result.ok:
        if b"No module named pip" in result.stderr:
            raise ConfigError(f"{sys.executable} has no pip: run {sys.executable} -m ensurepip")
        raise Refused("environment", _reason(result, PIP_S))
    return result.stdout


def _reason(result: ExecResult, limit_s: float) -> str:
    """Return why a command failed: its time, or its own last word."""
    if result.timed_out:
        return f"it took more than {limit_s:g} s"
    return last_line(result.stderr) or f"it ended with code {result.exit_code}"


def last_line(said: bytes) -> str:
    """Return the last error line of pip's output, or its last line that is not empty."""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1].strip()[:300]


def last(said: bytes) -> bytes:
    """Return the last line of output."""
    return said.strip().rpartition(b"\n")[2]
