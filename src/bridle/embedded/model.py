"""A model folder, loaded and proved to work, or an error that says what is wrong with it.

`load` gives the engine a model, its tokenizer and the decoder that computes it right;
`weights_of` checks new weights, and `PlainModel` recomputes logprobs by the model alone.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from bridle.embedded.decoders import Decoder, proved_decoder
from bridle.engines.adapter import read_config
from bridle.engines.base import ADAPTER, is_adapter
from bridle.engines.teachers import Scores
from bridle.errors import EngineError, install_extra
from bridle.types import Ids, Logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

DEFAULT_CONTEXT = 131072
"""For models that have no longest position."""

CACHE_SHARE_CPU, CACHE_SHARE_GPU = 0.25, 0.6
"""Share of the memory free after loading that caches may take by default."""

PREFIX_SHARE = 0.25
"""Share of the cache memory for the prefix cache."""

SMALL_MODEL = 10_000_000
"""Below this many parameters an operation on a CPU runs on one thread (set for the process).

Measured with 1M parameters at 32 calls on 2 cores: 6,700 tokens/s with one thread against 7,200
with two on a quiet machine, 4,300 against 400 to 1,800 when other processes want the cores, as
harnesses do.
"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to sample."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    vocab_size: int
    """Rows of the input embedding; every id must be below."""
    context_length: int
    eos_token_ids: tuple[int, ...]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def load(
    folder: Path,
    *,
    device: str,
    dtype: str,
    max_batch: int,
    max_context: int | None,
    cache_bytes: int | None,
) -> LoadedModel:
    """Load and check a model folder; takes seconds. Raises `EngineError` naming what is wrong."""
    check_folder(folder)
    tokenizer = load_tokenizer(folder)
    where = _device(device)
    model = load_model(folder, dtype=dtype, device=where)
    if where.type == "cpu" and model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(1)
    if cache_bytes is None:
        cache_bytes = _default_cache_bytes(where)
    prefix_bytes = int(cache_bytes * PREFIX_SHARE)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or max_context or DEFAULT_CONTEXT
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    with torch.inference_mode():
        decoder = proved_decoder(
            model,
            vocab_size,
            min(context, 24),
            max_batch=max_batch,
            prefix_bytes=prefix_bytes,
        )
    room = decoder.limit(cache_bytes - prefix_bytes)
    if room == 0:
        raise EngineError(
            f"the embedded engine's cache of {cache_bytes} bytes is too small for one call; give "
            "it more"
        )
    limits = [context, max_context, room]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        decoder=decoder,
        vocab_size=vocab_size,
        context_length=min(limit for limit in limits if limit is not None),
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def base_of(folder: Path) -> Path:
    """Return the model folder that a LoRA adapter in `folder` is for; `folder` if it holds none.

    Raises `EngineError` for an adapter whose model is not named.
    """
    if not is_adapter(folder):
        return folder
    base = read_config(folder, ADAPTER).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise EngineError(
            f"the LoRA adapter's file {folder / ADAPTER} lacks base_model_name_or_path, the "
            "folder of its model"
        )
    return Path(base)


def check_folder(folder: Path) -> None:
    """Raise `EngineError` unless the folder holds a causal language model, or a LoRA adapter of
    one.
    """
    folder = base_of(folder)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not folder.is_dir():
        raise EngineError(f"model folder {folder} does not exist")
    if not (folder / "config.json").exists():
        raise EngineError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise EngineError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineError(f"{folder} holds a {config.model_type}, not a causal language model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. Raises `EngineError` if none loads."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise EngineError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save it beside the "
            "model with tokenizer.save_pretrained"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise EngineError(f"the tokenizer of {folder} cannot be loaded: {error}") from error


def load_model(folder: Path, *, dtype: str, device: torch.device) -> PreTrainedModel:
    """Load the causal language model of a folder, in evaluation mode, on `device`.

    With `dtype="auto"` it is float32 on a CPU and the checkpoint's own elsewhere. Raises
    `EngineError` if the folder holds no causal language model, or not all of its weights. A LoRA
    adapter is merged into its model.
    """
    from transformers import AutoModelForCausalLM

    base = base_of(folder)

    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    try:
        with no_progress_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                base, local_files_only=True, dtype=dtype, output_loading_info=True
            )
    except Exception as error:
        raise EngineError(f"the model in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise EngineError(
            f"model folder {base} lacks {len(missing)} of the model's weights, {missing[0]!r} first"
        )
    if base is not folder:
        load_adapter(model, folder)
        _merge(model)
    if device.type == "cuda":
        _leave_cudnn_attention()
    return model.eval().to(device)


@functools.cache  # once: an update in another thread may have turned it on for a long trace
def _leave_cudnn_attention() -> None:
    """Turn off cuDNN's attention in this process; torch has other kernels.

    Torch prefers it on some GPUs, but it prepares itself for every new length, so for each token
    that is sampled and each trace of an update: 0.1 to 0.2 s on an H200.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # noqa: FBT003 - it takes no keyword


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add the LoRA adapter of a folder to its base model and use it in forward passes.

    Raises `EngineError` if `peft` is missing or the adapter does not fit.
    """
    if importlib.util.find_spec("peft") is None:
        raise EngineError(f"{folder} is a LoRA adapter: run {install_extra('lora')}")
    import peft

    try:
        model.add_adapter(peft.PeftConfig.from_pretrained(folder))
        weights = peft.load_peft_weights(folder, device="cpu")
        plain = {name.removeprefix("base_model.model."): one for name, one in weights.items()}
        unknown = peft.set_peft_model_state_dict(model, plain).unexpected_keys
    except Exception as error:
        raise EngineError(f"the LoRA adapter in {folder} cannot be loaded: {error}") from error
    if unknown:
        raise EngineError(
            f"the LoRA adapter in {folder} is of another model: the base model has no place for "
            f"{unknown[0]!r}"
        )


def _merge(model: PreTrainedModel) -> None:
    """Add the adapter in a model to its weights; it is a plain model then."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False  # noqa: SLF001 - else it would save no weights


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar within the context: it would break into the caller's own."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"unknown device {device!r}: {error}") from error


def _default_cache_bytes(device: torch.device) -> int:
    """Return a share of the memory that is free now, at least 64 MiB."""
    if device.type == "cuda":
        free, share = torch.cuda.mem_get_info(device)[0], CACHE_SHARE_GPU
    else:
        free, share = _free_memory(), CACHE_SHARE_CPU
    return max(int(free * share), 64 << 20)


def _free_memory() -> int:
    """Return the bytes that this process may still allocate, by the system and its cgroup."""
    known = [4 << 30]
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known = [int(line.split()[1]) << 10]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            known.append(int(limit) - used)
    return max(min(known), 0)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of generation_config, else config, else the tokenizer; may be empty."""
    for source in (model.generation_config, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def weights_of(
    source: Path | Mapping[str, torch.Tensor], model: PreTrainedModel
) -> Mapping[str, torch.Tensor]:
    """Return the weights of `source`, a state dict or a model folder, checked against `model`.

    Raises `EngineError` unless names and shapes fit.
    """
    weights: Mapping[str, torch.Tensor]
    if isinstance(source, Path):
        check_folder(source)
        weights = load_model(source, dtype="auto", device=torch.device("cpu")).state_dict()
    else:
        weights = source
    own = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(own.keys() - weights.keys() - tied)
    unknown = sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise EngineError(
            f"the weights do not fit the model: {len(missing)} of its weights are missing, such "
            f"as {missing[:2]}, and {len(unknown)} are unknown, such as {unknown[:2]}"
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            given, wanted = tuple(tensor.shape), tuple(own[name].shape)
            raise EngineError(f"weight {name!r} has shape {given}, the model's is {wanted}")
    return weights


class PlainModel:
    """The model of a folder in float32 on the CPU, to check logprobs of any engine by.

    Raises `EngineError` if the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder, dtype="float32", device=torch.device("cpu"))

    def logprobs(self, prompt: Ids, sampled: Ids, temperature: float) -> Logprobs:
        """Return the logprobs of `sampled` after `prompt` by a plain forward pass; float32 (T,).

        They are of the whole distribution at `temperature`, without top-k or top-p.
        """
        ids = np.concatenate([prompt, sampled])
        return self.scores(ids, 0, temperature).logprobs[len(prompt) :]

    def scores(self, ids: Ids, top: int, temperature: float = 1.0) -> Scores:
        """Return the logprobs of `ids`, and the `top` likeliest tokens at each position."""
        rows = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.inference_mode():
            logits = self._model(input_ids=rows, use_cache=False).logits[0, :-1]
            table = torch.log_softmax(logits.float() / temperature, dim=-1)
            own = table.gather(1, rows[0, 1:, None])[:, 0]
            best = table.topk(top, dim=-1)
        first = np.zeros((1, top), np.float32)
        return Scores(
            np.concatenate([np.zeros(1, np.float32), own.numpy()]),
            np.concatenate([first.astype(np.int32) - 1, best.indices.int().numpy()]),
            np.concatenate([first, best.values.numpy()]),
        )
