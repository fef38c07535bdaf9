"""The `swebench` evaluator: an instance's own script is run, the package `swebench` reads its log.

An instance without a script is one of SWE-smith, and package `swesmith` has its script. A package
(`swebench` 5.0 or later) is needed only here; it brings much with it, so its functions are called
in a process of their own, with this Python or with the one that `config.python` names. What it
calls a failure of the environment is the evaluator's failure; a log without results is otherwise
what the package says it is, an instance that is not resolved.

The agent's patch is applied in a fresh runtime, and the script runs there. A session that changed
nothing is worth 0.0, as the package counts it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import orjson
from pydantic import Field

from bridle.config import Settings
from bridle.errors import EvaluatorError, install_extra
from bridle.evaluators.base import (
    LATE,
    CheckerFailure,
    Configured,
    Evaluation,
    EvaluationContext,
    with_own_pytest,
)
from bridle.evaluators.command import TAIL_CHARS
from bridle.evaluators.test_on_output import apply_patch, files_of, take_patch
from bridle.runtimes.process import Command, run_process
from bridle.types import JSON

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
    prewarm = True

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Run the instance's script and have its log read. Raises `EvaluatorError`."""
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
            raise EvaluatorError(f"the instance's script {how}")
        said = result.stdout.decode(errors="replace")
        readable = patch.encode(errors="backslashreplace").decode() or "the control has no patch"
        report = await self._package("grade", {"log": said, "patch": readable})
        if report.get("infra_failure"):
            why = report.get("infra_failure_reason")
            raise CheckerFailure(f"swebench: the environment failed: {why}", said[-TAIL_CHARS:])
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
            raise EvaluatorError(f"swebench ({python}): {said}{hint}")
        answer: JSON = orjson.loads(result.stdout)
        return answer
