"""Checks of the ids, logprobs and prompts that engines report, the same for every route.

An adapter reads its server's form; a `ReplyCheck` decides whether the values can have been sampled
at all. Nothing of a reply that fails becomes a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bridle.engines.base import EngineInfo, GarbledError, GenerateChunk, GenerateRequest
from bridle.engines.ids import IdsError, compact, parse_ids
from bridle.types import LogprobMode

if TYPE_CHECKING:
    import numpy.typing as npt

    from bridle.types import Ids, Logprobs

ROUNDING: Final = 1e-3
"""Nats by which a logprob may be above zero: sums in float32 come out so."""


class ReplyCheck:
    """Checks one reply, piece by piece.

    `info` is what the engine said at its start; `vocab_size` holds where it did not tell its own.
    """

    __slots__ = ("_count", "_limit", "_needs_logprobs", "_needs_prompt", "_request")

    def __init__(
        self, request: GenerateRequest, info: EngineInfo | None, vocab_size: int | None
    ) -> None:
        self._request = request
        self._count = 0
        self._limit = vocab_size
        self._needs_logprobs = self._needs_prompt = False
        if info is not None:
            self._limit = info.vocab_size or vocab_size
            self._needs_logprobs = info.logprob_mode is not LogprobMode.NONE
            tells = info.tells_prompt_streamed if request.stream else info.tells_prompt
            self._needs_prompt = tells and not request.by_messages

    def take(self, chunk: GenerateChunk) -> None:
        """Raise `GarbledError` if the engine cannot have sampled this piece."""
        if chunk.prompt_ids_json is not None:
            self._needs_prompt = False
            if chunk.prompt_ids_json != self._request.prompt.json():
                self._check_prompt(chunk.prompt_ids_json)
        count = chunk.output_ids.size
        if not count:
            return
        if self._needs_prompt:
            raise GarbledError(
                "the engine no longer tells the prompt ids that it used, as it did when it was "
                "probed at its start; was it replaced, or a proxy put between?"
            )
        self._count += count
        most = self._request.sampling.max_tokens
        if most is not None and self._count > most:
            raise GarbledError(
                f"the engine sampled {self._count} tokens or more, but max_tokens was {most}"
            )
        self._check_range("sampled", *_least_and_most(chunk.output_ids))
        values = chunk.logprobs
        found = values.size
        if found != count and (found or self._needs_logprobs):
            raise GarbledError(f"the engine gave {count} ids, but {found} logprobs")
        if not found:
            return
        low, high = _least_and_most(values)
        if not (high <= ROUNDING and low > -np.inf):  # a comparison with NaN is false
            raise GarbledError(
                f"the engine gave logprobs between {low} and {high}: finite numbers not above 0 "
                "are expected"
            )

    def _check_prompt(self, told: bytes) -> None:
        try:
            used = parse_ids(compact(told))
        except IdsError as error:
            raise GarbledError(f"the engine tells prompt ids that are none: {error}") from None
        if len(used):
            self._check_range("was prompted with", int(used.min()), int(used.max()))

    def _check_range(self, did: str, low: int, high: int) -> None:
        limit = self._limit
        if low < 0 or (limit is not None and high >= limit):
            wrong = low if low < 0 else high
            raise GarbledError(f"the engine {did} id {wrong}; its vocabulary has {limit} ids")


def check_paired(ids: Ids, named: Ids | npt.NDArray[np.integer]) -> None:
    """Raise `GarbledError` unless the logprobs of `named` ids are those of the sampled `ids`."""
    if not np.array_equal(named, ids):
        wrong = int(np.argmin(named == ids))
        raise GarbledError(
            f"the engine's logprobs belong to other ids: at {wrong} it sampled {int(ids[wrong])} "
            f"and gives the logprob of {int(named[wrong])}"
        )


def _least_and_most(values: Ids | Logprobs) -> tuple[Any, Any]:
    if values.shape == (1,):  # streams have a piece per token
        return values[0], values[0]
    return _least(values), _most(values)


_least, _most = np.minimum.reduce, np.maximum.reduce
