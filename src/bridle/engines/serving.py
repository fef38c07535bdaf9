"""Helpers of serving engines beside HTTP: the model's files, and asking for token ids."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from bridle.engines import vllm_schemas
from bridle.engines.base import EngineInfo
from bridle.engines.http import EngineClient, HttpCall
from bridle.engines.ids import IdsError, compact, parse_ids
from bridle.errors import EngineError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids


API_KEY_VARIABLE = "BRIDLE_ENGINE_API_KEY"
"""Environment variable with the key that a server was started with (`--api-key`)."""


class Serving(ABC):
    """The part of an adapter that is the same for every server with `/tokenize`."""

    _client: EngineClient
    _info: EngineInfo | None = None
    """What was found at the start; `None` = not yet started."""
    version = 0
    """Policy version of the server's weights, where replies do not tell it."""

    @classmethod
    def open(
        cls,
        target: str,
        *,
        tokenizer: str | None = None,  # noqa: ARG003 - the server has its own
        allow_untokenized: bool = False,
    ) -> Self:
        """An adapter for the server at URL `target`, with the key of `BRIDLE_ENGINE_API_KEY`."""
        key = os.environ.get(API_KEY_VARIABLE)
        options = {"api_key": key, "allow_untokenized": allow_untokenized}
        return cls(target, **options)  # type: ignore[call-arg]  # every adapter takes these

    @abstractmethod
    async def _connect(self) -> EngineInfo:
        """Ask the server what it is, and probe it."""

    async def start(self) -> EngineInfo:
        """Connect, ask, probe. Raises `EngineError` saying what is missing and how to get it."""
        if self._info is None:
            self._info = await self._connect()
        return replace(self._info, version=self.version)

    async def health(self) -> None:
        """Ask the server whether it can sample; raises `EngineError`."""
        await self._client.get("/health")

    async def set_version(self, version: int) -> None:
        """Tokens from here on carry `version`, where replies do not tell their own."""
        self.version = version

    async def tokenize(self, text: str) -> Ids | None:
        """The ids of `text` by the server's tokenizer; `None` = it has no such route."""
        return await tokenized(self._client, {"prompt": text, "add_special_tokens": False})

    async def render(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids | None:
        """The prompt that the server's own template makes; `None` = it cannot be asked."""
        try:
            return await self.template(messages, tools, arguments)
        except EngineError:
            return None

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """The prompt that the server's own template makes; see `Templating`."""
        body: JSON = {"messages": messages, "chat_template_kwargs": arguments}
        return await told_ids(self._client, "/tokenize", body | ({"tools": tools} if tools else {}))


def tokenizer_dir(root: object) -> Path | None:
    """The model's folder, where the server names one that is on this machine."""
    folder = Path(root) if isinstance(root, str) else None
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def end_ids(folder: Path | None) -> tuple[int, ...]:
    """End tokens by the model's own files; empty where they are not to be had."""
    for name in ("generation_config.json", "config.json"):
        found = _config(folder, name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list):
            return tuple(one for one in found if isinstance(one, int))
    return ()


def vocab_size(folder: Path | None) -> int | None:
    """Return the vocabulary size from the model's `config.json`; `None` = not there."""
    config = _config(folder, "config.json")
    text = config.get("text_config")
    for found in (
        text.get("vocab_size") if isinstance(text, dict) else None,
        config.get("vocab_size"),
    ):
        if isinstance(found, int) and found > 0:
            return found
    return None


def _config(folder: Path | None, name: str) -> JSON:
    if folder is None:
        return {}
    try:
        read = json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


UNNAMED = "default"
"""What vLLM calls its weights until it is told a version (0.32.0, `config/model.py`)."""


def as_version(given: int | str, *, unnamed: int | None = None) -> int:
    """A policy version as Bridle counts it; vLLM's may be any text.

    `unnamed` is the version of weights that nobody gave one. Raises `EngineError` (400) for other
    text, because an order of versions could only be guessed.
    """
    if given == UNNAMED and unnamed is not None:
        return unnamed
    try:
        return int(given)
    except ValueError:
        raise EngineError(
            f"weight version {given!r} is no number; number the versions, as in "
            '`POST /update_weight_version {"new_version": "7"}`',
            status=400,
        ) from None


async def tokenized(client: EngineClient, body: JSON) -> Ids | None:
    """Return the ids from `POST /tokenize`; `None` = the route fails."""
    try:
        return await told_ids(client, "/tokenize", body)
    except EngineError:
        return None


async def told_ids(client: EngineClient, path: str, body: JSON) -> Ids:
    """The ids in what a route answers: `tokens` in vLLM's form and SGLang's, or `token_ids`."""
    text = await client.post(path, msgspec.json.encode(body), HttpCall(), prompt_tokens=0)
    try:
        answer = _TOLD.decode(text)
        listed = answer.tokens if answer.tokens not in vllm_schemas.ABSENT else answer.token_ids
        return parse_ids(compact(bytes(listed)))
    except (msgspec.MsgspecError, IdsError) as error:
        raise EngineError(f"{client.base_url}{path} tells no ids: {error}") from None


class _Told(msgspec.Struct):
    tokens: msgspec.Raw = vllm_schemas.EMPTY
    token_ids: msgspec.Raw = vllm_schemas.EMPTY


_TOLD = msgspec.json.Decoder(_Told)
