"""The `command` and `harbor` evaluators: a command or a script says what the session was worth.

`command` runs in a fresh runtime, in a copy of the work folder. Exit code 0 is reward 1.0, any
other is 0.0; or, with `reward_file`, the command writes a number or `{"reward": ..., ...}` there.
What lay in the file's place stays behind, and it is read when no process is left that could change
it. What says nothing about the session is the evaluator's failure, not a reward: exit codes 126 and
127 (the checker could not be run), a signal, a timeout, an unreadable reward. Checkers belong in
`runtime.eval_prepare`, which uploads them when the harness is dead.

`harbor` runs a Harbor task's own tests in a copy of all that the agent left, with a home that is
empty. They are put into a folder that is emptied first, as is the one where the reward is looked
for: a harness can leave neither. Then `test.sh` runs in the work folder; its exit code means
nothing, its reward file everything (`harbor.verifier.verifier`, package harbor 0.25): `reward.json`
(a number, or names with numbers) before `reward.txt` (a number). No reward, or one that is none, is
the evaluator's failure. In a runtime that contains, the folders are Harbor's own, `/tests` and
`/logs/verifier`. Elsewhere they lie in the session's home; the script finds them by `TESTS_DIR` and
`LOGS_DIR`.
"""

from __future__ import annotations

import json
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
    submittable = "command cwd files timeout_s reward_file failure_codes"
    prewarm = True

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Run the task's command and return the reward that it gives; its output goes to
        `evaluator.log`.

        Raises `EvaluatorError`.
        """
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
            raise Unscorable(
                f"the agent's {name}, which stands in the reward file's place, cannot be removed: "
                f"{_tail(cleared)}"
            )

    def _refuse_unusable(self, result: ExecResult) -> None:
        if result.timed_out:
            how = f"{LATE} {self._settings.timeout_s} s"
        elif result.exit_code is None:
            how = f"was ended by signal {result.signal}"
        elif result.exit_code in self._settings.failure_codes:
            how = f"could not be run (exit code {result.exit_code})"
        else:
            return
        raise CheckerFailure(f"the evaluator's command gave no reward: it {how}", _tail(result))


def parse_reward(text: str, name: str) -> tuple[float, JSON]:
    """Return reward and metadata from a reward file: a number, or an object with `reward`.

    `true` and `false` are rewards of 1 and 0. Raises `EvaluatorError` quoting a file that has
    neither.
    """
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    more: JSON = {}
    if isinstance(given, dict):
        more = {key: value for key, value in given.items() if key != "reward"}
        given = given.get("reward")
    if not isinstance(given, int | float) or not math.isfinite(given):
        raise EvaluatorError(
            f"{name}: must hold a finite number or {{'reward': number}}, not {text[:80]!r}"
        )
    return float(given), more


def _tail(result: ExecResult) -> str:
    """Return the end of what the command said, for people."""
    return (result.stdout + result.stderr).decode(errors="replace").strip()[-TAIL_CHARS:]


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
    submittable = "tests:task_path timeout_s weights"

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Run the tests of a Harbor task and return their reward; their output goes to
        `evaluator.log`.

        Raises `EvaluatorError`.
        """
        source = context.task_dir / self._settings.tests
        if not (source / "test.sh").is_file():
            raise EvaluatorError(
                f"{source / 'test.sh'}: no such file; evaluator 'harbor' runs this script"
            )
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
        said = _tail(result)
        if result.timed_out:
            raise CheckerFailure(
                f"the tests gave no reward: they {LATE} {self._settings.timeout_s} s", said
            )
        await runtime.kill()
        rewards = await _rewards(runtime, verifier, said)
        metadata: JSON = {"rewards": rewards, "exit_code": result.exit_code, "output": said}
        return Evaluation(self._one_of(rewards), metadata=metadata)

    def _one_of(self, rewards: dict[str, float]) -> float:
        weights = self._settings.weights
        if weights:
            if missing := sorted(weights.keys() - rewards.keys()):
                raise EvaluatorError(
                    f"the tests gave no rewards named {missing}, which the evaluator's weights "
                    f"need; given: {rewards}"
                )
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
    """Return the reward in the text of `reward.txt`: one finite number. Raises `EvaluatorError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise EvaluatorError(f"reward.txt must hold a finite number, not {text[:80]!r}")
    return {"reward": value}


def parse_json(text: str) -> dict[str, float]:
    """Return the rewards in the text of `reward.json`: a finite number, or an object of numbers.

    `true` and `false` are rewards of 1 and 0, as in Harbor. Raises `EvaluatorError`.
    """
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
