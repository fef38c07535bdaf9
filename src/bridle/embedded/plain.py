"""A plain forward pass over a model folder: the judge of anybody's logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridle.embedded.model import load_model

if TYPE_CHECKING:
    from bridle.types import Ids, Logprobs


class PlainModel:
    """The model of a folder in float32 on the CPU. `EngineError` if the folder holds none."""

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
