"""The loop around GRPO: groups in, updates, weights into the engine, while sessions go on.

It knows neither gateway nor engine: groups come from a `GroupSource`, and `publish` puts the
learner's weights where they are sampled from. How far rollouts run ahead is the source's business
within what the loop allows (`bridle.training.groups`); what is older than `max_lag` all the same is
left out and counted.

A step that has nothing to train (all sessions failed, no group varies) updates nothing and is
recorded as such. Many of them in a row end the training, saying what became of the sessions.

A checkpoint is a model folder that any engine can load, with three files beside the weights:
`optimizer.safetensors` (AdamW's moments by parameter name), `random.safetensors` (torch's
generator), and `state.json` (where the loop, its source and its histories stand). It appears whole
or not at all, and never holds weights that are not numbers.

`draw_text` and `draw_png` draw a training's course, in the terminal and with matplotlib (extra
`train`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import torch

from bridle.embedded.model import no_progress_bar
from bridle.errors import BridleError, TrainingError, install_extra
from bridle.training.groups import GroupSource, History
from bridle.training.samples import Group, make_batch, nothing_left
from bridle.training.settings import LoopSettings
from bridle.trajectory.sample import nothing_trains
from bridle.types import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from bridle.training.grpo import Learner, Update


log = structlog.get_logger()

MOST_REJECTED: Final = 0.25
"""Share of rejected replies in a step's sampled tokens above which `train` warns."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one step, as the progress and `course.json` have them."""

    step: int
    """1 = the first."""
    reward: float | None
    """Mean over the sessions of all groups that were taken; `None` = none is known."""
    sessions: int
    unknown: int
    """Sessions without a reward."""
    groups: int
    flat: int
    """Groups whose rewards did not vary."""
    left_out: dict[str, int]
    """Reason -> sessions or traces that did not train, see `Batch.left_out`."""
    update: Update | None
    """`None` = there was nothing to train on."""
    waited_s: float
    """For groups."""
    published_s: float
    """Until the new weights were in the engine."""

    def json(self) -> JSON:
        """Return the step's report as the JSON object in checkpoints and `course.json`."""
        value = asdict(self)
        if value["update"] is not None:
            lags = value["update"]["lags"].items()
            value["update"]["lags"] = {str(lag): tokens for lag, tokens in lags}
        return value


@dataclass(slots=True)
class Course:
    """All that has happened: what checkpoints keep and curves show."""

    steps: list[JSON] = field(default_factory=list)
    """`StepReport.json` of each."""
    evaluations: list[JSON] = field(default_factory=list)
    """`HeldOutEvaluation.json` with its `step`; 0 = before the first."""

    @property
    def step(self) -> int:
        """Number of the last step that is done."""
        return int(self.steps[-1]["step"]) if self.steps else 0


Tell = Callable[[Course], None]


@dataclass(slots=True)
class Loop:
    """A training under way; `run` is all of it."""

    learner: Learner
    source: GroupSource
    publish: Callable[[Learner], Awaitable[None]]
    """Puts the learner's weights into the engine as `learner.version`."""
    settings: LoopSettings
    tokenizer: PreTrainedTokenizerBase
    checkpoints: Path
    history: History
    course: Course = field(default_factory=Course)
    tell: Tell = lambda _: None
    """Called after each step and each evaluation."""
    _before: JSON | None = None
    """Source and history when the step under way began: what it took is not trained yet."""
    _fruitless: list[Group] = field(default_factory=list)
    _warned: bool = False
    _updates: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "update"))
    """One thread: glibc keeps the memory of an update for the thread that computed it."""

    async def run(self) -> Course:
        """Train until `steps` steps are done, those of earlier runs included.

        Raises `TrainingError` when a loss is not a number or nothing trains any more, and the
        engine's error when it does not take new weights; finished steps are in the last checkpoint
        then.
        """
        settings = self.settings
        if not self.course.steps and not self.course.evaluations:
            await self._evaluate()
        ahead = min(1 + settings.max_lag, settings.steps - self.course.step)
        self.source.allow(settings.groups_per_step * max(0, ahead))
        try:
            while self.course.step < settings.steps:
                await self._step()
                step = self.course.step
                if step + settings.max_lag < settings.steps:
                    self.source.allow(settings.groups_per_step)
                if settings.evaluate_every and step % settings.evaluate_every == 0:
                    await self._evaluate()
                if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                    await self.save()
        except BridleError:
            await self.save()
            raise
        if self.course.evaluations[-1:] and self.course.evaluations[-1]["step"] < settings.steps:
            await self._evaluate()
        await self.save()
        return self.course

    async def save(self) -> Path:
        """Write a checkpoint of the training so far; returns its folder."""
        state = {
            "step": self.course.step,
            **(self._before or self._position()),
            "course": asdict(self.course),
        }
        keep = self.settings.keep_checkpoints
        saved = await asyncio.to_thread(
            save_checkpoint, self.checkpoints, self.learner, self.tokenizer, state, keep=keep
        )
        await self.source.kept()
        return saved

    def _position(self) -> JSON:
        return {"cursor": self.source.cursor(), "history": self.history.json()}

    async def _evaluate(self) -> None:
        found = await self.source.evaluate()
        if found is not None:
            self.course.evaluations.append({"step": self.course.step, **found.json()})
            self.tell(self.course)

    async def _step(self) -> None:
        self._before = self._position()
        began = time.monotonic()
        taken, chosen = await self._gather()
        waited = time.monotonic() - began
        learner = self.learner
        batch = make_batch(
            chosen, learner.settings, version=learner.version, max_lag=self.settings.max_lag
        )
        update, published, fault = None, 0.0, None
        if not batch.tokens and batch.left_out.keys() & {"newer", "unversioned"}:
            raise TrainingError(nothing_left(batch))
        if batch.tokens:
            loop = asyncio.get_running_loop()
            update = await loop.run_in_executor(self._updates, learner.update, batch)
            began = time.monotonic()
            try:
                await self.publish(learner)
            except BridleError as error:
                fault = error
            published = time.monotonic() - began
        rewards = [reward for group in taken for reward in group.rewards]
        known = [reward for reward in rewards if reward == reward]  # noqa: PLR0124 - NaN: unknown
        report = StepReport(
            step=self.course.step + 1,
            reward=sum(known) / len(known) if known else None,
            sessions=len(rewards),
            unknown=len(rewards) - len(known),
            groups=len(taken),
            flat=sum(not group.varies for group in taken),
            left_out=batch.left_out,
            update=update,
            waited_s=round(waited, 3),
            published_s=round(published, 3),
        )
        self.course.steps.append(report.json())
        self._before = None
        self.tell(self.course)
        self._warn_of_rejected(taken)
        if fault is not None:
            raise fault

    def _warn_of_rejected(self, taken: list[Group]) -> None:
        """Warn once if many sampled tokens are of replies that harnesses did not go on from."""
        stats = [s.metadata.get("stats", {}) for group in taken for s in group.sessions]
        rejected = sum(one.get("rejected", {}).get("tokens", 0) for one in stats)
        share = rejected / max(1, sum(one.get("tokens_captured", 0) for one in stats))
        if share > MOST_REJECTED and not self._warned:
            self._warned = True
            log.warning(
                "many_rejected_replies",
                step=self.course.step,
                share=round(share, 3),
                hint="the harness asks again after what it read; see `bridle show RUN --report`, "
                "and the task's `rejected` and `rejected_reward`",
            )

    async def _gather(self) -> tuple[list[Group], list[Group]]:
        """Return the groups of a step: all that were taken, and those that are its batch.

        In the order in which they were begun, so that with a lag of 0 a batch is the same whoever
        ended first.
        """
        refills = self.settings.patience * self.settings.groups_per_step
        if self.learner.settings.flat_groups != "refill":
            refills = 0
        taken: list[Group] = []
        chosen: list[Group] = []
        while len(chosen) < self.settings.groups_per_step:
            group = await self.source.take()
            self.history.add(group)
            taken.append(group)
            self._watch(group)
            useful = group.varies or self.learner.teacher is not None
            if (group.trains and useful) or len(taken) - len(chosen) > refills:
                chosen.append(group)
            else:
                self.source.allow(1)
        begun = attrgetter("index")
        return sorted(taken, key=begun), sorted(chosen, key=begun)

    def _watch(self, group: Group) -> None:
        """Give up when sessions have failed for long; solved ones are no failure."""
        solved = max(group.rewards, default=0) > 0
        if group.trains and (group.varies or solved or self.learner.teacher is not None):
            self._fruitless.clear()
            return
        self._fruitless.append(group)
        if len(self._fruitless) >= self.settings.patience * self.settings.groups_per_step:
            sessions = [session for one in self._fruitless for session in one.sessions]
            raise TrainingError(nothing_trains(len(self._fruitless), sessions))


BLOCKS = " ▁▂▃▄▅▆▇█"

AVERAGED = 5
"""Steps of the running mean."""


def rewards_of(course: Course) -> list[tuple[int, float]]:
    """Return each step with the mean reward of its sessions, without steps whose reward is
    unknown.
    """
    return [(one["step"], one["reward"]) for one in course.steps if one["reward"] is not None]


def smoothed(values: Sequence[float], width: int = AVERAGED) -> list[float]:
    """Return the running mean: for each value, the mean of it and up to `width - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - width) : end]
        means.append(sum(part) / len(part))
    return means


def draw_text(values: Sequence[float], *, height: int = 6) -> list[str]:
    """Return a bar chart of values as `height` lines of text, top first; the scale is 0 to 1 or
    more.

    No lines for no values.
    """
    if not values:
        return []
    top = max(1.0, *values)
    eighths = [round(value / top * height * 8) for value in values]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(BLOCKS[min(8, max(0, count - 8 * row))] for count in eighths)
        lines.append(f"{top * (row + 1) / height:4.2f} ┤{cells}")
    lines.append(f"     └{'─' * len(values)}")
    return lines


def draw_png(path: Path, course: Course, *, title: str) -> Path:
    """Draw the learning curve as a PNG file: reward per step, its running mean, and the
    evaluations.

    Raises `TrainingError` if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError(
            f"the curve as PNG needs matplotlib: run {install_extra('train')}"
        ) from error
    points = rewards_of(course)
    steps = [step for step, _ in points]
    rewards = [reward for _, reward in points]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, ".", color="#9db4c8", label="sessions of the step")
    axes.plot(steps, smoothed(rewards), color="#1f5f8b", label=f"mean of {AVERAGED} steps")
    known = [one for one in course.evaluations if one["reward"] is not None]
    if known:
        axes.errorbar(
            [one["step"] for one in known],
            [one["reward"] for one in known],
            yerr=[one.get("half_width") or 0.0 for one in known],
            fmt="D--",
            capsize=3,
            color="#c0392b",
            label="held-out tasks, 95% intervals",
        )
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.set_ylim(bottom=min(0.0, *rewards, 0.0), top=max(1.02, *rewards, 0.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


# ---- checkpoints


OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
STATE = "state.json"
NAME = "step-{:06d}"


def save_checkpoint(
    folder: Path,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    state: JSON,
    *,
    keep: int,
) -> Path:
    """Write the checkpoint `folder/step-N`, and remove all but the newest `keep`; returns its path.

    `state["step"]` is N. Raises `TrainingError` if a weight is not a number.
    """
    from safetensors.torch import save_file

    for name, parameter in learner.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise TrainingError(
                f"no checkpoint was written: weight {name} has values that are not finite"
            )
    target = folder / NAME.format(state["step"])
    aside = target.with_name(f"{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_model(aside, learner, tokenizer)
    save_file(_moments(learner), aside / OPTIMIZER)
    save_file({"torch": torch.get_rng_state()}, aside / RANDOM)
    known = {
        "version": learner.version,
        "optimizer_steps": learner.steps,
        "dtype": learner.settings.dtype,
        "replay_experts": learner.settings.replay_experts,
    }
    (aside / STATE).write_text(json.dumps({**state, **known}, indent=1) + "\n")
    if target.exists():
        replaced = target.with_name(f"{target.name}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    aside.rename(target)
    for old in {*checkpoints(folder)[:-keep], *folder.glob("step-*.*")}:
        shutil.rmtree(old)
    return target


def write_model(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the weights as a model folder that engines load."""
    with no_progress_bar():
        learner.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def checkpoints(folder: Path) -> list[Path]:
    """Return all complete checkpoints in `folder`, oldest first; none if it does not exist.

    `step-N.old` is one of them if its writer died before it put another `step-N` in its place.
    """
    found = [path for path in folder.glob("step-*") if (path / STATE).is_file()]
    whole = {path for path in found if not path.suffix}
    left = {path for path in found if path.suffix == ".old" and path.with_suffix("") not in whole}
    return sorted(whole | left)


def read_state(checkpoint: Path) -> JSON:
    """Return the training state of a checkpoint, with the learner's own entries.

    Raises `TrainingError` if it cannot be read.
    """
    try:
        state: JSON = json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{checkpoint} is not a checkpoint of a training: {error}") from error
    return state


def restore(learner: Learner, checkpoint: Path) -> JSON:
    """Restore optimiser, random generator and counters of the learner from a checkpoint.

    The learner's model must have been loaded from it. Returns the training state. Raises
    `TrainingError` for a checkpoint of another model.
    """
    from safetensors.torch import load_file

    state = read_state(checkpoint)
    device = learner.model.device
    try:
        moments = load_file(checkpoint / OPTIMIZER, device=str(device))
        for name, parameter in learner.model.named_parameters():
            if f"{name}|step" in moments:
                found = {key: moments[f"{name}|{key}"] for key in ("exp_avg", "exp_avg_sq", "step")}
                if found["exp_avg"].shape != parameter.shape:
                    raise TrainingError(
                        f"checkpoint {checkpoint} is of another model: weight {name} has another "
                        "shape"
                    )
                learner.optimizer.state[parameter] = found
        torch.set_rng_state(load_file(checkpoint / RANDOM)["torch"])
    except (OSError, KeyError) as error:
        raise TrainingError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    learner.version = state["version"]
    learner.steps = state["optimizer_steps"]
    return state


def _moments(learner: Learner) -> dict[str, torch.Tensor]:
    held = learner.optimizer.state
    return {
        f"{name}|{key}": held[parameter][key].contiguous()
        for name, parameter in learner.model.named_parameters()
        if parameter in held
        for key in ("exp_avg", "exp_avg_sq", "step")
    }
