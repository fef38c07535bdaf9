"""Tasks from releases: two following source distributions of a package -> one SWE task.

The older one is the repository; what the newer one changed in the package is the reference patch;
its tests decide. Tests that pass only with the reference patch are `FAIL_TO_PASS`, those that pass
with and without it `PASS_TO_PASS`. The statement is made of the newer one's change notes. No
container, hub or repository host takes part; packages come through pip (`sources`), and their build
and tests run in sandboxes (`environments`).

A task is a folder: `task.json` for evaluator `test_on_output`, `repo/`, the reference patch with
the script that applies it (harness `oracle`), and the lock of its environment; on request it is
written as a Harbor folder too (`harbor`). What gives no task is `Refused` with a cause.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bridle.datasets.environments import (
    Bench,
    Refused,
    VirtualEnvironment,
    Wheel,
    host_python,
    last,
    make_environment,
    read_pyproject,
    requirement,
    runtime_fields,
)
from bridle.datasets.harbor import write_harbor
from bridle.errors import ConfigError
from bridle.evaluators.patch import DIFF, GIT, PATCH_LIMIT, files_of
from bridle.evaluators.summary import from_summary
from bridle.runtimes.base import ExecResult, Runtime
from bridle.runtimes.files import safe_entry
from bridle.types import JSON

Hint = Literal["none", "tests", "notes"]
SOURCES = Path(__file__).with_name("sources.py")
BEGIN = (
    "git init -q . && git add -A -f . && "
    "git -c user.name=bridle -c user.email=bridle@localhost commit -q -m 'The release before'"
)
"""Makes the repository of a task of its files."""
NOTES: Final = re.compile(r"(?i)(changes|changelog|history|news|release[-_ ]?notes)(\.\w+)?")
RUNNER: Final = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg"}
    | {"pyproject.toml"}
)
"""Files that set how tests run; they go with the tests."""
GROUPS: Final = (("test", "tests", "testing"), ("dev", "develop", "development"))
"""Names of extras and dependency groups with what tests need; the second only without the first."""
REQUIREMENT_FILES: Final = ("*test*requirements*.txt", "*requirements*test*.txt")
CHANGED_LINES: Final = (3, 400)
"""Fewest and most changed code lines of a reference patch."""
KEEP_PASSING: Final = 5
"""Fewest tests that pass before and after."""
ALIKE: Final = 0.8
"""Share of common changed lines from which two patches are the same change."""
MOST_TREE: Final = (20_000, 256 << 20)
"""Entries and bytes of an unpacked source distribution."""
OLDEST: Final = 315_619_200
"""1980, in seconds."""
TESTS_S: Final = 300.0
NAMED_TESTS, NOTES_CHARS = 50, 8000


@dataclass(frozen=True, slots=True)
class Source:
    """A source distribution on an index."""

    package: str
    version: Version
    file: str


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of a release, by kind of file."""

    source: str
    """The reference patch."""
    tests: str
    """Tests, and what sets how they run."""
    test_files: tuple[str, ...]
    lines: frozenset[str]
    """Changed code lines of the source."""


@dataclass(frozen=True, slots=True)
class Made:
    """A task that was made."""

    folder: Path
    task: JSON


@dataclass(slots=True)
class Maker:
    """Makes tasks of pairs and remembers the kept changes, for near-duplicates."""

    out: Path
    hint: Hint
    bench: Bench
    say: Callable[[str], None]
    harbor: Path | None = None
    """Folder for the same tasks as Harbor folders; `None` = they are not written."""
    kept: list[tuple[str, Change]] = field(default_factory=list)

    async def make(self, older: Source, newer: Source) -> Made:
        """Make the task of a pair of releases, as a folder. Raises `Refused`."""
        pair = f"{older.package} {older.version}..{newer.version}"
        name = f"{canonicalize_name(older.package)}-{older.version}-{newer.version}"
        with tempfile.TemporaryDirectory(prefix="bridle-releases-") as scratch:
            self.say(f"{pair}: fetching")
            (base, base_sum), (release, release_sum) = [
                await fetch(each, Path(scratch, part))
                for each, part in ((older, "base"), (newer, "release"))
            ]
            if not any(is_test(path.relative_to(release)) for path in release.rglob("*.py")):
                raise Refused("no tests", f"{newer.file} has no test files")
            notes = change_notes(base, release)
            if self.hint == "notes" and not notes:
                raise Refused("no change notes", "the change notes of the release say nothing new")
            self.say(f"{pair}: building")
            diff = await self._diff(base, release)
            if not any(is_test(PurePosixPath(path)) for path, _ in files_of(diff)):
                raise Refused("unchanged tests")
            older_wheel = await self.bench.wheel(base, older.package, older.version)
            wheels = older_wheel, await self.bench.wheel(release, newer.package, newer.version)
            root = source_root(release, wheels[1])
            change = divide(diff, root, wheels[0].files | wheels[1].files)
            self._check(change, (older.version, newer.version))
            self.say(f"{pair}: installing its environment")
            environment = await self._environment(release, wheels, root)
            self.say(f"{pair}: running its tests")
            command = command_of_tests(root, release)
            found = await self._outcomes(base, change, environment, command)
            task = self._task(name, wheels, change, found, environment, command)
            task["instruction"] = statement(self.hint, wheels, found.fail, notes)
            task["metadata"]["sha256"] = [base_sum, release_sum]
            self.kept.append((name, change))
            folder = self._write(name, task, change, base, environment)
            if self.harbor is not None:
                write_harbor(folder, self.harbor / name, release, environment, decides)
            return Made(folder, task)

    async def _diff(self, base: Path, release: Path) -> str:
        """Return both trees compared by git, in a sandbox: git obeys files of a tree."""
        async with self.bench.place() as runtime:
            await runtime.upload(base, "base")
            await runtime.upload(release, "release")
            await _done(runtime, BEGIN, cwd="base")
            words = [*GIT, "--git-dir", "base/.git", "--work-tree", "release"]
            await _done(runtime, [*words, "add", "-A", "-f", "."])
            result = await _done(runtime, [*words, "diff", *DIFF, "HEAD"])
            return result.stdout.decode(errors="surrogateescape")

    def _check(self, change: Change, versions: tuple[Version, Version]) -> None:
        """Refuse what is no work, too much work, or the same work again."""
        if not change.source or not without_versions(change.lines, versions):
            raise Refused(
                "version bump", "the release changes no line of code but its own version number"
            )
        count, (fewest, most) = len(change.lines), CHANGED_LINES
        if not fewest <= count <= most:
            raise Refused(
                "size of the change",
                f"the release changes {count} lines of code; {fewest} to {most} are taken",
            )
        for other, kept in self.kept:
            common = len(kept.lines & change.lines) / len(kept.lines | change.lines)
            if common >= ALIKE:
                raise Refused(
                    "near-duplicate",
                    f"{common:.0%} of the lines that it or the task {other} changes are changed by "
                    "both, and that task is kept",
                )

    async def _environment(
        self, release: Path, wheels: tuple[Wheel, Wheel], root: str
    ) -> VirtualEnvironment:
        """Install what the release and its tests need, and the base's metadata for the package."""
        base, newer = wheels
        info = f"{canonicalize_name(base.name).replace('-', '_')}-{base.version}.dist-info"
        files = {
            "_repository.pth": str(PurePosixPath("/work", root)) + "\n",
            f"{info}/METADATA": base.headers + "\n",
            f"{info}/entry_points.txt": base.entry_points,
        }
        environment = await make_environment(requirements_of_tests(release, newer), files)
        if brings(environment.lock, base.name):
            raise Refused(
                "environment",
                f"the requirements of the tests install another release of {base.name} itself",
            )
        return environment

    async def _outcomes(
        self, base: Path, change: Change, environment: VirtualEnvironment, command: str
    ) -> Outcomes:
        """Run the tests without and, twice, with the reference patch."""
        began = time.monotonic()
        statuses = [
            await self._statuses(base, patches, environment, command)
            for patches in ([change.tests], *[[change.source, change.tests]] * 2)
        ]
        return outcomes(*statuses, seconds=(time.monotonic() - began) / 3)

    async def _statuses(
        self, base: Path, patches: Sequence[str], environment: VirtualEnvironment, command: str
    ) -> dict[str, str]:
        async with self.bench.place(environment) as runtime:
            await runtime.upload(base, ".")
            await _done(runtime, BEGIN)
            for patch in filter(None, patches):
                text = patch.encode(errors="surrogateescape")
                await _done(runtime, [*GIT, "apply", "--whitespace=nowarn", "-"], stdin=text)
            result = await runtime.exec(command, timeout_s=TESTS_S, output_limit=PATCH_LIMIT)
            if result.timed_out:
                raise Refused("slow tests", f"the tests take more than {TESTS_S:.0f} s")
            said = result.stdout.decode(errors="replace")
            statuses = from_summary(said)
            if not statuses:
                lines = (result.stderr.decode(errors="replace") or said).strip().splitlines()
                said = lines[-1][:300] if lines else "no output"
                raise Refused("tests do not run", f"the run reported no result of a test: {said}")
            return statuses

    def _task(
        self,
        name: str,
        wheels: tuple[Wheel, Wheel],
        change: Change,
        found: Outcomes,
        environment: VirtualEnvironment,
        command: str,
    ) -> JSON:
        """Return the fields of the task, without its instruction."""
        base, release = wheels
        limit = round(max(60.0, 4 * found.seconds))
        return {
            "task_id": name,
            "runtime": {
                **runtime_fields(self.bench.backend, environment),
                "prepare": [
                    {"type": "upload_dir", "source": "repo", "target": "."},
                    {"type": "exec", "command": BEGIN},
                ],
            },
            "budgets": {"agent_s": 1800, "evaluate_s": limit + 60},
            "evaluator": {
                "strategy": "test_on_output",
                "config": {
                    "command": command,
                    "fail_to_pass": list(found.fail),
                    "pass_to_pass": list(found.keep),
                    "exclude": [*change.test_files, "*.pyc", "*/.pytest_cache/*"],
                    "test_patch": change.tests,
                    "timeout_s": limit,
                },
            },
            "metadata": {
                "package": base.name,
                "base": base.version,
                "release": release.version,
                "licence": release.licence,
                "python": sys.version.split()[0],
                "hint": self.hint,
                "changed_lines": len(change.lines),
                "flaky": list(found.flaky),
            },
        }

    def _write(
        self, name: str, task: JSON, change: Change, base: Path, environment: VirtualEnvironment
    ) -> Path:
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "solution").mkdir(parents=True)
        shutil.copytree(base, folder / "repo", symlinks=True)
        patch = change.source.encode(errors="surrogateescape")
        (folder / "solution" / "reference.patch").write_bytes(patch)
        script = '#!/bin/sh\ngit apply --whitespace=nowarn "$(dirname "$0")/reference.patch"\n'
        (folder / "solution" / "solve.sh").write_text(script)
        (folder / "requirements.lock").write_text(environment.lock)
        (folder / "task.json").write_text(json.dumps(task, indent=1) + "\n")
        return folder


# ---- pairs and their files


async def pairs(wanted: str) -> list[tuple[Source, Source]]:
    """Return the pairs of successive releases that `PACKAGE` or `PACKAGE==A..B` stands for, newest
    first.

    Pre-releases and withdrawn releases are passed over, unless they are A or B. Raises
    `ConfigError` for another form, for versions without a source distribution, and where pip cannot
    list the releases.
    """
    package, ends = parse_wanted(wanted)
    try:
        listed = json.loads(last(await host_python("-P", str(SOURCES), package)))["sources"]
    except Refused as error:
        raise ConfigError(f"pip cannot list the releases of {package}: {error.detail}") from error
    known: dict[Version, Source] = {}
    for each in listed:
        version = Version(each["version"])
        plain = not (version.is_prerelease or each["yanked"])
        if each["file"].endswith(".tar.gz") and (plain or version in ends):
            known[version] = Source(package, version, each["file"])
    for end in ends:
        if end not in known:
            raise ConfigError(
                f"{wanted}: the package index has no source distribution (.tar.gz) of {package} "
                f"{end}"
            )
    within = sorted(v for v in known if not ends or ends[0] <= v <= ends[1])
    return [(known[a], known[b]) for a, b in pairwise(within)][::-1]


def parse_wanted(wanted: str) -> tuple[str, tuple[Version, ...]]:
    """Return the package and, if given, the first and last version of `PACKAGE==A..B`.

    Raises `ConfigError`.
    """
    package, equals, given = wanted.partition("==")
    try:
        ends = tuple(Version(each) for each in given.split("..")) if equals else ()
        right = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", package) and len(ends) in (0, 2)
    except InvalidVersion:
        right = None
    if not right or (ends and ends[0] >= ends[1]):
        raise ConfigError(f"{wanted!r} must be PACKAGE or PACKAGE==A..B, with A before B")
    return package, ends


async def fetch(source: Source, folder: Path) -> tuple[Path, str]:
    """Download and unpack a source distribution into `folder`; return its tree and its SHA-256.

    Raises `Refused`.
    """
    words = ("-P", str(SOURCES), source.package, source.file, str(folder))
    digest = json.loads(last(await host_python(*words)))["sha256"]
    return await asyncio.to_thread(unpack, folder / source.file), digest


def unpack(archive: Path) -> Path:
    """Unpack an archive beside itself, and return the one folder in it. Raises `Refused`."""
    target = archive.parent / "tree"
    entries, size = MOST_TREE
    too_much = Refused("source distribution", "it has too many files or bytes")
    try:
        with gzip.open(archive) as stream:  # an entry's head is read whole, whatever its size
            while stream.read(1 << 20):
                if stream.tell() > 2 * size:
                    raise too_much
        with tarfile.open(archive, "r:gz") as tar:
            for count, entry in enumerate(tar, 1):
                size -= entry.size
                if count > entries or size < 0:
                    raise too_much
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(target, filter=_dated)  # noqa: S202 - the filter leaves out what leads elsewhere
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Refused("source distribution", str(error)) from error
    tops = [each for each in target.iterdir() if each.is_dir() and not each.is_symlink()]
    if len(tops) != 1:
        raise Refused(
            "source distribution", f"the archive has {len(tops)} folders at its top, not one"
        )
    return tops[0]


def _dated(entry: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return an entry with a time that a wheel can hold. `Refused` for what leads elsewhere."""
    found = safe_entry(entry, folder)
    if found is None:
        raise Refused(
            "source distribution",
            f"the archive's entry {entry.name[:200]!r} leads out of its folder",
        )
    return found.replace(mtime=max(entry.mtime, OLDEST))


def change_notes(base: Path, release: Path) -> str:
    """Return the lines that the newer release added to its change logs; empty = none with words."""
    added: list[str] = []
    for path in sorted([*release.glob("*"), *release.glob("doc*/*")]):
        if NOTES.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            before = base / path.relative_to(release)
            old = before.read_text(errors="replace").splitlines() if before.is_file() else []
            seen = {line.strip() for line in old}
            lines = path.read_text(errors="replace").splitlines()
            added += [line for line in lines if not line.strip() or line.strip() not in seen]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(added)).strip()
    return text if re.search(r"[A-Za-z]{3}", text) else ""


# ---- the change


def is_test(path: PurePosixPath | Path) -> bool:
    """Return whether a path is that of a test, by the names of its folders and its file."""
    inside = {"test", "tests"} & set(path.parts[:-1])
    return bool(inside) or path.name.startswith("test_") or path.name.endswith("_test.py")


def decides(path: PurePosixPath | Path) -> bool:
    """Return whether a path belongs to the tests, or configures how they run."""
    return is_test(path) or path.name in RUNNER


def source_root(tree: Path, wheel: Wheel) -> str:
    """Return the folder of a tree whose files the wheel installs as they are. Raises `Refused`."""
    modules = [name for name in wheel.files if name.endswith(".py")]
    tops = (path.name for path in sorted(tree.glob("[A-Za-z]*")) if path.is_dir())
    tops = (name for name in tops if re.fullmatch(r"[\w.-]+", name))
    for root in (".", "src", "lib", *tops):
        if modules and all((tree / root / name).is_file() for name in modules):
            return root
    raise Refused("layout", "the wheel has modules that are not in the source tree as they are")


def divide(diff: str, root: str, installed: Iterable[str]) -> Change:
    """Return a diff's changes to the source and to the tests; those to other files are left out.

    `installed` are the paths of both wheels below `root`; they make up the source. Raises `Refused`
    for tests that are not UTF-8.
    """
    shipped = {str(PurePosixPath(root, name)) for name in installed}
    source, tests, files, lines = [], [], [], set()
    for path, text in files_of(diff):
        pure = PurePosixPath(path)
        if decides(pure):
            tests.append(text)
            files.append(path)
        elif path in shipped:
            source.append(text)
            lines |= code_lines(text) if path.endswith(".py") else set()
    try:
        "".join(tests).encode()
    except UnicodeEncodeError as error:
        raise Refused("encoding", "the release's changes to its tests are not UTF-8") from error
    return Change("".join(source), "".join(tests), tuple(files), frozenset(lines))


def code_lines(patch: str) -> set[str]:
    """Return the changed lines of a patch, with `+` or `-`, without empty lines and comments."""
    changed = re.findall(r"(?m)^([+-])(?!(?:\+\+|--) )[ \t]*([^\s#].*?)\s*$", patch)
    return {sign + text for sign, text in changed}


def without_versions(lines: Iterable[str], versions: Sequence[Version]) -> set[str]:
    """Return those lines that contain none of the version numbers, in whatever spelling."""
    forms = {str(version) for version in versions}
    forms |= {", ".join(map(str, version.release)) for version in versions}
    return {line for line in lines if not any(form in line for form in forms)}


# ---- the tests


def requirements_of_tests(tree: Path, wheel: Wheel) -> list[str]:
    """Return the requirements of a package and its tests, from extras, dependency groups or
    files.
    """
    listed = read_pyproject(tree).get("dependency-groups")
    groups = listed if isinstance(listed, dict) else {}
    needed = dict.fromkeys(["pytest", *wheel.needs()])
    for names in GROUPS:
        found = dict.fromkeys(wheel.needs(*(wheel.extras & set(names))))
        for name in names:
            found |= dict.fromkeys(group_requirements(groups, name))
        if names is GROUPS[0]:
            for file in (path for glob in REQUIREMENT_FILES for path in tree.rglob(glob)):
                found |= dict.fromkeys(file_requirements(file))
        if found.keys() - needed.keys():
            return list(needed | found)
    return list(needed)


def brings(lock: str, package: str) -> bool:
    """Return whether a lock file names the package, so that its newer version would be installed,
    too.
    """
    names = (canonicalize_name(line.partition("==")[0]) for line in lock.splitlines())
    return canonicalize_name(package) in names


def group_requirements(groups: Mapping[str, object], name: str, depth: int = 8) -> list[str]:
    """Return the requirements of a dependency group (PEP 735) and of those that it includes."""
    found: list[str] = []
    listed = groups.get(name, ())
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, str):
            found += applying(each)
        elif isinstance(each, dict) and depth:
            found += group_requirements(groups, str(each.get("include-group")), depth - 1)
    return found


def file_requirements(path: Path) -> list[str]:
    """Return the requirements in a requirements file; options, paths and URLs are left out."""
    if path.is_symlink() or not path.is_file():
        return []
    found: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found += applying(line.partition(" #")[0].strip())
        except (InvalidRequirement, Refused):
            continue
    return found


def applying(text: str) -> list[str]:
    """Return a requirement without its marker if the marker holds for this Python, else no
    requirement.
    """
    read = Requirement(requirement(text))
    if read.marker is not None and not read.marker.evaluate({"extra": ""}):
        return []
    read.marker = None
    return [str(read)]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Tests of a task by what they show."""

    fail: tuple[str, ...]
    """They pass only with the reference patch."""
    keep: tuple[str, ...]
    """They pass with and without."""
    flaky: tuple[str, ...]
    seconds: float


def outcomes(
    before: Mapping[str, str], after: Mapping[str, str], again: Mapping[str, str], *, seconds: float
) -> Outcomes:
    """Compare test results before the reference patch (`before`), after it, and in a repeated run.

    Returns the tests that the patch fixes, those that keep passing, and the flaky ones. Raises
    `Refused` where the patch fixes no test, or too few keep passing.
    """
    flaky = sorted(name for name in {*after, *again} if after.get(name) != again.get(name))
    passed = [name for name in after if after[name] == "passed" and name not in flaky]
    fail = tuple(sorted(name for name in passed if before.get(name) != "passed"))
    keep = tuple(sorted(name for name in passed if before.get(name) == "passed"))
    if not fail:
        raise Refused(
            "no failing test",
            "every test that passes on the release also passes on the version before it",
        )
    if len(keep) < KEEP_PASSING:
        raise Refused(
            "few passing tests",
            f"only {len(keep)} tests pass both before and after the change; at least "
            f"{KEEP_PASSING} must",
        )
    return Outcomes(fail, keep, tuple(flaky), seconds)


def command_of_tests(root: str, tree: Path) -> str:
    """Return the bash line that runs all tests of a tree."""
    places: dict[str, None] = {}
    for path in sorted(tree.rglob("*.py")):
        inside = path.relative_to(tree)
        if is_test(inside):
            parts = inside.parts[:-1]
            index = next((n for n, part in enumerate(parts) if part in ("test", "tests")), None)
            place = inside if index is None else PurePosixPath(*parts[: index + 1])
            places[str(place)] = None
    flags = (
        "-rA --tb=short --color=no -p no:cacheprovider -o addopts= --continue-on-collection-errors"
    )
    named = " ".join(f"'{place}'" for place in places if "'" not in place)
    return f'PYTHONPATH="$PWD/{root}" python -m pytest {flags} {named}'


def statement(hint: Hint, wheels: tuple[Wheel, Wheel], fail: Sequence[str], notes: str) -> str:
    """Return the task's statement at a level of hints: at `none` the versions, at `tests` also the
    failing tests, at `notes` also the change notes.
    """
    base, release = wheels
    summary = (
        f"The repository in the current folder is the Python package {base.name}, version "
        f"{base.version}. Change the package so that it behaves as version {release.version} does. "
        "Hidden tests of that version decide; change no tests. Run tests with `python -m pytest`; "
        "what they need is installed, and there is no network."
    )
    parts = [summary]
    if hint == "notes":
        parts.append(f"Notes on version {release.version}:\n\n{notes[:NOTES_CHARS]}")
    if hint != "none":
        listed = "\n".join(f"- {name}" for name in fail[:NAMED_TESTS])
        more = len(fail) - NAMED_TESTS
        listed += f"\n- and {more} more" if more > 0 else ""
        parts.append(f"Tests that must pass and do not yet:\n\n{listed}")
    return "\n\n".join(parts) + "\n"


async def _done(
    runtime: Runtime,
    command: str | Sequence[str],
    *,
    cwd: str | None = None,
    stdin: bytes | None = None,
) -> ExecResult:
    """Run a command of ours that must succeed."""
    result = await runtime.exec(
        command, cwd=cwd, stdin=stdin, timeout_s=TESTS_S, output_limit=PATCH_LIMIT
    )
    if not result.ok or result.truncated:
        said = result.stderr.decode(errors="replace").strip()[-300:]
        raise Refused(
            "source distribution",
            f"git failed on the package's files: {said or 'the diff is too large'}",
        )
    return result
