"""A logits processor for a real vLLM: makes it say what a script says, and nothing else.

vLLM loads it by its own flag, `--logits-processors scripted_logits:ScriptedLogits`, in its own
environment (with `src` and this folder on `PYTHONPATH`). For each request whose prompt fits a
conversation of the script, the next token of the scripted turn gets a large bonus, so that real
sampling takes it; all else (prompt, cache, ids, logprobs, parser) is vLLM's. Where nothing fits,
the model speaks for itself.

The bonus comes after the raw logprobs are taken, so `raw_logprobs` are those of the model's own
weights for the scripted tokens, and can be computed again by a plain forward pass. The script is a
file in the form of `bridle.scripted.script`, named by `BRIDLE_TEST_SCRIPT`; it is read again when
it changes. A file of the same name with the suffix `.pace` has the seconds that each step takes at
least, for a test that must act in the middle of a reply.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from bridle.errors import EngineError
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import PromptView, choose, load_script
from bridle.scripted.tokenizer import load_tokenizer
from vllm import SamplingParams

SCRIPT = "BRIDLE_TEST_SCRIPT"
"""Environment variable with the path of the script; the file need not exist yet."""

BONUS = 1000.0
"""Added to one logit: no other token of a small model is ever drawn beside it."""

Saying = tuple[list[int], list[int]]
"""The ids to say, and vLLM's own list of what was sampled so far."""


class ScriptedLogits(LogitsProcessor):  # type: ignore[misc]  # vLLM is not beside us
    """See the module; one per server."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = load_tokenizer(vllm_config.model_config.tokenizer)
        self._path = Path(os.environ[SCRIPT])
        self._pace = self._path.with_suffix(".pace")
        self._read_at: int | None = None
        self._engine: ScriptedEngine | None = None
        self._said: dict[int, Saying] = {}
        """Place in the batch -> what is said there."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Any parameters will do."""

    def is_argmax_invariant(self) -> bool:
        """It decides every choice, the greedy one too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that came, went and changed places."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._said.pop(index, None)
        for index, _, prompt, sampled in batch_update.added:
            self._said.pop(index, None)
            words = self._words(prompt or [])
            if words is not None:
                self._said[index] = (words, sampled)
        for one, other, direction in batch_update.moved:
            moving, staying = self._said.pop(one, None), self._said.pop(other, None)
            if moving is not None:
                self._said[other] = moving
            if staying is not None and direction is MoveDirectionality.SWAP:
                self._said[one] = staying

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the bonus; `logits` is (requests, vocabulary)."""
        if self._pace.is_file():
            time.sleep(float(self._pace.read_text()))
        for index, (words, sampled) in self._said.items():
            if index < len(logits) and len(sampled) < len(words):
                logits[index, words[len(sampled)]] += BONUS
        return logits

    def _words(self, prompt: list[int]) -> list[int] | None:
        """Ids of the turn that this prompt gets; `None` = no conversation fits."""
        engine = self._scripted()
        if engine is None:
            return None
        ids = np.array(prompt, dtype=np.int32)
        view = PromptView(ids, self._tokenizer)
        try:
            conversation, number = choose(engine.script, view, None)
        except EngineError:
            return None
        turn = engine.script.conversations[conversation].turns[number]
        return engine._sample(turn, view.tools, ids).tolist()

    def _scripted(self) -> ScriptedEngine | None:
        if not self._path.is_file():
            return None
        changed = self._path.stat().st_mtime_ns
        if changed != self._read_at:
            self._engine = ScriptedEngine(load_script(self._path), tokenizer=self._tokenizer)
            self._read_at = changed
        return self._engine
