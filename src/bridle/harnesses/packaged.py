"""The base of harnesses that come from PyPI or npm: settings, bundle, and a version of the user's.

`AgentSpec.version` may name another version than the pinned one. It is installed by the same recipe
without the lock, is recorded as `<version> (unlocked)`, and does one scripted piece of work
(`bridle harness check`) before any session; its bundle contains the report. Version `image` is the
program on the runtime's PATH: nothing is installed, and the user checks it in the image.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

from bridle.config import AgentSpec
from bridle.errors import ConfigError, HarnessError
from bridle.harness_rules.table import HARNESS_RULES
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
from bridle.harnesses.installers import NODE, PYTHON, Setup, find_python, node_recipe, python_recipe
from bridle.runtimes.process import Command, run_process
from bridle.types import JSON, Cause, Dialect

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
    """A program of the Python package index. `links` are those of `installers.python_recipe`."""

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
        return (PYTHON,)

    async def recipe(self, name: str, version: str, pinned: str) -> Recipe:
        """Raises `HarnessError` where this machine has no Python that fits."""
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
    """A program of npm. `setup` and `whole_lock` are those of `installers.node_recipe`."""

    size_mb: int
    path: str
    """Path of the program in the bundle; the bundle's node runs one that is JavaScript."""
    command: str
    """Its name on PATH where an image brings it."""
    setup: Setup | None = None
    whole_lock: bool = True

    @property
    def program(self) -> tuple[str, ...]:
        return (NODE, self.path) if self.path.endswith((".js", ".mjs")) else (self.path,)

    async def recipe(self, name: str, version: str, pinned: str) -> Recipe:
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
        """Build the bundle; see `base.Harness`. An unlocked version is checked once."""
        if self._wanted == IMAGE:
            return None
        recipe = await self.package.recipe(self.name, self._wanted, self.pinned)
        folder = await ensure(recipe, bundles, report)
        unchecked = self._wanted != self.pinned and not (folder / CHECK_FILE).is_file()
        if unchecked and CHECKING not in os.environ:
            await self._check(folder, report)
        return folder

    def exit_cause(self, exit_code: int | None, signal: int | None, stdout: bytes) -> Cause | None:
        if signal is None and self.model_failed(stdout):
            return Cause.HARNESS_MODEL_ERROR
        return crash(exit_code, signal)

    def model_failed(self, stdout: bytes) -> bool:
        """Return whether the program says that the model's API failed, whatever its exit code."""
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
            raise HarnessError(f"{builder.label}: its check failed: {error}") from None
        if not found["works"]:
            raise HarnessError(
                f"{builder.label}: does not work with Bridle as version {self.pinned} does: "
                f"{found['status']}, {found['cause']}: {found['error']}"
            )
        unknown = found["unknown to the gateway"]
        builder.say(f"works; fields that the gateway does not know: {unknown or 'none'}")
        (folder / CHECK_FILE).write_text(json.dumps(found))
