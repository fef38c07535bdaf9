"""Routing of a mixture of experts: recorded as it happens, or replayed as it was recorded.

Transformers has one router module in each layer with experts (`...Router`), which takes the best
`top_k` of all experts by `torch.topk` and returns their numbers last. `Routing` hooks into these.
While rows are replayed, the router's `topk` gives the recorded experts with the router's own
scores, so everything behind it (normalisation, gradients) is the model's own code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from bridle.errors import TrainingError
from bridle.experts import Rows
from bridle.types import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Routing:
    """Hooks on the routers of one model; use `routing_of`."""

    def __init__(self, model: PreTrainedModel, routers: dict[str, torch.nn.Module]) -> None:
        """Hook into the routers; they stay hooked."""
        self._model = ref(model)  # the routing is kept as long as the model, and not longer
        self._names = [*routers]
        self._recorded: list[torch.Tensor] | None = None
        self._replayed: torch.Tensor | None = None
        self._choosing: list[_Chosen] = []
        for number, router in enumerate(routers.values()):
            router.register_forward_pre_hook(partial(self._enter, number))
            router.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Within the context, record the experts of a forward pass.

        Yields a list that gets, for each layer, the experts' numbers, shape (tokens, top_k).
        """
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, rows: Rows | None) -> Iterator[None]:
        """Within the context, route the tokens of a forward pass to these experts; -1 and `None` =
        as the router decides.

        `rows` has the shape (tokens, layers, top_k); layers without experts may be among them. With
        gradient checkpointing it holds until the next pass, because the backward pass computes
        later. Raises `TrainingError` for experts of another model.
        """
        self._replayed = None if rows is None else self._columns(rows)
        try:
            yield
        finally:
            layers = self._of().modules() if torch.is_grad_enabled() else ()
            if not any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
                self._replayed = None

    def _of(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None
        return model

    def _columns(self, rows: Rows) -> torch.Tensor:
        layers = len(self._names)
        if rows.shape[1] != layers:
            found = [_LAYER.search(name) for name in self._names]
            places = [int(one[1]) for one in found if one is not None]
            if rows.shape[1] != self._of().config.get_text_config().num_hidden_layers:
                raise TrainingError(
                    f"experts of {rows.shape[1]} layers were recorded; the model has {layers} "
                    "layers with experts"
                )
            rows = rows[:, places]
        return torch.from_numpy(rows.astype(np.int64)).to(self._of().device)

    def _enter(self, number: int, router: torch.nn.Module, _: object) -> None:
        if self._replayed is not None:
            mode = _Chosen(self._replayed[:, number], router)
            mode.__enter__()
            self._choosing.append(mode)

    def _leave(self, router: torch.nn.Module, _: object, output: object) -> None:
        if self._choosing:
            mode = self._choosing.pop()
            mode.__exit__(None, None, None)
            if not mode.used and output is not None:
                raise TrainingError(
                    f"{mode.rows.shape[1]} experts per token were recorded, and "
                    f"{type(router).__name__} takes another number"
                )
        if self._recorded is not None and isinstance(output, tuple):
            chosen = output[-1]
            if torch.is_tensor(chosen) and chosen.ndim == 2 and not chosen.is_floating_point():
                self._recorded.append(chosen)

    def rows(self, recorded: list[torch.Tensor]) -> Rows | None:
        """Return the experts of a recorded forward pass, shape (tokens, layers, top_k).

        `None` = a router's output has an unknown form.
        """
        if len(recorded) != len(self._names):
            return None
        found: Rows = torch.stack(recorded, 1).to(torch.int16).cpu().numpy()
        return found


class _Chosen(TorchFunctionMode):  # type: ignore[misc]
    """Inside, the choice among all experts gives those of `rows`, where they are known."""

    def __init__(self, rows: torch.Tensor, router: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.used = False
        self._experts = router.weight.shape[0] if hasattr(router, "weight") else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: JSON | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if func not in {torch.topk, torch.Tensor.topk}:
            return found
        scores, own = args[0], found[1]
        if own.shape[1:] != self.rows.shape[1:] or self._experts not in {None, scores.shape[-1]}:
            return found
        if len(own) != len(self.rows):
            raise TrainingError(
                f"experts of {len(self.rows)} tokens were recorded, and the forward pass has "
                f"{len(own)} tokens"
            )
        if int(self.rows.max()) >= scores.shape[-1]:
            raise TrainingError(
                f"expert {int(self.rows.max())} was recorded, and the model has only "
                f"{scores.shape[-1]} experts"
            )
        self.used = True
        chosen = torch.where(self.rows < 0, own, self.rows)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


_known: WeakKeyDictionary[PreTrainedModel, Routing | None] = WeakKeyDictionary()


def routing_of(model: PreTrainedModel) -> Routing | None:
    """Return access to the experts of a model, the same object at each call; `None` = it has no
    experts.
    """
    if model not in _known:
        named = dict(model.named_modules())
        routers = {
            name: one for name, one in named.items() if type(one).__name__.endswith("Router")
        }
        _known[model] = Routing(model, routers) if routers else None
    return _known[model]
