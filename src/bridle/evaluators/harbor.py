"""The `harbor` evaluator: a Harbor task's own tests say what the session was worth.

The tests run in a copy of all that the agent left, with a home that is empty. They are put into a
folder that is emptied first, as is the one where the reward is looked for: a harness can leave
neither. Then `test.sh` runs in the work folder; its exit code means nothing, its reward file
everything (`harbor.verifier.verifier`, package harbor 0.25): `reward.json` (a number, or names with
numbers) before `reward.txt` (a number). No reward, or one that is none, is the evaluator's failure.

In a runtime that contains, the folders are Harbor's own, `/tests` and `/logs/verifier`. Elsewhere
they lie in the session's home; the script finds them by `TESTS_DIR` and `LOGS_DIR`.
"""

from __future__ import annotations

import math
import secrets
from pathlib import Path

import orjson
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
)
from bridle.evaluators.command import TAIL_CHARS
from bridle.runtimes.base import Runtime
from bridle.types import JSON

EMPTY = """for at in "$@"; do
  [ -L "$at" ] || chmod -R u+rwX -- "$at" 2>/dev/null
  rm -rf -- "$at" 2>/dev/null; mkdir -p -- "$at"
  if [ -L "$at" ] || [ ! -d "$at" ] || [ -n "$(ls -A -- "$at")" ]; then
    echo "cannot empty $at" >&2; exit 1
  fi
done"""
"""Makes folders that hold nothing; one that cannot be removed (a mount) is emptied."""


class HarborSettings(Settings):
    """Config of evaluator `harbor`."""

    tests: str = "tests"
    """The folder with `test.sh`, relative to the task file."""
    timeout_s: float | None = Field(default=None, gt=0)
    """`None` = the task's evaluate budget."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the rewards of `reward.json` that count; none = the one called `reward`, or the
    only one."""


class HarborEvaluator(Configured[HarborSettings]):
    """Implements `base.Evaluator`."""

    strategy = "harbor"
    settings_class = HarborSettings

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Run the tests; what they said goes to `evaluator.log`. Raises `EvaluatorError`."""
        source = context.task_dir / self._settings.tests
        if not (source / "test.sh").is_file():
            raise EvaluatorError(f"{source / 'test.sh'}: no such file")
        async with context.places.whole() as runtime:
            return await self._tested(context, runtime, source)

    async def _tested(
        self, context: EvaluationContext, runtime: Runtime, source: Path
    ) -> Evaluation:
        root = "" if runtime.contains else f"{runtime.home}/.harbor"
        tests, logs = f"{root}/tests", f"{root}/logs"
        verifier, home = f"{logs}/verifier", f"{runtime.home}/.{secrets.token_hex(8)}"
        emptied = await runtime.exec(["bash", "-c", EMPTY, "bash", tests, verifier, home])
        if not emptied.ok:
            raise Unscorable(emptied.stderr.decode(errors="replace").strip())
        await runtime.upload(source, tests)
        result = await runtime.exec(
            ["bash", "-c", 'chmod +x -- "$1"; exec "$1"', "bash", f"{tests}/test.sh"],
            env={
                **OURS,
                "HOME": home,
                "TESTS_DIR": tests,
                "LOGS_DIR": logs,
                **context.task.evaluator.env,
            },
            timeout_s=self._settings.timeout_s,
            log=context.logs / "evaluator.log",
        )
        said = (result.stdout + result.stderr).decode(errors="replace").strip()[-TAIL_CHARS:]
        if result.timed_out:
            raise CheckerFailure(f"the tests {LATE} {self._settings.timeout_s} s", said)
        await runtime.kill()
        rewards = await _rewards(runtime, verifier, said)
        metadata: JSON = {"rewards": rewards, "exit_code": result.exit_code, "output": said}
        return Evaluation(self._one_of(rewards), metadata=metadata)

    def _one_of(self, rewards: dict[str, float]) -> float:
        weights = self._settings.weights
        if weights:
            if missing := sorted(weights.keys() - rewards.keys()):
                raise EvaluatorError(f"the tests gave no reward {missing}; given: {rewards}")
            return sum(weight * rewards[name] for name, weight in weights.items())
        if "reward" in rewards:
            return rewards["reward"]
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        message = f"the tests gave several rewards: {rewards}; say which count (config.weights)"
        raise EvaluatorError(message)


async def _rewards(runtime: Runtime, folder: str, said: str) -> dict[str, float]:
    for name, read in (("reward.json", parse_json), ("reward.txt", parse_text)):
        there = await runtime.exec(["test", "-e", f"{folder}/{name}"])
        if there.ok:
            text = await read_text(runtime, f"{folder}/{name}", f"{name} cannot be read")
            return read(text)
    raise CheckerFailure(f"the tests left no reward.json or reward.txt in {folder}", said)


def parse_text(text: str) -> dict[str, float]:
    """`reward.txt`: one finite number. Raises `EvaluatorError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise EvaluatorError(f"reward.txt must hold a finite number, not {text[:80]!r}")
    return {"reward": value}


def parse_json(text: str) -> dict[str, float]:
    """`reward.json`: a finite number, or an object of them. Raises `EvaluatorError`."""
    try:
        given = orjson.loads(text)
    except ValueError:
        given = None
    values = given if isinstance(given, dict) else {"reward": given}
    if not values or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in values.values()
    ):
        raise EvaluatorError(f"reward.json must hold finite numbers by name, not {text[:80]!r}")
    return {str(name): float(value) for name, value in values.items()}
