"""A policy as a LoRA adapter: the model's weights stay, small matrices beside them train.

`peft` makes the layers inside of the model, whose other uses do not change: what has no gradient
is not trained, and `save_pretrained` writes the adapter alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridle.embedded.model import load_adapter
from bridle.errors import ConfigError, install_extra
from bridle.types import JSON

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from bridle.training.settings import LoraSettings


def add_adapter(
    model: PreTrainedModel,
    settings: LoraSettings,
    folder: Path,
    saved: Path | None = None,
    *,
    seed: int = 0,
) -> None:
    """Have only an adapter of `model` train: the `saved` one, or one that changes nothing yet.

    `folder` is the model's own. `ConfigError` if `peft` is missing, for target modules that the
    model does not have or that cannot be adapted, and for a saved adapter of other settings.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"[lora] needs peft: run {install_extra('lora')}")
    import peft
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if saved is not None:
            load_adapter(model, saved)
            _check_saved(saved, model.peft_config["default"], settings)
        else:
            wanted = peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                target_modules=list(settings.targets) or "all-linear",
                task_type="CAUSAL_LM",
            )
            try:
                model.add_adapter(wanted)
            except ValueError as error:
                raise ConfigError(f"[lora] targets = {list(settings.targets)}: {error}") from error
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, LoraLayer):
            raise ConfigError(
                f"[lora] targets = {list(settings.targets)}: the embeddings and the output layer "
                "cannot be adapted, other linear layers can"
            )
    model.peft_config["default"].base_model_name_or_path = str(folder.absolute())


def _check_saved(saved: Path, config: LoraConfig, settings: LoraSettings) -> None:
    """Refuse to go on with an adapter of another form than the settings ask for."""
    old: JSON = {"rank": config.r, "alpha": config.lora_alpha}
    new: JSON = {"rank": settings.rank, "alpha": settings.alpha}
    if settings.targets:
        old["targets"] = sorted(config.target_modules)
        new["targets"] = sorted(settings.targets)
    if old != new:
        raise ConfigError(f"[lora]: {saved} was trained with {old}, the settings ask for {new}")


def policy_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the state dict by the plain model's names, with an adapter's part added in."""
    weights: dict[str, torch.Tensor] = model.state_dict()
    if not getattr(model, "peft_config", None):
        return weights
    from peft.tuners.lora import LoraLayer

    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" not in name
    }
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + module.get_delta_weight(
                    "default"
                )
    return weights
