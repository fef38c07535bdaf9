"""The `command` evaluator: a command says what the session was worth.

It runs in a fresh runtime, in a copy of the work folder. Exit code 0 is reward 1.0, any other is
0.0; or, with `reward_file`, the command writes a number or `{"reward": ..., ...}` there. What lay
in the file's place stays behind, and it is read when no process is left that could change it. What
says nothing about the session is the evaluator's failure, not a reward: exit codes 126 and 127 (the
checker could not be run), a signal, a timeout, an unreadable reward. Checkers belong in
`runtime.eval_prepare`, which uploads them when the harness is dead.
"""

from __future__ import annotations

import json
import math

from pydantic import Field

from bridle.config import Settings
from bridle.errors import EvaluatorError
from bridle.evaluators.base import (
    LATE,
    OURS,
    CheckerFailure,
    Configured,
    Evaluation,
    EvaluationContext,
    Unscorable,
    read_text,
    with_own_pytest,
)
from bridle.runtimes.base import ExecResult, Runtime
from bridle.types import JSON

TAIL_CHARS = 2000
CLEAR = 'rm -rf -- "$1" && [ ! -e "$1" ] && [ ! -L "$1" ]'


class CommandSettings(Settings):
    """Config of evaluator `command`."""

    command: str = Field(min_length=1)
    """Bash line, run in the work folder."""
    cwd: str | None = None
    """Relative to the work folder."""
    timeout_s: float | None = Field(default=None, gt=0)
    """`None` = the task's evaluate budget."""
    files: tuple[str, ...] | None = None
    """Paths of the work folder that are taken from the agent; the rest is as the task's prepare
    steps make it. `None` = all."""
    reward_file: str | None = None
    """Relative to the work folder; `None` = the exit code decides."""
    failure_codes: tuple[int, ...] = (126, 127)
    """Exit codes that mean that the checker itself could not be run."""


class CommandEvaluator(Configured[CommandSettings]):
    """Implements `base.Evaluator`."""

    strategy = "command"
    settings_class = CommandSettings
    prewarm = True

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Run the command; its output goes to `evaluator.log`. Raises `EvaluatorError`."""
        settings = self._settings
        ours = () if settings.reward_file is None else (settings.reward_file,)
        async with context.places.with_work(ours, settings.files) as runtime:
            if settings.reward_file is not None:
                await self._clear(runtime, settings.reward_file)
            result = await runtime.exec(
                await with_own_pytest(runtime, settings.command),
                env={**OURS, **context.task.evaluator.env},
                cwd=settings.cwd,
                timeout_s=settings.timeout_s,
                log=context.logs / "evaluator.log",
            )
            self._refuse_unusable(result)
            said = {"exit_code": result.exit_code, "output": _tail(result)}
            if settings.reward_file is None:
                return Evaluation(1.0 if result.exit_code == 0 else 0.0, metadata=said)
            await runtime.kill()
            way = f"evaluator command left no {settings.reward_file}"
            text = await read_text(runtime, settings.reward_file, way)
            reward, more = parse_reward(text, settings.reward_file)
        return Evaluation(reward, metadata={**more, **said})

    async def _clear(self, runtime: Runtime, name: str) -> None:
        """Remove what stands in the reward's place (in a trusted place, that of the agent)."""
        cleared = await runtime.exec(["bash", "-c", CLEAR, "bash", name])
        if not cleared.ok:
            raise Unscorable(f"{name} cannot be removed: {_tail(cleared)}")

    def _refuse_unusable(self, result: ExecResult) -> None:
        if result.timed_out:
            how = f"{LATE} {self._settings.timeout_s} s"
        elif result.exit_code is None:
            how = f"was ended by signal {result.signal}"
        elif result.exit_code in self._settings.failure_codes:
            how = f"could not be run (exit code {result.exit_code})"
        else:
            return
        raise CheckerFailure(f"evaluator command {how}", _tail(result))


def parse_reward(text: str, name: str) -> tuple[float, JSON]:
    """Reward and metadata of a reward file: a number, or an object with `reward`.

    Raises `EvaluatorError` quoting what stands there instead.
    """
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    more: JSON = {}
    if isinstance(given, dict):
        more = {key: value for key, value in given.items() if key != "reward"}
        given = given.get("reward")
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise EvaluatorError(
            f"{name}: must hold a finite number or {{'reward': number}}, not {text[:80]!r}"
        )
    return float(given), more


def _tail(result: ExecResult) -> str:
    """Return the end of what the command said, for people."""
    return (result.stdout + result.stderr).decode(errors="replace").strip()[-TAIL_CHARS:]
