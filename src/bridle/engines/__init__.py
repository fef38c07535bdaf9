"""Inference engines: adapters for serving engines, and the pool that spreads calls over them.

The contract is `base`. The engines that run in this process are `bridle.scripted` and
`bridle.embedded`.

An engine is given by a short form, `KIND:TARGET`, see `ENGINES`; `open_engine` makes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import ConfigError
from bridle.plugins import installed, load

if TYPE_CHECKING:
    from bridle.engines.base import Engine

ENGINES = {
    "scripted": "bridle.scripted.engine:ScriptedEngine",
    "embedded": "bridle.embedded:EmbeddedEngine",
    "sglang": "bridle.engines.sglang:SglangEngine",
    "openai": "bridle.engines.openai:OpenAIEngine",
    "http": "bridle.engines.vllm:VllmEngine",
    "https": "bridle.engines.vllm:VllmEngine",
}
"""Kind -> class. It is made by its `open(target, *, tokenizer, allow_untokenized)`, or called with
the target: a script file, a model folder, a server's URL."""


def open_engine(
    spec: str, *, tokenizer: str | None = None, allow_untokenized: bool = False
) -> Engine:
    """Return the engine that `spec` names, not started yet.

    `scripted:FILE`, `embedded:DIR`, `http://HOST:PORT` or `https://...` (vLLM's HTTP shape),
    `sglang:URL`, `openai:URL#MODEL` (text only), `NAME:TARGET` of an installed entry point, or
    `package.module:Class:TARGET` for a class of your own. `tokenizer` is a folder or `builtin`, for
    engines that do not bring one. `allow_untokenized` takes a server that gives text only. Raises
    `ConfigError`.
    """
    kind, colon, target = spec.partition(":")
    name = kind
    if kind not in ENGINES and "." in kind and ":" in target:
        attribute, _, target = target.partition(":")
        name = f"{kind}:{attribute}"
    ours = kind in ENGINES or name != kind
    if not colon or not (ours or kind in installed("engine")):
        known = (
            "scripted:FILE, embedded:DIR, http://HOST:PORT, sglang:URL, openai:URL#MODEL, "
            "package.module:Class:TARGET"
        )
        meant = f" did you mean 'http://{spec}'?" if re.fullmatch(r"[\w.-]+:\d+", spec) else ""
        raise ConfigError(f"unknown engine {spec!r};{meant} known forms: {known}")
    if kind in {"scripted", "embedded"} and not target:
        raise ConfigError(f"engine {spec!r} names no file or folder: give {kind}:PATH")
    if kind == "embedded":
        check_model_folder(target)
    factory = load(name, ENGINES, what="engine")
    given = spec if kind in {"http", "https"} else target
    if not hasattr(factory, "open"):
        made: Engine = factory(given)
        return made
    opened: Engine = factory.open(given, tokenizer=tokenizer, allow_untokenized=allow_untokenized)
    return opened


def check_model_folder(folder: str) -> None:
    """Raise `ConfigError` if there is no such folder, or no model in it; loads nothing."""
    from bridle.engines.base import is_adapter

    if not Path(folder).is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    if not (is_adapter(folder) or Path(folder, "config.json").is_file()):
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
