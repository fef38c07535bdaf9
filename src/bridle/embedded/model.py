"""A folder to a model that is known to work, or an error that says what is wrong with the folder.

Nothing is taken on trust: the way in which the model will be computed is proved at load time on a
few tokens against the model's own plain forward pass (`test_model.py` shows that a model which the
fast way would get wrong is computed the sure way).

The fast way is `bridle.embedded.slots`. The sure way, `Single`, computes each call on its
own with the model's own cache, for recurrent layers and attention of other kinds. A finished call's
cache serves the next call that continues all of it; a beginning shared with others is computed
again. A model is fed in pieces of the prompt, or the whole prompt and then single tokens, or
everything anew at each step: the most that it computes right.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from bridle.embedded.call import BatchedCall
from bridle.embedded.slots import ATTENTION, PrefixStore, SlotDecoder, register
from bridle.errors import EngineError
from bridle.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bridle.types import Ids, Logprobs


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

DEFAULT_CONTEXT = 131072
"""For models that have no longest position."""

CACHE_SHARE_CPU, CACHE_SHARE_GPU = 0.25, 0.6
"""Share of the memory free after loading that caches may take by default."""

PREFIX_SHARE = 0.25
"""Share of the cache memory that remembered beginnings may take."""

SMALL_MODEL = 10_000_000
"""Below this many parameters an operation on a CPU runs on one thread (set for the process).

Measured with 1M parameters at 32 calls on 2 cores: 6,700 tokens/s with one thread against 7,200
with two on a quiet machine, 4,300 against 400 to 1,800 when other processes want the cores, as
harnesses do.
"""

_log = logging.getLogger(__name__)


class Decoder(Protocol):
    """Computation of one step."""

    name: str
    pieces: bool
    """Whether a prompt may be computed in pieces."""
    prefixes: PrefixStore

    def limit(self, cache_bytes: int) -> int | None:
        """Start over with a cache of at most this size; how many tokens of one call fit it.

        `None` = it has no limit of its own.
        """

    def admit(self, call: BatchedCall, version: int) -> bool:
        """Let `call` join, reusing what is known under weights `version`; False = no room now."""

    def reserve(self, work: list[tuple[BatchedCall, int]]) -> bool:
        """Make room to compute `work`; False = there is none."""

    def forward(self, work: list[tuple[BatchedCall, int]]) -> torch.Tensor:
        """Compute; logits (R, vocabulary) of the calls with nothing left to compute, in order."""

    def release(self, call: BatchedCall, *, keep: bool) -> None:
        """Let `call` leave; with `keep` what it computed may be reused."""

    def wipe(self) -> None:
        """Make sure that numbers that are not finite don't stay in freed memory."""


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
        """Text of ids, special tokens included."""
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
    """Load and prove a model folder; takes seconds. Raises `EngineError` naming what is wrong."""
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
        decoder = _proved_decoder(
            model,
            vocab_size,
            min(context, 24),
            max_batch=max_batch,
            prefix_bytes=prefix_bytes,
        )
    room = decoder.limit(cache_bytes - prefix_bytes)
    if room == 0:
        raise EngineError(f"a cache of {cache_bytes} bytes is too small for one call")
    limits = [context, max_context, room]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        decoder=decoder,
        vocab_size=vocab_size,
        context_length=min(limit for limit in limits if limit is not None),
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def check_folder(folder: Path) -> None:
    """Raise `EngineError` unless the folder's config is one of a causal language model."""
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
    """The tokenizer of a model folder; `EngineError` if there is none that works."""
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
    """The causal language model of a folder, in evaluation mode on `device`.

    `dtype` `auto` is float32 on a CPU and the checkpoint's own elsewhere. Raises `EngineError` if
    the folder holds no causal language model, or not all of its weights.
    """
    from transformers import AutoModelForCausalLM

    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    try:
        with _no_progress_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=dtype, output_loading_info=True
            )
    except Exception as error:
        raise EngineError(f"the model in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise EngineError(
            f"{folder} lacks {len(missing)} of the model's weights, {missing[0]!r} first"
        )
    return model.eval().to(device)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing one; loading is a part of somebody else's progress."""
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
    """A share of what is free now, at least 64 MiB."""
    if device.type == "cuda":
        free, share = torch.cuda.mem_get_info(device)[0], CACHE_SHARE_GPU
    else:
        free, share = _free_memory(), CACHE_SHARE_CPU
    return max(int(free * share), 64 << 20)


def _free_memory() -> int:
    """Bytes that this process may still take: the system's, or its control group's if less."""
    known = [4 << 30]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known = [int(line.split()[1]) << 10]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            known.append(int(limit) - used)
    except (OSError, ValueError):
        return max(min(known), 0)
    return max(min(known), 0)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """From generation_config, else config, else the tokenizer; may be empty."""
    for source in (model.generation_config, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


# ---- proof


def _decoders(model: PreTrainedModel, *, max_batch: int, prefix_bytes: int) -> Iterator[Decoder]:
    """The ways to compute a step, best first."""
    register()
    original = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(ATTENTION)
        yield SlotDecoder(model, max_batch=max_batch, prefix_bytes=prefix_bytes)
        model.set_attn_implementation(original)
    for feeding in Feeding:
        yield SingleDecoder(model, feeding, prefix_bytes=prefix_bytes)


def _proved_decoder(model: PreTrainedModel, vocab_size: int, length: int, **limits: int) -> Decoder:
    """The best way that gives the same logits as the model's plain forward pass."""
    random = np.random.default_rng(0)
    texts = [random.integers(0, vocab_size, n).astype(np.int32) for n in (length, length // 2)]
    expected = [_plain_logits(model, ids) for ids in texts]
    half = model.dtype in (torch.float16, torch.bfloat16)
    tolerance = 5e-2 if half else 1e-3
    faults = []
    for decoder in _decoders(model, **limits):
        try:
            worst = _worst_difference(decoder, texts, expected)
        except Exception as error:  # noqa: BLE001 - a model may raise anything on the wrong path
            faults.append(f"{decoder.name}: {type(error).__name__}: {error}")
            continue
        if worst <= tolerance:
            if faults:
                _log.warning("embedded engine computes %r (%s)", decoder.name, "; ".join(faults))
            return decoder
        faults.append(f"{decoder.name}: logits differ by {worst:.2g}")
    raise EngineError(f"not a causal language model that can be sampled: {'; '.join(faults)}")


def _plain_logits(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """Logits after every id, shape (T, vocabulary), without any cache."""
    row = torch.from_numpy(ids).long().to(model.device)[None]
    logits: torch.Tensor = model(input_ids=row, use_cache=False).logits[0].float()
    return logits


def _worst_difference(
    decoder: Decoder, texts: list[np.ndarray], expected: list[torch.Tensor]
) -> float:
    """Largest relative difference over a batch that joins late, comes in pieces, and decodes."""
    prompts = [ids[:-4] for ids in texts]
    calls = [_call(ids) for ids in prompts]
    worst = 0.0

    def step(work: list[tuple[BatchedCall, int]]) -> None:
        nonlocal worst
        assert decoder.reserve(work)
        logits = decoder.forward(work)
        ready = [call for call, _ in work if call.pending == 0]
        for row, call in zip(logits, ready, strict=True):
            which = calls.index(call)
            wanted = expected[which][call.length - 1]
            difference = (row.float() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
            call.append(int(texts[which][call.length]), 0.0, 0)

    first, second = calls
    decoder.admit(first, 0)
    piece = 5 if decoder.pieces else first.length
    step([(first, piece)])
    decoder.admit(second, 0)
    step([(second, second.length), (first, first.pending)])
    for _ in range(2):
        step([(call, 1) for call in calls])
    decoder.release(first, keep=False)
    step([(second, 1)])
    decoder.release(second, keep=False)
    return worst


def _call(ids: np.ndarray) -> BatchedCall:
    return BatchedCall(
        "probe", ids, Sampling(), limit=8, stop_ids=frozenset(), decode=lambda _: "", mailbox=None
    )


def weights_of(
    source: Path | Mapping[str, torch.Tensor], model: PreTrainedModel
) -> Mapping[str, torch.Tensor]:
    """The weights to put into `model`: `source` itself, or read from a model folder.

    Raises `EngineError` unless names and shapes fit; nothing is changed then.
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
            f"the weights don't fit the model: {len(missing)} missing {missing[:2]}, "
            f"{len(unknown)} unknown {unknown[:2]}"
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
        """Logprobs of `sampled` after `prompt`, nothing cut away; float32, shape (T,)."""
        rows = torch.tensor([[*prompt.tolist(), *sampled.tolist()]])
        with torch.inference_mode():
            logits = self._model(input_ids=rows, use_cache=False).logits[0, len(prompt) - 1 : -1]
            spread = torch.log_softmax(logits.float() / temperature, dim=-1)
            taken: Logprobs = spread.gather(1, rows[0, len(prompt) :, None])[:, 0].numpy()
        return taken


class Feeding(StrEnum):
    """Ways to fill a model's own cache, best first."""

    PIECES = "pieces"
    """Any number of tokens at any time."""
    TOKENS = "tokens"
    """The whole prompt first, then one token at a time."""
    ANEW = "anew"
    """No cache: all tokens at each step."""


class SingleDecoder:
    """Computes steps call by call; see the module's docstring."""

    def __init__(self, model: PreTrainedModel, feeding: Feeding, *, prefix_bytes: int) -> None:
        self.name = f"single, {feeding.value}"
        self._model = model
        self._feeding = feeding
        self.prefixes = PrefixStore(prefix_bytes)
        parameters = inspect.signature(model.forward).parameters
        recurrent = "past_key_values" not in parameters and "cache_params" in parameters
        self._cache_name = "cache_params" if recurrent else "past_key_values"
        self.pieces = feeding is Feeding.PIECES
        """Whether a prompt may be computed in pieces."""

    def limit(self, cache_bytes: int) -> int | None:  # noqa: ARG002 - the contract's
        """Each cache grows by itself: there is no limit of ours."""
        return None

    def admit(self, call: BatchedCall, version: int) -> bool:
        """Take over the cache of an earlier call that `call` continues, if there is one."""
        call.state = None
        call.computed = 0
        call.cache_version = version
        entry, matched = self.prefixes.find(call.ids[: call.length - 1])
        if entry is not None and matched == len(entry.ids):
            self.prefixes.remove(entry)
            call.state = entry.cache
            call.computed = matched
        return True

    def reserve(self, work: Sequence[tuple[BatchedCall, int]]) -> bool:  # noqa: ARG002 - the contract's
        """Always: each cache grows by itself."""
        return True

    def release(self, call: BatchedCall, *, keep: bool) -> None:
        """Let go of `call`; with `keep` its cache is remembered."""
        if keep and call.state is not None and self._feeding is not Feeding.ANEW:
            ids = call.ids[: call.computed]
            self.prefixes.add(ids, call.state, sum(_tensor_bytes(call.state.layers)))
        call.state = None
        call.computed = 0
        call.cache_version = -1

    def wipe(self) -> None:
        """Nothing is shared between calls."""

    def forward(self, work: Sequence[tuple[BatchedCall, int]]) -> torch.Tensor:
        """Compute the next `count` ids of each call; advances `computed`.

        Returns logits of shape (R, vocabulary): one row, in order, for each call of `work` that
        has nothing left to compute.
        """
        rows = []
        for call, count in work:
            last = self._advance(call, call.computed + count)
            if call.pending == 0:
                rows.append(last)
        return torch.stack(rows) if rows else torch.empty(0)

    def _advance(self, call: BatchedCall, end: int) -> torch.Tensor:
        """Compute up to `end`; logits after the last token."""
        if self._feeding is Feeding.ANEW:
            output = self._model(input_ids=self._row(call, 0, end), use_cache=False)
            call.computed = end
            last: torch.Tensor = output.logits[0, -1]
            return last
        single = self._feeding is Feeding.TOKENS and call.state is not None
        while call.computed < end:
            until = call.computed + 1 if single else end
            output = self._model(
                input_ids=self._row(call, call.computed, until),
                use_cache=True,
                **({} if call.state is None else {self._cache_name: call.state}),
            )
            call.state = getattr(output, self._cache_name)
            call.computed = until
            last = output.logits[0, -1]
        return last

    def _row(self, call: BatchedCall, start: int, end: int) -> torch.Tensor:
        ids = torch.from_numpy(call.ids[start:end].copy()).long()
        return ids.to(self._model.device)[None]


def _tensor_bytes(layers: Iterable[Any]) -> Iterable[int]:
    """Sizes of all tensors that cache layers hold."""
    for layer in layers:
        for held in vars(layer).values():
            several = held if isinstance(held, (list, tuple)) else [held]
            yield from (t.numel() * t.element_size() for t in several if torch.is_tensor(t))
