"""The evaluator contract: session -> reward, after the harness is dead.

An evaluator's own failure is an exception (classified as `EvaluatorError`), never a reward of 0.

The control run (`evaluate_with_control`) separates an evaluator that the agent broke from one that
is broken: an evaluator that fails runs once more, on a work folder that no agent touched. If it
answers there, or fails in another way, the agent's files made it fail: the session is `Unscorable`,
reward 0. If it fails in the same way, or the machine is in trouble, there is no reward. The control
run follows the failure at once and is never cached, so both see the machine in the same state.

`session_completed` is here as the simplest evaluator, for data generation and for trying things: it
says nothing about the work. A session whose harness crashed or used up its time or a limit has
reward 0.0, if it got a reply of the model.
"""

from __future__ import annotations

import asyncio
import math
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final, Generic, Protocol, Self, TypeAlias, TypeVar

from bridle.config import Settings, Task, validated
from bridle.errors import EvaluatorError, RuntimeFailure
from bridle.runtimes.base import ExecResult, Runtime
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """A gateway session of an evaluator's own; its calls are captured and never train."""

    session_id: str
    base_url: str
    """OpenAI's, as seen from this process."""
    key: str


OpenModel: TypeAlias = Callable[[], AbstractAsyncContextManager[ModelAccess]]
"""Opens such a session; its key is dead when the block is left."""


OURS: Final = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.bareRepository",
    "GIT_CONFIG_VALUE_0": "explicit",
}
"""Environment of checkers: Python looks for modules neither in a home nor beside the work, and git
takes no folder without `.git` for a repository. `EvaluatorSpec.env` stands over it."""


OBEYED: Final = frozenset(
    {"GNUmakefile", "makefile", "BSDmakefile", "sitecustomize.py", "usercustomize.py"}
    | {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"}
    | {".npmrc", ".yarnrc", ".yarnrc.yml", ".cargo"}
)
"""Files and folders that `make`, `python`, `pytest`, `npm`, `yarn` and `cargo` look for by
themselves, before what a checker names; they can name the programs that run the tests."""


RUN_PYTEST: Final = Path(__file__).with_name("run_pytest.py")
_PYTEST: Final = re.compile(
    r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote).*?^\s*(?P=end)$"
    r"|(?P<python>\bpython[\d.]*[\"']?(?:\s+-(?:[XW]\s*\S+|[A-Za-z]+))*)\s+-m\s+pytest\b(?![\w.-])",
    re.DOTALL | re.MULTILINE,
)
"""A here-document, which stays as it is, or a start of pytest."""

_OTHER_USER: Final = re.compile(r"\b(?:setpriv|runuser|sudo|gosu|su)\b")
"""Programs that run a command as somebody else, who may not read the home."""


def start_pytest(command: str, program: str) -> str:
    """Return the command with each `python -m pytest` replaced by a start of `program`."""
    if _OTHER_USER.search(command):
        return command
    return _PYTEST.sub(
        lambda found: f"{found['python']} {program}" if found["python"] else found[0], command
    )


async def with_own_pytest(runtime: Runtime, command: str) -> str:
    """Return the command changed so that `python -m pytest` does not import a `pytest.py` of the
    agent's.

    Python before 3.11 does not know `PYTHONSAFEPATH`, and tests may need the work folder on their
    path.
    """
    file = f"{runtime.home}/.{RUN_PYTEST.name}"
    changed = start_pytest(command, shlex.quote(file))
    if changed != command:
        await runtime.write(file, RUN_PYTEST.read_bytes())
    return changed


class Unscorable(EvaluatorError):
    """The agent left what cannot be scored. That is its own doing: the reward is 0."""


LATE = "did not end within"
"""In each message on a checker whose time is over; verification of tasks reads it."""


class CheckerFailure(EvaluatorError):
    """A checker gave no answer; `way` says how, and is the same for failures of one kind."""

    def __init__(self, way: str, said: str = "") -> None:
        super().__init__(f"{way}: {said}" if said else way)
        self.way = way


class Places(Protocol):
    """The places in which a session can be scored."""

    async def left(self) -> Path:
        """Return a host folder with a copy of the work folder as the agent left it.

        Its links may point anywhere: follow none. Raises `Unscorable` for more than a copy may
        hold.
        """

    def fresh(self) -> AbstractAsyncContextManager[Runtime]:
        """Open a new runtime in which the task's steps `prepare` and `eval_prepare` have run,
        without files of the agent.
        """

    def with_work(
        self, ours: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> AbstractAsyncContextManager[Runtime]:
        """Open a new runtime with a copy of the agent's work folder; where the task says `trusted`,
        the agent's own runtime.

        `ours`, and what is not below one of `only` (paths in the work folder; `None` = all), is not
        taken from the agent but stays as the task's own steps made it.
        """

    def whole(self) -> AbstractAsyncContextManager[Runtime]:
        """Open a runtime with all files of the agent's runtime and none of its processes; where the
        task says `trusted`, the agent's own runtime.
        """

    def untouched(self) -> AbstractAsyncContextManager[Places]:
        """Open the places of a session whose work folder no agent has touched, only the task's
        `prepare`.

        A checker that failed runs there again, which shows whether the agent caused the failure.
        """


class NoPlaces:
    """The places of a stored session: none, as its work folder is not kept. Implements `Places`."""

    async def left(self) -> Path:
        """Raise `EvaluatorError`: the work folder of a stored session was not kept."""
        raise self._refusal()

    def fresh(self) -> AbstractAsyncContextManager[Runtime]:
        """Raise `EvaluatorError`: a stored session has no runtime."""
        raise self._refusal()

    whole = fresh

    def with_work(
        self,
        ours: Sequence[str] = (),  # noqa: ARG002 - the contract's
        only: Sequence[str] | None = None,  # noqa: ARG002 - the contract's
    ) -> AbstractAsyncContextManager[Runtime]:
        """Raise `EvaluatorError`: the work folder of a stored session was not kept."""
        raise self._refusal()

    def untouched(self) -> AbstractAsyncContextManager[Places]:
        """Return these same places, in which no command can be run."""
        return nullcontext(self)

    @staticmethod
    def _refusal() -> EvaluatorError:
        return EvaluatorError("the work folder is not kept, which this evaluator needs")


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """The inputs of an evaluator."""

    task: Task
    session_id: str
    places: Places
    harness: ExecResult | None
    """The end of the harness; `None` = it was not started."""
    trajectory: Trajectory
    logs: Path
    """Host folder for what the evaluator wants kept."""
    task_dir: Path
    """Folder of the task file, for relative paths."""
    open_model: OpenModel | None = None
    """For evaluators that ask a model; `None` = there is no gateway."""
    budget_s: float | None = None
    completed: bool = True
    """True if the harness ended well; else it crashed, or used up its time or a limit."""
    control: bool = False
    """True if nothing of the agent is scored, to see whether the checker answers at all: without
    its files, and with a trajectory without traces."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of a session."""

    reward: float
    trace_rewards: tuple[float, ...] | None = None
    metadata: JSON = field(default_factory=dict)
    turn_rewards: Mapping[str, float] | None = None
    """Rewards of turns, by the id of their exchange; a turn that is not among them gets 0."""


class Evaluator(Protocol):
    """Scores sessions. Built from `EvaluatorSpec.config` by `EvaluatorClass.from_config`.

    One with a method `check(task)` is asked before anything is sampled; it raises `ConfigError`.
    One whose failures are never the agent's doing has an attribute `control = "none"`; one that
    calls `evaluate_with_control` for its parts has `control = "parts"`.
    """

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Return the reward of one session; commands run in a runtime that `context.places`
        opens.
        """


def check_evaluator(evaluator: Evaluator, task: Task) -> None:
    """Call the evaluator's `check` of the task, if it has one. Raises `ConfigError`."""
    check = getattr(evaluator, "check", None)
    if check is not None:
        check(task)


class EvaluatorClass(Protocol):
    """The type of an `EVALUATORS` entry: a class with this class method."""

    def from_config(self, config: JSON) -> Evaluator:
        """Return an evaluator with the settings `config`; `ConfigError` names the wrong field."""


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_config(config: JSON, kind: type[SettingsT], name: str) -> SettingsT:
    """Return an evaluator's settings from `EvaluatorSpec.config`; `ConfigError` names the wrong
    field.
    """
    return validated(kind, config, f"evaluator.config of {name!r}")


class Configured(Generic[SettingsT]):
    """Base of an evaluator whose config is one class of settings."""

    strategy: ClassVar[str]
    """Its short name in `EVALUATORS`."""
    settings_class: type[SettingsT]
    submittable: ClassVar[str] = ""
    """Config that a submitted task may give, as `bridle.server.settings` reads it."""

    def __init__(self, settings: SettingsT) -> None:
        self._settings = settings

    @classmethod
    def from_config(cls, config: JSON) -> Self:
        """Return an evaluator with the settings `config`; `ConfigError` names the wrong field."""
        return cls(parse_config(config, cls.settings_class, cls.strategy))


async def evaluate_with_control(evaluator: Evaluator, context: EvaluationContext) -> Evaluation:
    """Evaluate a session within `context.budget_s` seconds.

    A failed evaluation is repeated on an untouched work folder (the control run), with the same
    budget again. Raises `Unscorable` for a failure that the agent caused, another `EvaluatorError`
    for the evaluator's own. Other errors, such as a runtime that cannot be made, escape.
    """
    kind = getattr(evaluator, "control", "whole")
    if kind == "parts":
        return _finite(await evaluator.evaluate(context))
    try:
        async with asyncio.timeout(context.budget_s):
            evaluation = await evaluator.evaluate(context)
    except Unscorable:
        raise
    except EvaluatorError as error:
        failure = error
    except TimeoutError:
        failure = EvaluatorError(f"it {LATE} its budget of {context.budget_s:g} s")
    else:
        return _finite(evaluation)
    if kind == "none":
        raise failure
    if await _control(evaluator, context, failure):
        message = f"{failure} (on the untouched work folder it fails in the same way)"
        raise EvaluatorError(message) from failure
    message = f"{failure} (on the untouched work folder it does not fail like this)"
    raise Unscorable(message) from failure


async def _control(
    evaluator: Evaluator, context: EvaluationContext, failure: EvaluatorError
) -> bool:
    """Return whether an evaluator fails in the way of `failure` without anything of the agent's."""
    try:
        async with asyncio.timeout(context.budget_s), context.places.untouched() as places:
            await evaluator.evaluate(
                replace(
                    context,
                    places=places,
                    trajectory=replace(context.trajectory, traces=()),
                    logs=context.logs / "untouched",
                    control=True,
                )
            )
    except TimeoutError:
        return True
    except EvaluatorError as error:
        return _way(error) == _way(failure)
    return False


def _finite(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation. Raises `EvaluatorError` if one of its rewards is NaN or infinite."""
    turns = (evaluation.turn_rewards or {}).values()
    rewards = (evaluation.reward, *(evaluation.trace_rewards or ()), *turns)
    if not all(math.isfinite(reward) for reward in rewards):
        raise EvaluatorError(f"a reward must be a finite number, not {rewards}")
    return evaluation


def _way(error: EvaluatorError) -> str:
    return error.way if isinstance(error, CheckerFailure) else str(error)


async def read_file(runtime: Runtime, path: str, way: str) -> bytes:
    """Return the content of a file inside a runtime.

    Raises `CheckerFailure` with `way` if it cannot be read.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="bridle-file-") as folder:
            copy = Path(folder, "file")
            await runtime.download(path, copy)
            return await asyncio.to_thread(copy.read_bytes)
    except (RuntimeFailure, OSError) as error:
        raise CheckerFailure(way, str(error)) from error


async def read_text(runtime: Runtime, path: str, way: str) -> str:
    """Return the text of a file inside a runtime.

    Raises `CheckerFailure` with `way` if it cannot be read, or is not UTF-8.
    """
    try:
        return (await read_file(runtime, path, way)).decode()
    except UnicodeDecodeError as error:
        raise CheckerFailure(way, str(error)) from error


# ---- the simplest evaluator


class SessionCompletedSettings(Settings):
    """Config of evaluator `session_completed`."""

    reward: float = 1.0
    """Reward of a session whose harness ended by itself with exit code 0."""


class SessionCompleted(Configured[SessionCompletedSettings]):
    """Reward for a harness that ended by itself with exit code 0. Implements `base.Evaluator`."""

    strategy = "session_completed"
    settings_class = SessionCompletedSettings
    submittable = "reward"

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Return the configured reward if the session completed, else 0.0."""
        ended_well = context.completed and context.harness is not None and context.harness.ok
        return Evaluation(self._settings.reward if ended_well else 0.0)
