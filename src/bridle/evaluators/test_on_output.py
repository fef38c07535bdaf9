"""The `test_on_output` evaluator: only what the agent changed is tested, somewhere clean.

The difference between the session's work folder and its beginning is taken as a patch, filtered by
path (so that an agent's changes to tests, or its own helpers, stay out), and applied in a fresh
runtime, where nothing else of the session exists; `evaluator.refresh_runtime` must be on. Then the
tests run there: those of `fail_to_pass` must pass, those of `pass_to_pass` must still pass.

Where a session began is the commit that the fresh runtime has checked out; it is compared by its
tree, so two runtimes whose prepare steps made the same files agree. `eval_prepare` steps (hidden
tests) are done in the fresh runtime before the patch is applied.

Results are read from a JUnit file, or from the summary that `pytest -rA` prints last. A run that
ends with an error and names no failed test is the evaluator's failure.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self
from xml.etree import ElementTree as ET

from pydantic import Field

from bridle.config import Settings
from bridle.errors import EvaluatorError, RuntimeFailure
from bridle.evaluators.base import Evaluation, EvaluationContext, parse_config
from bridle.evaluators.command import TAIL_CHARS
from bridle.runtimes.base import ExecResult, Runtime
from bridle.types import JSON

GIT = ("git", "-c", "safe.directory=*", "-c", "core.quotePath=false", "-c", "core.fsmonitor=")
DIFF = ("--cached", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
PATCH_LIMIT = 32 << 20
"""Bytes; a larger patch is no work of an agent's."""
SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?)(?: - .*)?$")


class TestOnOutputSettings(Settings):
    """Config of evaluator `test_on_output`."""

    command: str = Field(min_length=1)
    """Bash line that runs the tests, in `repo`."""
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    pass_to_pass: tuple[str, ...] = ()
    repo: str = "."
    """The repository, relative to the work folder."""
    base: str | None = None
    """What a session began with; `None` = what the fresh runtime has checked out."""
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


@dataclass(frozen=True, slots=True)
class Patch:
    """A difference, filtered."""

    text: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


class TestOnOutput:
    """Implements `base.Evaluator`."""

    __test__ = False

    def __init__(self, settings: TestOnOutputSettings) -> None:
        self._settings = settings

    @classmethod
    def from_config(cls, config: JSON) -> Self:
        """Config as `TestOnOutputSettings`; raises `ConfigError`."""
        return cls(parse_config(config, TestOnOutputSettings, "test_on_output"))

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Take the patch over and run the tests; output to `evaluator.log`.

        Raises `EvaluatorError`.
        """
        settings, fresh = self._settings, context.runtime
        if context.session_runtime is None:
            raise EvaluatorError("test_on_output needs evaluator.refresh_runtime = true")
        base = settings.base or await _git(fresh, settings.repo, "rev-parse", "HEAD^{tree}")
        taken = await take_patch(context.session_runtime, settings.repo, base)
        patch = filtered(taken, settings.include, settings.exclude)
        if patch.text:
            await apply_patch(fresh, settings.repo, patch.text)
        if settings.test_patch:
            await apply_patch(fresh, settings.repo, settings.test_patch)
        result = await fresh.exec(
            settings.command,
            cwd=settings.repo,
            env=context.task.evaluator.env,
            timeout_s=settings.timeout_s,
            output_limit=PATCH_LIMIT,
            log=context.logs / "evaluator.log",
        )
        statuses = await self._statuses(fresh, result)
        wanted = (*settings.fail_to_pass, *settings.pass_to_pass)
        passed = [name for name in wanted if statuses.get(name) == "passed"]
        missed = [name for name in wanted if statuses.get(name) != "passed"]
        share = len(passed) / len(wanted)
        return Evaluation(
            share if settings.partial else float(not missed),
            metadata={
                "passed": passed,
                "not_passed": {name: statuses.get(name, "not run") for name in missed},
                "changed": list(patch.kept),
                "dropped": list(patch.dropped),
                "patch": patch.text[:TAIL_CHARS],
            },
        )

    async def _statuses(self, runtime: Runtime, result: ExecResult) -> Mapping[str, str]:
        said = (result.stdout + result.stderr).decode(errors="replace")
        if result.timed_out or result.exit_code is None:
            how = "did not end in time" if result.timed_out else f"ended by {result.signal}"
            raise EvaluatorError(f"the tests {how}: {said[-TAIL_CHARS:]}")
        junit = self._settings.junit
        if junit is None:
            statuses = from_summary(said)
        else:
            statuses = from_junit(await _read(runtime, f"{self._settings.repo}/{junit}"))
        if result.exit_code != 0 and not {"failed", "error"} & set(statuses.values()):
            message = f"the tests ended with code {result.exit_code} and name no failure: "
            raise EvaluatorError(message + said[-TAIL_CHARS:])
        return statuses


async def take_patch(runtime: Runtime, repo: str, base: str) -> str:
    """All that differs from the tree `base`, with new files, but for those that git ignores.

    Raises `EvaluatorError`.
    """
    await _git(runtime, repo, "add", "--all", ":/")
    return await _git(runtime, repo, "diff", *DIFF, base, "--", ":/", strip=False)


async def _git(runtime: Runtime, repo: str, *words: str, strip: bool = True) -> str:
    result = await runtime.exec([*GIT, *words], cwd=repo, output_limit=PATCH_LIMIT)
    if not result.ok or result.truncated:
        said = result.stderr.decode(errors="replace").strip()[-TAIL_CHARS:]
        more = f"more than {PATCH_LIMIT} bytes" if result.truncated else said
        raise EvaluatorError(f"git {words[0]}: {more}")
    text = result.stdout.decode(errors="surrogateescape")
    return text.strip() if strip else text


def filtered(diff: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> Patch:
    """The files of a patch whose paths are included and not excluded."""
    kept, dropped, texts = [], [], []
    for path, text in _files(diff):
        wanted = any(fnmatchcase(path, pattern) for pattern in include)
        if wanted and not any(fnmatchcase(path, pattern) for pattern in exclude):
            kept.append(path)
            texts.append(text)
        else:
            dropped.append(path)
    return Patch("".join(texts), tuple(kept), tuple(dropped))


def _files(diff: str) -> Iterator[tuple[str, str]]:
    """(path, its part) of each file; without renames both names of a part are the same."""
    for part in re.split(r"(?m)^(?=diff --git )", diff):
        if part:
            line = part.partition("\n")[0].removeprefix("diff --git ")
            yield line[: len(line) // 2].strip('"').removeprefix("a/"), part


async def apply_patch(runtime: Runtime, repo: str, patch: str) -> None:
    """Apply a patch to a repository. `EvaluatorError` if it does not fit."""
    result = await runtime.exec(
        [*GIT, "apply", "--whitespace=nowarn", "-"],
        cwd=repo,
        stdin=patch.encode(errors="surrogateescape"),
    )
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip()[-TAIL_CHARS:]
        raise EvaluatorError(f"the patch cannot be applied in a fresh runtime: {said}")


async def _read(runtime: Runtime, path: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="bridle-junit-") as folder:
        copy = Path(folder, "junit.xml")
        try:
            await runtime.download(path, copy)
            return await asyncio.to_thread(copy.read_bytes)
        except (RuntimeFailure, OSError) as error:
            raise EvaluatorError(f"the tests left no {path}: {error}") from error


def from_summary(said: str) -> dict[str, str]:
    """Test -> status, of the last summary that `pytest -rA` prints."""
    *_, summary = re.split(r"(?m)^=+ short test summary info =+$", said)
    found = (SUMMARY.match(line) for line in summary.splitlines())
    return {match[2]: match[1].lower() for match in found if match is not None}


def from_junit(text: bytes) -> dict[str, str]:
    """Test (`classname::name`) -> status, of a JUnit file. Raises `EvaluatorError`."""
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise EvaluatorError("the JUnit file declares entities, which no test runner writes")
    try:
        root = ET.fromstring(text)  # noqa: S314 - entities are refused above
    except ET.ParseError as error:
        raise EvaluatorError(f"the JUnit file cannot be read: {error}") from error
    statuses = {}
    for case in root.iter("testcase"):
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        kind = {"failure": "failed"}.get(ends[0], ends[0]) if ends else "passed"
        statuses["::".join(filter(None, (case.get("classname"), case.get("name"))))] = kind
    return statuses
