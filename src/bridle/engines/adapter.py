"""Shared parts of the adapters for servers: base class, the model's files, checks of replies.

An adapter reads its server's form; a `ReplyCheck` rejects values that no engine can have sampled.
Nothing of a rejected reply becomes a sample.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, TypedDict, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from bridle.engines import vllm_schemas
from bridle.engines.base import EngineInfo, GarbledError, GenerateChunk, GenerateRequest
from bridle.engines.connection import HttpCall
from bridle.engines.http import EngineClient
from bridle.engines.ids import IdsError, compact, parse_ids
from bridle.engines.probe import ProbeReport
from bridle.errors import EngineError
from bridle.types import JSON, Ids, LogprobMode, Logprobs

API_KEY_VARIABLE = "BRIDLE_ENGINE_API_KEY"
"""Environment variable with the server's key (`--api-key`)."""


class ServerOptions(TypedDict, total=False):
    """Options of every adapter for a server."""

    api_key: str | None
    model: str | None
    """The model to use; `None` = the first that the server lists."""
    logprob_mode: LogprobMode | None
    """The mode that the server's owner vouches for, if the probe cannot measure it."""
    allow_untokenized: bool
    """Accept a server that gives text only; messages must then come with each request."""
    timeout_s: float
    """Time that the server may be silent within one call."""


class ServerAdapter(ABC):
    """Base of the adapters for servers that have `/tokenize`."""

    def __init__(self, base_url: str, **options: Unpack[ServerOptions]) -> None:
        self._client = EngineClient(
            base_url, api_key=options.get("api_key"), timeout_s=options.get("timeout_s", 1800.0)
        )
        self._model = options.get("model") or ""
        self._assumed_mode = options.get("logprob_mode")
        self._allow_untokenized = options.get("allow_untokenized", False)
        self._context_length = 0
        self._gives_ids = False
        """True once it was started and samples under ids."""
        self._info: EngineInfo | None = None
        """Capabilities found at the start; `None` = not yet started."""
        self._strict = False
        """True if a reply without ids or logprobs is an error; off during the probe."""
        self.version = 0
        """Policy version of the server's weights, if replies do not report it."""
        self.server_version: str | None = None
        """`None` = not reported."""
        self.report: ProbeReport | None = None
        """Findings of the last probe."""

    @classmethod
    def open(
        cls,
        target: str,
        *,
        tokenizer: str | None = None,  # noqa: ARG003 - the server has its own
        allow_untokenized: bool = False,
    ) -> Self:
        """Return an adapter for the server at URL `target`, with the API key of the environment."""
        key = os.environ.get(API_KEY_VARIABLE)
        return cls(target, api_key=key, allow_untokenized=allow_untokenized)

    @abstractmethod
    async def _connect(self) -> EngineInfo:
        """Ask the server for its capabilities, and probe it."""

    def _accept(self, report: ProbeReport, folder: Path | None) -> EngineInfo:
        """Make the engine's info from the probe; `folder` is the model's, if it is here.

        Raises `EngineError` if the server lacks what training needs.
        """
        self.report = report
        report.require(self._client.base_url, allow_untokenized=self._allow_untokenized)
        self._strict = report.usable or not self._allow_untokenized
        return EngineInfo(
            model=self._model,
            context_length=self._context_length,
            logprob_mode=report.logprob_mode,
            token_in=report.token_in,
            version=self.version,
            eos_token_ids=end_ids(folder),
            tokenizer_dir=None if folder is None else str(folder),
            grammar=True,
            remote=True,
            vocab_size=vocab_size(folder),
            tells_prompt=report.tells_prompt,
            tells_prompt_streamed=report.tells_prompt_streamed,
        )

    @property
    def _token_in(self) -> bool:
        return self._info is None or self._info.token_in

    @property
    def gives_text(self) -> bool:
        """Return whether replies carry the text as the server itself parsed it (content, reasoning,
        calls).
        """
        return self._info is not None and not self._strict

    async def start(self) -> EngineInfo:
        """Connect to the server and probe it.

        Raises `EngineError` saying what is missing and how to get it.
        """
        if self._info is None:
            self._info = await self._connect()
            self._gives_ids = self._info.token_in and self._strict
        return replace(self._info, version=self.version)

    async def health(self) -> None:
        """Check whether the server can sample; raises `EngineError`."""
        await self._client.get("/health")

    async def is_paused(self) -> bool:
        """Return whether the server is paused; see `Pausable.is_paused`."""
        return (await self._client.get("/is_paused", optional=True)).get("is_paused") is True

    async def set_version(self, version: int) -> None:
        """Set the policy version of later tokens, for replies that do not report their own."""
        self.version = version

    async def tokenize(self, text: str) -> Ids | None:
        """Tokenise `text` by the server's tokenizer; `None` = it has no such route."""
        return await tokenized(self._client, {"prompt": text, "add_special_tokens": False})

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """Return the prompt ids that the server's own chat template makes of messages."""
        body: JSON = {"messages": messages, "chat_template_kwargs": arguments}
        return await ids_from(self._client, "/tokenize", body | ({"tools": tools} if tools else {}))


def tokenizer_dir(root: object) -> Path | None:
    """Return the model's folder, if the path `root` that the server names is on this machine."""
    folder = Path(root) if isinstance(root, str) else None
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def end_ids(folder: Path | None) -> tuple[int, ...]:
    """Return the ids of the end tokens in the model's own files; empty if they have none."""
    for name in ("generation_config.json", "config.json"):
        found = read_config(folder, name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list):
            return tuple(one for one in found if isinstance(one, int))
    return ()


def vocab_size(folder: Path | None) -> int | None:
    """Return the vocabulary size from the model's `config.json`; `None` = it is not given there."""
    config = read_config(folder)
    text = config.get("text_config")
    for found in (
        text.get("vocab_size") if isinstance(text, dict) else None,
        config.get("vocab_size"),
    ):
        if isinstance(found, int) and found > 0:
            return found
    return None


def read_config(folder: Path | None, name: str = "config.json") -> JSON:
    """Return one of a model's JSON files; empty if it cannot be read."""
    if folder is None:
        return {}
    try:
        read = json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


UNNAMED = "default"
"""vLLM's name for weights of unknown version (0.32.0, `config/model.py`)."""


ROUTER: Final = (
    "is there a router in front? It hides what training needs: give each server behind it, or its "
    "list of them (--engines-from http://ROUTER/list_workers, sglang:http://... for SGLang)"
)
"""Advice for an answer that a server gives and a router in front of it does not."""


def as_version(given: int | str, *, unnamed: int | None = None) -> int:
    """Return the policy version that an engine reports as a number; vLLM's may be any text.

    `unnamed` is the version of weights without a number. Raises `EngineError` (400) for other text,
    because an order of versions could only be guessed.
    """
    if given == UNNAMED and unnamed is not None:
        return unnamed
    try:
        return int(given)
    except ValueError:
        raise EngineError(
            f"the engine's weight version {given!r} is not a number; number the versions, as in "
            '`POST /update_weight_version {"new_version": "7"}`',
            status=400,
        ) from None


async def tokenized(client: EngineClient, body: JSON) -> Ids | None:
    """Return the ids that the server's `POST /tokenize` returns; `None` = the route fails."""
    try:
        return await ids_from(client, "/tokenize", body)
    except EngineError:
        return None


async def ids_from(client: EngineClient, path: str, body: JSON) -> Ids:
    """Return the token ids in the server's answer on `path`: `tokens` (vLLM, SGLang) or
    `token_ids`.
    """
    text = await client.post(path, msgspec.json.encode(body), HttpCall(), prompt_tokens=0)
    try:
        answer = _ROUTE_IDS.decode(text)
        listed = answer.tokens if answer.tokens not in vllm_schemas.ABSENT else answer.token_ids
        return parse_ids(compact(bytes(listed)))
    except (msgspec.MsgspecError, IdsError) as error:
        raise EngineError(f"{client.base_url}{path} returned no token ids: {error}") from None


class _RouteIds(msgspec.Struct):
    tokens: msgspec.Raw = vllm_schemas.EMPTY
    token_ids: msgspec.Raw = vllm_schemas.EMPTY


_ROUTE_IDS = msgspec.json.Decoder(_RouteIds)


ROUNDING: Final = 1e-3
"""Nats by which a logprob may exceed zero, as rounding in float32 does."""


class ReplyCheck:
    """Check of one reply, piece by piece.

    `info` is the engine's at its start; `vocab_size` is used if that has none.
    """

    __slots__ = ("_count", "_limit", "_needs_logprobs", "_needs_prompt", "_request", "is_ours")

    def __init__(
        self, request: GenerateRequest, info: EngineInfo | None, vocab_size: int | None
    ) -> None:
        self._request = request
        self._count = 0
        self.is_ours = True
        """True if no piece tells another prompt than ours."""
        self._limit = vocab_size
        self._needs_logprobs = self._needs_prompt = False
        if info is not None:
            self._limit = info.vocab_size or vocab_size
            self._needs_logprobs = info.logprob_mode is not LogprobMode.NONE
            tells = info.tells_prompt_streamed if request.stream else info.tells_prompt
            self._needs_prompt = tells and not request.by_messages

    def take(self, chunk: GenerateChunk) -> None:
        """Raise `GarbledError` if the engine cannot have sampled this piece of the reply."""
        if chunk.prompt_ids_json is not None:
            self._needs_prompt = False
            if chunk.prompt_ids_json != self._request.prompt.json():
                self.is_ours = False
                self._check_prompt(chunk.prompt_ids_json)
        ids, values = chunk.output_ids, chunk.logprobs
        count = ids.size
        if not count:
            return
        if self._needs_prompt:
            raise GarbledError(
                "the engine no longer reports its prompt ids, as it did at its start; was it "
                "replaced, or is there a proxy in between?"
            )
        self._count += count
        most = self._request.sampling.max_tokens
        if most is not None and self._count > most:
            raise GarbledError(
                f"the engine sampled {self._count} tokens or more, but max_tokens was {most}"
            )
        low, high, least, largest = chunk.bounds or _bounds(ids, values)
        if low < 0 or (self._limit is not None and high >= self._limit):
            self._check_range("sampled", low, high)
        found = values.size
        if found != count and (found or self._needs_logprobs):
            raise GarbledError(f"the engine gave {count} token ids, but {found} logprobs")
        if not found:
            return
        if not (largest <= ROUNDING and least > -np.inf):  # a comparison with NaN is false
            raise GarbledError(
                f"the engine gave logprobs between {least} and {largest}: finite numbers not above "
                "0 are expected"
            )

    def _check_prompt(self, reported: bytes) -> None:
        try:
            used = parse_ids(compact(reported))
        except IdsError as error:
            raise GarbledError(f"the engine reports invalid prompt ids: {error}") from None
        if len(used):
            self._check_range("was prompted with", int(used.min()), int(used.max()))

    def _check_range(self, did: str, low: int, high: int) -> None:
        limit = self._limit
        if low < 0 or (limit is not None and high >= limit):
            wrong = low if low < 0 else high
            raise GarbledError(f"the engine {did} token id {wrong}; its vocabulary has {limit} ids")


def check_paired(ids: Ids, named: Ids | npt.NDArray[np.integer]) -> None:
    """Raise `GarbledError` unless the ids that came with the logprobs (`named`) are the sampled
    `ids`.
    """
    if not np.array_equal(named, ids):
        wrong = int(np.argmin(named == ids))
        raise GarbledError(
            f"the engine's logprobs belong to other token ids: at position {wrong} it sampled id "
            f"{int(ids[wrong])} and gives the logprob of id {int(named[wrong])}"
        )


def _bounds(ids: Ids, values: Logprobs) -> tuple[int, int, float, float]:
    """Return the least and the largest id and logprob, both NaN if one is; 0 without logprobs."""
    # Twice as fast as `np.minimum.reduce`; a stream has a piece per token.
    low, high = (ids.argmin(), ids.argmax()) if ids.size > 1 else (0, 0)
    if not values.size:
        return ids[low], ids[high], 0.0, 0.0
    least, largest = (values.argmin(), values.argmax()) if values.size > 1 else (0, 0)
    return ids[low], ids[high], values[least], values[largest]
