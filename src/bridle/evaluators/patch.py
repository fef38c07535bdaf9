"""The `test_on_output` and `swebench` evaluators: the agent's patch is tested somewhere clean.

The difference between the session's work folder and its beginning is taken as a patch and applied
in a fresh runtime, where nothing else of the session exists. It is made in the fresh runtime, by
its repository's git and settings, on a copy of the agent's files without any `.git`. A session
began with what the fresh runtime begins with; with its commit, where `eval_prepare` steps (hidden
tests) are done in it first.

`test_on_output` filters the patch by path, so that an agent's changes to tests, or its own helpers,
stay out. Then the tests run: those of `fail_to_pass` must pass, those of `pass_to_pass` must still
pass. Results are read from a JUnit file, or from the summary that `pytest -rA` prints last. A test
counts if the runner reports it as passed, never as anything else, and ends its report. A run that
ends with an error and names no failed test is the evaluator's failure.

`swebench` runs an instance's own script, and the package `swebench` reads its log. An instance
without a script is one of SWE-smith, and package `swesmith` has its script. A package (`swebench`
5.0 or later) is needed only here; it brings much with it, so its functions are called in a process
of their own, with this Python or with the one that `config.python` names. What it calls a failure
of the environment is the evaluator's failure; a log without results is otherwise what the package
says it is, an instance that is not resolved. A session that changed nothing is worth 0.0, as the
package counts it.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Self
from xml.etree import ElementTree as ET

import orjson
from pydantic import Field, model_validator

from bridle.config import Settings
from bridle.errors import EvaluatorError, install_extra
from bridle.evaluators.base import (
    LATE,
    OBEYED,
    CheckerFailure,
    Configured,
    Evaluation,
    EvaluationContext,
    Unscorable,
    read_file,
    with_own_pytest,
)
from bridle.evaluators.command import TAIL_CHARS
from bridle.evaluators.summary import from_summary, lines_of_summary
from bridle.runtimes.base import ExecResult, Runtime
from bridle.runtimes.files import is_folder_in, replace_tree
from bridle.runtimes.process import Command, run_process
from bridle.types import JSON

GIT = ("git", "-c", "safe.directory=*", "-c", "core.quotePath=false", "-c", "core.fsmonitor=")
DIFF = (
    *("--cached", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
PATCH_LIMIT = 32 << 20
"""Bytes; a larger patch is no work of an agent's."""


class TestOnOutputSettings(Settings):
    """Config of evaluator `test_on_output`."""

    command: str = Field(min_length=1)
    """Bash line that runs the tests, in `repo`."""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    expected: dict[str, str] = Field(default_factory=dict)
    """Test -> status, in place of the two above: exactly what lines `PASSED name` of the output,
    wherever they stand, must say. Code under test can print such lines, too."""
    repo: str = "."
    """The repository, relative to the work folder."""
    tested: str | None = None
    """The repository that is patched and tested in the fresh runtime; `None` = `repo`."""
    base: str | None = None
    """A tree that a session began with; `None` = what the fresh runtime begins with, or its commit
    where the task has `eval_prepare` steps."""
    include: tuple[str, ...] = ("*",)
    """Paths of the patch that are kept, as shell patterns (`*` also crosses folders)."""
    exclude: tuple[str, ...] = ()
    """Paths that are dropped even so."""
    junit: str | None = None
    """JUnit file that the tests write, relative to `repo`; its tests are `classname::name`."""
    test_patch: str = ""
    """A patch of tests, applied after the agent's; name its files in `exclude`."""
    partial: bool = False
    """Reward the share of named tests that pass, instead of all or nothing."""
    timeout_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _names_tests(self) -> Self:
        if bool(self.fail_to_pass) == bool(self.expected):
            raise ValueError("give either fail_to_pass or expected, and not both")
        return self


@dataclass(frozen=True, slots=True)
class Patch:
    """A difference, filtered."""

    text: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


class TestOnOutput(Configured[TestOnOutputSettings]):
    """Implements `base.Evaluator`."""

    strategy = "test_on_output"
    settings_class = TestOnOutputSettings
    submittable = (
        "command fail_to_pass pass_to_pass expected repo tested base include exclude "
        "junit test_patch partial timeout_s"
    )
    __test__ = False
    prewarm = True

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Apply the agent's patch to a fresh repository and run the tests; output to
        `evaluator.log`.

        Raises `EvaluatorError`.
        """
        settings = self._settings
        async with context.places.fresh() as fresh:
            taken = await take_patch(context, fresh, settings.repo, settings.base)
            patch = filter_patch(taken, settings.include, settings.exclude)
            repo = settings.tested or settings.repo
            if patch.text:
                await apply_patch(fresh, repo, patch.text)
            if settings.test_patch:
                await _apply(fresh, repo, settings.test_patch)
            if settings.junit is not None:
                await fresh.exec(["rm", "-rf", "--", settings.junit], cwd=repo)
            result = await fresh.exec(
                await with_own_pytest(fresh, settings.command),
                cwd=repo,
                env=context.task.evaluator.env,
                timeout_s=settings.timeout_s,
                output_limit=PATCH_LIMIT,
                log=context.logs / "evaluator.log",
            )
            await fresh.kill()
            statuses = await self._statuses(fresh, result, repo)
        wanted = (*settings.fail_to_pass, *settings.pass_to_pass) or tuple(settings.expected)
        passed = [name for name in wanted if statuses.get(name) == "passed"]
        missed = [name for name in wanted if statuses.get(name) != "passed"]
        reward = len(passed) / len(wanted) if settings.partial else float(not missed)
        if settings.expected:
            reward = float(self._are_expected(statuses, result))
        return Evaluation(
            reward,
            metadata={
                "passed": passed,
                "not_passed": {name: statuses.get(name, "not run") for name in missed},
                "changed": list(patch.kept),
                "dropped": list(patch.dropped),
                "patch": patch.text[:TAIL_CHARS],
            },
        )

    def _are_expected(self, statuses: Mapping[str, str], result: ExecResult) -> bool:
        """Compare what was said; a command whose tests are all to pass must also end well."""
        expected = {name: status.lower() for name, status in self._settings.expected.items()}
        ends_well = result.exit_code == 0 or set(expected.values()) != {"passed"}
        return statuses == expected and ends_well

    async def _statuses(self, runtime: Runtime, result: ExecResult, repo: str) -> Mapping[str, str]:
        said = (result.stdout + result.stderr).decode(errors="replace")
        if result.timed_out or result.exit_code is None:
            late = f"{LATE} {self._settings.timeout_s} s"
            how = late if result.timed_out else f"were ended by {result.signal}"
            raise CheckerFailure(f"the tests gave no results: they {how}", said[-TAIL_CHARS:])
        if self._settings.expected:
            return lines_of_summary(said)
        junit = self._settings.junit
        if junit is None:
            statuses = from_summary(said)
        else:
            path = f"{repo}/{junit}"
            statuses = from_junit(await read_file(runtime, path, f"the tests left no {path}"))
        if result.exit_code != 0 and not {"failed", "error"} & set(statuses.values()):
            way = f"the tests ended with code {result.exit_code} and name no failure"
            raise CheckerFailure(way, said[-TAIL_CHARS:])
        return statuses


async def take_patch(
    context: EvaluationContext, fresh: Runtime, repo: str, base: str | None
) -> str:
    """Return the patch from the git tree `base` to the agent's repository, new files included.

    Files that git ignores are left out. `base=None` = the tree of the fresh work folder, since
    images have changes of their own; its commit where `eval_prepare` steps have put tests there.
    Raises `EvaluatorError`.
    """
    if base is None and context.task.runtime.eval_prepare:
        base = await _git(fresh, repo, "rev-parse", "HEAD^{tree}")
    elif base is None:
        await _git(fresh, repo, "add", "--all", ".")
        base = await _git(fresh, repo, "write-tree")
    left = await context.places.left()
    aside = f"{fresh.home}/.left"
    with tempfile.TemporaryDirectory(prefix="bridle-left-") as folder:
        files = Path(folder, "files")
        await asyncio.to_thread(_without_git, left, left / repo, files)
        await fresh.upload(files, aside)
    own = (await _git(fresh, repo, "rev-parse", "--absolute-git-dir"),)
    words = ("--git-dir", *own, "--work-tree", aside)
    await _git(fresh, aside, *words, "add", "--all", ".")
    patch = await _git(fresh, aside, *words, "diff", *DIFF, base, "--", strip=False)
    await _git(fresh, repo, "reset", "--quiet")
    await fresh.exec(["rm", "-rf", "--", aside])
    return patch


def _without_git(left: Path, repo: Path, files: Path) -> None:
    if not is_folder_in(left, repo):
        raise Unscorable(f"the agent left no repository in {repo}")
    replace_tree(repo, files, keep=_is_git)


def _is_git(path: PurePosixPath, *, is_folder: bool) -> bool:
    del is_folder
    return path.name == ".git"


async def _git(runtime: Runtime, repo: str, *words: str, strip: bool = True) -> str:
    result = await runtime.exec([*GIT, *words], cwd=repo, output_limit=PATCH_LIMIT)
    if not result.ok or result.truncated:
        said = result.stderr.decode(errors="replace").strip()[-TAIL_CHARS:]
        more = f"more than {PATCH_LIMIT} bytes" if result.truncated else said
        raise CheckerFailure(f"git {words[0]}", more)
    text = result.stdout.decode(errors="surrogateescape")
    return text.strip() if strip else text


def filter_patch(diff: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> Patch:
    """Return the parts of a patch whose paths match `include` and not `exclude`.

    Files that test runners obey unasked, such as a `conftest.py`, are always left out.
    """
    kept, dropped, texts = [], [], []
    for path, text in files_of(diff):
        wanted = any(fnmatchcase(path, pattern) for pattern in include)
        wanted = wanted and OBEYED.isdisjoint(path.split("/"))
        if wanted and not any(fnmatchcase(path, pattern) for pattern in exclude):
            kept.append(path)
            texts.append(text)
        else:
            dropped.append(path)
    return Patch("".join(texts), tuple(kept), tuple(dropped))


def files_of(diff: str) -> Iterator[tuple[str, str]]:
    """Yield, for each file of a git diff made without renames, its path and its part of the
    diff.
    """
    for part in re.split(r"(?m)^(?=diff --git )", diff):
        if part:
            line = part.partition("\n")[0].removeprefix("diff --git ")
            yield line[: len(line) // 2].strip('"').removeprefix("a/"), part


async def apply_patch(runtime: Runtime, repo: str, patch: str) -> None:
    """Apply an agent's patch to a repository. `Unscorable` if it does not fit."""
    try:
        await _apply(runtime, repo, patch)
    except EvaluatorError as error:
        raise Unscorable(str(error)) from error


async def _apply(runtime: Runtime, repo: str, patch: str) -> None:
    result = await runtime.exec(
        [*GIT, "apply", "--whitespace=nowarn", "-"],
        cwd=repo,
        stdin=patch.encode(errors="surrogateescape"),
    )
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip()[-TAIL_CHARS:]
        raise EvaluatorError(f"the patch cannot be applied in a fresh runtime: {said}")


def from_junit(text: bytes) -> dict[str, str]:
    """Return the status of each test (`classname::name`) in a JUnit file. Raises
    `EvaluatorError`.
    """
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise EvaluatorError(
            "the JUnit file of the tests declares XML entities, which no test runner writes"
        )
    try:
        root = ET.fromstring(text)  # noqa: S314 - entities are refused above
    except ET.ParseError as error:
        raise CheckerFailure("the JUnit file of the tests cannot be read", str(error)) from error
    statuses: dict[str, str] = {}
    for case in root.iter("testcase"):
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        kind = {"failure": "failed"}.get(ends[0], ends[0]) if ends else "passed"
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        if statuses.get(name, "passed") == "passed":
            statuses[name] = kind
    return statuses


RUNNER = Path(__file__).with_name("swebench_runner.py")
PACKAGES = {
    "swebench": None,
    "swesmith": (
        "pip install 'swesmith[validate]' 'swebench>=4.1,<5' in a Python of its own, and name it "
        "as evaluator.config.python"
    ),
}
"""Package that grades -> the command that installs it; `None` = Bridle's own extra."""
LOG_LIMIT = 64 << 20
GRADING_S = 120.0


class SwebenchSettings(Settings):
    """Config of evaluator `swebench`."""

    instance: JSON
    """The row: what `make_test_spec` needs."""
    repo: str = "."
    """The repository, relative to the work folder."""
    tested: str | None = None
    """The repository that is patched and tested in the fresh runtime; `None` = `repo`."""
    exclude: tuple[str, ...] = ()
    """Paths that stay out of the patch, as shell patterns (`*` also crosses folders)."""
    python: str | None = None
    """An interpreter that has the package; `None` = this one."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Of the tests; `None` = the task's evaluate budget."""


class SwebenchEvaluator(Configured[SwebenchSettings]):
    """Implements `base.Evaluator`."""

    strategy = "swebench"
    settings_class = SwebenchSettings
    submittable = "instance repo tested exclude python:host_path timeout_s"
    prewarm = True

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Apply the agent's patch, run the SWE-bench instance's tests and grade their log.

        Raises `EvaluatorError`.
        """
        settings = self._settings
        repo = settings.tested or settings.repo
        async with context.places.fresh() as runtime:
            taken = await take_patch(context, runtime, settings.repo, None)
            patch = "".join(part for path, part in files_of(taken) if not self._excludes(path))
            if not (patch.strip() or context.control):
                return Evaluation(0.0, metadata={"resolved": False, "changed": False})
            spec = await self._package("script", {})
            if patch.strip():
                await apply_patch(runtime, repo, patch)
            script = f"{runtime.home}/.swebench.sh"
            tests = await with_own_pytest(runtime, str(spec["script"]))
            await runtime.write(script, tests.encode())
            result = await runtime.exec(
                f'bash "{script}" 2>&1',
                cwd=repo,
                env=context.task.evaluator.env,
                timeout_s=settings.timeout_s,
                output_limit=LOG_LIMIT,
                log=context.logs / "evaluator.log",
            )
        if result.timed_out or result.truncated:
            late = f"{LATE} {settings.timeout_s} s"
            how = late if result.timed_out else f"wrote more than {LOG_LIMIT} bytes"
            raise EvaluatorError(f"the instance's test script gave no results: it {how}")
        said = result.stdout.decode(errors="replace")
        readable = patch.encode(errors="backslashreplace").decode() or "the control has no patch"
        report = await self._package("grade", {"log": said, "patch": readable})
        if report.get("infra_failure"):
            why = report.get("infra_failure_reason")
            raise CheckerFailure(
                f"swebench could not grade, because its environment failed: {why}",
                said[-TAIL_CHARS:],
            )
        resolved = report.get("resolved") is True
        return Evaluation(float(resolved), metadata={**report, "changed": True})

    def _excludes(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self._settings.exclude)

    async def _package(self, what: str, more: JSON) -> JSON:
        """Call a function of the package. `EvaluatorError` has its output instead of a result."""
        python = self._settings.python or sys.executable
        with tempfile.TemporaryDirectory(prefix="bridle-swebench-") as folder:
            result = await run_process(
                Command(
                    argv=[python, "-P", str(RUNNER), what],
                    cwd=folder,
                    env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "LANG": "C.UTF-8"},
                    stdin=orjson.dumps({"instance": self._settings.instance, **more}),
                    timeout_s=GRADING_S,
                    output_limit=LOG_LIMIT,
                )
            )
        if not result.ok:
            said = result.stderr.decode(errors="replace").strip()[-TAIL_CHARS:]
            lacks = [name for name in PACKAGES if f"No module named '{name}" in said]
            hint = f"; run {PACKAGES[lacks[0]] or install_extra('swebench')}" if lacks else ""
            raise EvaluatorError(f"the package swebench failed under {python}: {said}{hint}")
        answer: JSON = orjson.loads(result.stdout)
        return answer
