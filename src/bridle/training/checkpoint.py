"""A training's state on disk: enough to go on as if it had not stopped.

A checkpoint is a model folder that any engine can load, with three files beside the weights:
`optimizer.safetensors` (AdamW's moments by parameter name), `random.safetensors` (torch's
generator), and `state.json` (where the loop, its source and its histories stand). It appears whole
or not at all, and never holds weights that are not numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridle.errors import TrainingError
from bridle.types import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from bridle.training.grpo import Learner

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
    """Write `folder/step-N` and remove all but the newest `keep`; returns its path.

    `state["step"]` is N. Raises `TrainingError` if a weight is not a number.
    """
    from safetensors.torch import save_file

    for name, parameter in learner.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise TrainingError(f"no checkpoint: {name} holds what is not a number")
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
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def write_model(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the weights as a model folder that engines load."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        learner.model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder, as engines load it.

    `EngineError` if there is none.
    """
    from bridle.embedded import model

    return model.load_tokenizer(folder)


def checkpoints(folder: Path) -> list[Path]:
    """Return all whole checkpoints in `folder`, oldest first; none if it does not exist."""
    found = [path for path in folder.glob("step-*") if (path / STATE).is_file()]
    return sorted(path for path in found if path.suffix != ".part")


def read_state(checkpoint: Path) -> JSON:
    """Return the state that `save_checkpoint` was given, with the learner's own facts."""
    try:
        state: JSON = json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{checkpoint} is no checkpoint: {error}") from error
    return state


def restore(learner: Learner, checkpoint: Path) -> JSON:
    """Put optimiser, generator and counters back; the learner's model is the checkpoint's already.

    Returns the state. Raises `TrainingError` for a checkpoint of another model.
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
                    raise TrainingError(f"{checkpoint} is of another model: {name} differs")
                learner.optimizer.state[parameter] = found
        torch.set_rng_state(load_file(checkpoint / RANDOM)["torch"])
    except (OSError, KeyError) as error:
        raise TrainingError(f"{checkpoint} cannot be read: {error}") from error
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
