"""Teachers: servers that score given ids and sample nothing that is kept.

vLLM gives the logprobs of a prompt by `prompt_logprobs` on its completions route, SGLang by
`return_logprob` with `logprob_start_len` 0 on `/generate`. Both repeat the ids, and a reply about
other ids is refused. Nothing is rendered or tokenised: exact ids in, one logprob for each out.

Sources: vLLM 0.32.0, `entrypoints/openai/completion/protocol.py`; SGLang 0.5.23,
`srt/managers/tokenizer_manager.py`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from bridle.engines import vllm_schemas
from bridle.engines.adapter import API_KEY_VARIABLE, tokenized, tokenizer_dir
from bridle.engines.base import GarbledError
from bridle.engines.connection import HttpCall
from bridle.engines.http import EngineClient
from bridle.engines.sglang_routes import GENERATE
from bridle.errors import ConfigError, EngineError
from bridle.types import JSON, Ids, Logprobs

SILENT_S = 1800.0
"""Time that a teacher may be silent within one call."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A model's logprobs of T given ids, at temperature 1."""

    logprobs: Logprobs
    """Shape (T,); 0.0 for the first id of a sequence, which nothing precedes."""
    top_ids: npt.NDArray[np.int32]
    """The K likeliest ids in place of each, likeliest first; shape (T, K), -1 for the first."""
    top_logprobs: Logprobs
    """Shape (T, K); 0.0 for the first."""

    def after(self, start: int) -> Scores:
        """Return the scores from position `start` on."""
        return Scores(self.logprobs[start:], self.top_ids[start:], self.top_logprobs[start:])


class ServedTeacher(ABC):
    """Model behind a server's API that scores ids."""

    vocab_size: int | None = None
    """`None` = not reported."""

    def __init__(self, base_url: str) -> None:
        key = os.environ.get(API_KEY_VARIABLE)
        self._client = EngineClient(base_url, api_key=key, timeout_s=SILENT_S)

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._client.aclose()

    @abstractmethod
    async def folder(self) -> Path | None:
        """Return the folder with the server's tokenizer; `None` = not on this machine."""

    async def tokenize(self, text: str) -> Ids | None:
        """Tokenise `text` by the server's tokenizer; `None` = it has no such route."""
        return await tokenized(self._client, {"prompt": text, "add_special_tokens": False})

    @abstractmethod
    async def score(self, ids: Ids, top: int) -> Scores:
        """Return the logprobs of `ids` and the `top` likeliest tokens at each position.

        `EngineError` for a request that the server refuses, `GarbledError` for a reply about other
        ids or with a logprob missing.
        """

    async def _post(self, path: str, body: JSON, prompt_tokens: int) -> bytes:
        text = msgspec.json.encode(body)
        return await self._client.post(path, text, HttpCall(), prompt_tokens=prompt_tokens)


class VllmTeacher(ServedTeacher):
    """Teacher on a vLLM server: the first model that it lists."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        self._model = ""

    async def folder(self) -> Path | None:
        """Return the folder with the server's tokenizer; `None` = not on this machine.

        Also finds the name of the server's model.
        """
        models = (await self._client.get("/v1/models")).get("data") or []
        if not models:
            raise EngineError(
                f"the teacher's server lists no model at {self._client.base_url}/v1/models"
            )
        self._model = str(models[0]["id"])
        return tokenizer_dir(models[0].get("root"))

    async def score(self, ids: Ids, top: int) -> Scores:
        """Return the logprobs of `ids` and the `top` likeliest tokens at each position.

        vLLM samples one token for that, so one more must fit its context.
        """
        body = {
            "model": self._model,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top,
            "return_token_ids": True,
        }
        read = _read(await self._post(vllm_schemas.COMPLETIONS, body, len(ids)), _VLLM)
        (choice,) = read.choices
        _check_ids(ids, choice.prompt_token_ids)
        listed = [at or {} for at in choice.prompt_logprobs]
        named = [{id_: one.logprob for id_, one in at.items()} for at in listed]
        return _scores(ids, top, named)


class SglangTeacher(ServedTeacher):
    """Teacher on an SGLang server."""

    async def folder(self) -> Path | None:
        about = await self._client.get("/model_info")
        return tokenizer_dir(about.get("tokenizer_path")) or tokenizer_dir(about.get("model_path"))

    async def score(self, ids: Ids, top: int) -> Scores:
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
            "stream": False,
        }
        meta = _read(await self._post(GENERATE, body, len(ids)), _SGLANG).meta_info
        _check_ids(ids, [one[1] for one in meta.input_token_logprobs])
        listed = meta.input_top_logprobs or [None] * len(ids)
        own = [{id_: value} for value, id_, _ in meta.input_token_logprobs]
        best = [{id_: value for value, id_, _ in at or ()} for at in listed]
        return _scores(ids, top, [one | two for one, two in zip(own, best, strict=True)])


TEACHERS: dict[str, type[ServedTeacher]] = {
    "http": VllmTeacher, "https": VllmTeacher, "sglang": SglangTeacher,
}  # fmt: skip


def served_teacher(spec: str) -> ServedTeacher:
    """Return the client of the teacher model at `http://HOST:PORT` (vLLM) or `sglang:URL`.

    Raises `ConfigError` for another form.
    """
    kind, _, target = spec.partition(":")
    if kind not in TEACHERS or not target:
        raise ConfigError(
            f"unknown teacher {spec!r}; known forms: embedded:DIR, http://HOST:PORT (vLLM), "
            "sglang:URL"
        )
    return TEACHERS[kind](target if kind == "sglang" else spec)


_Read = TypeVar("_Read")


class _Logprob(msgspec.Struct):
    logprob: float


class _VllmChoice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None]
    prompt_token_ids: list[int]


class _VllmScores(msgspec.Struct):
    choices: list[_VllmChoice]


_Named = tuple[float | None, int, str | None]
"""SGLang's form of a logprob: value, id, text."""


class _SglangMeta(msgspec.Struct):
    input_token_logprobs: list[_Named]
    input_top_logprobs: list[list[_Named] | None] | None = None


class _SglangScores(msgspec.Struct):
    meta_info: _SglangMeta


_VLLM = msgspec.json.Decoder(_VllmScores, strict=False)  # its keys are ids written as text
_SGLANG = msgspec.json.Decoder(_SglangScores)


def _read(body: bytes, decoder: msgspec.json.Decoder[_Read]) -> _Read:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise GarbledError(
            f"the teacher's reply has no logprobs of the prompt: {error}: {body[:200]!r}"
        ) from None


def _check_ids(sent: Ids, found: Sequence[int]) -> None:
    if sent.tolist() != list(found):
        raise GarbledError(
            f"the teacher scored other token ids than it was sent ({len(found)} for {len(sent)})"
        )


def _scores(ids: Ids, top: int, listed: Sequence[Mapping[int, float | None]]) -> Scores:
    """Make the scores of a reply; `listed` has the logprobs by id at each position."""
    logprobs = np.zeros(len(ids), np.float32)
    top_ids = np.full((len(ids), top), -1, np.int32)
    top_logprobs = np.zeros((len(ids), top), np.float32)
    for at in range(1, len(ids)):
        known = {id_: value for id_, value in listed[at].items() if value is not None}
        if int(ids[at]) not in known or len(known) < top:
            raise GarbledError(f"the teacher gave no logprobs at position {at} of the prompt")
        logprobs[at] = known[int(ids[at])]
        best = sorted(known.items(), key=lambda one: (-one[1], one[0]))[:top]
        for place, (id_, value) in enumerate(best):
            top_ids[at, place], top_logprobs[at, place] = id_, value
    return Scores(logprobs, top_ids, top_logprobs)
