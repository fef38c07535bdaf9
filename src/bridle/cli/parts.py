"""From the words of a command line to an engine and the renderer that goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.errors import ConfigError

if TYPE_CHECKING:
    from bridle.engines.base import Engine
    from bridle.prompting.renderer import PromptRenderer


def open_parts(spec: str, tokenizer: str | None) -> tuple[Engine, PromptRenderer]:
    """The engine `spec` names and a renderer on its tokenizer; neither is started.

    The tokenizer is `tokenizer`, else the model folder of `embedded:DIR`, else `builtin` for
    `scripted:FILE`. `ConfigError` when a served engine comes without one.
    """
    from bridle.engines import open_engine
    from bridle.prompting.renderer import load_renderer

    source = tokenizer or default_tokenizer(spec)
    engine = open_engine(spec, tokenizer=source)
    if source is None:
        raise ConfigError(
            f"--engine {spec} needs --tokenizer: the folder with the model's tokenizer, "
            "because the gateway renders and tokenises by itself"
        )
    return engine, load_renderer(source)


def default_tokenizer(spec: str) -> str | None:
    """The tokenizer of an engine that was given without one; `None` = it brings none."""
    kind, _, rest = spec.partition(":")
    return {"scripted": "builtin", "embedded": rest}.get(kind)
