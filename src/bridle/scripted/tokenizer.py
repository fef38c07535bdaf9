"""A tokenizer folder: text to ids, ids to text, messages to prompt text.

It needs only the packages `tokenizers` and `jinja2`: it loads in 0.2 s of CPU time, against 1 s for
`bridle.prompting.tokenizer`, which stands on transformers. Engines and their server use it; the
gateway renders its prompts by `bridle.prompting`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np

from bridle.config import builtin_tokenizer_dir
from bridle.errors import ConfigError, EngineError, RenderError
from bridle.types import JSON, Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_MARKERS = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
REPLACEMENT = "\ufffd"
"""Text of bytes that are no whole character."""


class ChatTokenizer:
    """A tokenizer folder: `tokenizer.json` and, optionally, a chat template."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder}: no tokenizer.json; give the folder of a fast tokenizer")
        self.folder = folder
        self._tokenizer = _read_tokenizer(str(path), path.stat().st_mtime_ns)
        self._config: JSON = _read_json(folder / "tokenizer_config.json")
        self._template = self._compile(folder)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        """Number of ids, added tokens included; ids are below it."""
        self.end_id = self._end_id()
        """The token that ends a turn."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._markers_are_special = any(t.special and t.content in _MARKERS for t in added)

    def _end_id(self) -> int:
        end = self._config.get("eos_token")
        name = end.get("content") if isinstance(end, dict) else end
        found = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        if found is None:
            found = self._tokenizer.token_to_id("<|im_end|>")
        if found is None:
            raise ConfigError(
                f"{self.folder}/tokenizer_config.json: eos_token: {name!r} is not a token of this "
                "tokenizer"
            )
        return found

    def _compile(self, folder: Path) -> jinja2.Template | None:
        path = folder / "chat_template.jinja"
        source = path.read_text() if path.is_file() else self._config.get("chat_template")
        if not isinstance(source, str):
            return None
        try:
            return _compiled(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of {folder} is not valid Jinja: {error}"
            ) from error

    def id_of(self, token: str) -> int | None:
        """Return the id of one token by its exact text; `None` = not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text; special tokens in it are recognised, none are added."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Ids | Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids, that of special tokens included unless `skip_special`."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._tokenizer.decode(plain, skip_special_tokens=skip_special)

    def visible(self, ids: Ids | Sequence[int]) -> str:
        """Return the text that a serving engine shows: no special tokens but reasoning and call
        markers.
        """
        if not self._markers_are_special:
            return self.decode(ids, skip_special=True)
        return self.decode([one for one in np.asarray(ids).tolist() if one != self.end_id])

    def render(
        self,
        messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text that the folder's chat template makes of OpenAI Chat messages.

        As in serving engines, text parts are joined, argument JSON is parsed, and `reasoning` is
        given to the template under both of its names. Raises `RenderError`.
        """
        if self._template is None:
            raise RenderError(f"{self.folder} has no chat template; send token ids")
        try:
            return self._template.render(
                messages=[_for_template(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **(arguments or {}),
            )
        except (jinja2.TemplateError, TypeError, AttributeError) as error:
            raise RenderError(f"the chat template refuses these messages: {error}") from error

    def prompt_ids(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: Mapping[str, Any]
    ) -> Ids:
        """Return the ids of the whole prompt. Raises `EngineError` (400) if the template fails."""
        try:
            return self.encode(self.render(messages, tools, arguments=arguments))
        except RenderError as error:
            raise EngineError(str(error), status=400) from error


class TextStream:
    """Incremental decoder of ids to visible text; holds back incomplete characters."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def feed(self, ids: Ids) -> str:
        """Add sampled ids; return the text that they complete."""
        self._pending += ids.tolist()
        text = self._tokenizer.visible(self._pending)
        if text.endswith(REPLACEMENT):
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        """Return the remaining text, with incomplete characters replaced."""
        text = self._tokenizer.visible(self._pending)
        self._pending.clear()
        return text


def load_tokenizer(source: str | None) -> ChatTokenizer:
    """Return the tokenizer of folder `source`; `None` and `builtin` mean the one in the package.

    `ConfigError` if the folder holds none that can be read.
    """
    folder = builtin_tokenizer_dir() if source in (None, "builtin") else Path(str(source))
    if not folder.is_dir():
        raise ConfigError(f"tokenizer {source!r}: no such folder; give a folder or 'builtin'")
    return ChatTokenizer(folder)


@lru_cache(maxsize=8)
def _read_tokenizer(path: str, _: int) -> Tokenizer:
    """Read a file of that modification time; engines share the object, which never changes."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """Compile a chat template once per process. Raises `jinja2.TemplateError`."""
    return _environment().from_string(source)


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, or the joined text parts of a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)]
        return "".join(part["text"] for part in parts)
    return ""


def _for_template(message: JSON) -> JSON:
    shaped = dict(message)
    content = shaped.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        shaped["content"] = text_of(content)
    if shaped.get("role") == "developer":
        shaped["role"] = "system"
    reasoning = shaped.get("reasoning") or shaped.get("reasoning_content")
    if isinstance(reasoning, str):
        shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    if calls := shaped.get("tool_calls"):
        shaped["tool_calls"] = [_call_for_template(call) for call in calls]
    return shaped


def _call_for_template(call: JSON) -> JSON:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            parsed = arguments
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Make the Jinja environment of `apply_chat_template` in transformers 5."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **form: Any) -> str:  # noqa: ANN401, FBT001, FBT002 - as transformers has it
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> JSON:
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: the file must hold a JSON object")
    return read
