"""From the words of a command line or a config file to engines and their renderers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import ConfigError, Problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridle.cli.config import FileConfig
    from bridle.config import ModelSpec
    from bridle.engines.base import Engine
    from bridle.engines.pool import EnginePool
    from bridle.engines.pool_replica import RoutingSettings
    from bridle.gateway.models import OtherModel
    from bridle.prompting.renderer import PromptRenderer


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Files of a hub's model that a tokenizer may need; none holds weights."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a gateway; nothing is started."""

    engine: EnginePool
    renderer: PromptRenderer
    models: Sequence[OtherModel]


def open_parts(spec: str, tokenizer: str | None) -> tuple[Engine, PromptRenderer]:
    """The engine `spec` names and a renderer on its tokenizer; neither is started.

    The tokenizer is `tokenizer`, else the model folder of `embedded:DIR`, else `builtin` for
    `scripted:FILE`. `ConfigError` when a served engine comes without one.
    """
    from bridle.engines import open_engine
    from bridle.prompting.renderer import load_renderer

    source = tokenizer or default_tokenizer(spec)
    source = source and tokenizer_folder(source)
    engine = open_engine(spec, tokenizer=source)
    return engine, load_renderer(_required(source, spec))


def open_all(config: FileConfig) -> Parts:
    """The replicas, the renderer and the other models of a config. Errors as `open_parts`, all at
    once.

    Engines of other models never train, so they may give text only.
    """
    from bridle.gateway.models import check_models
    from bridle.prompting.renderer import load_renderer

    problems = Problems()
    first = config.engines[0]
    source = config.tokenizer or default_tokenizer(first)
    with problems.noting():
        source = source and tokenizer_folder(source)
        renderer = load_renderer(_required(source, first))
    with problems.noting():
        engine = open_replicas(
            config.engines,
            source,
            settings=config.routing,
            allow_untokenized=config.gateway.allow_untokenized,
        )
    with problems.noting():
        models = [_other(name, spec, config.routing) for name, spec in config.models.items()]
        check_models(models)
    problems.raise_any()
    return Parts(engine, renderer, models)


def open_replicas(
    specs: Sequence[str],
    tokenizer: str | None,
    *,
    settings: RoutingSettings | None = None,
    allow_untokenized: bool = False,
) -> EnginePool:
    """One engine of all that `specs` name. A second one of the same words in this process is `#2`.

    `ConfigError` for words that name no engine, or a server that is named twice.
    """
    from bridle.engines import open_engine
    from bridle.engines.pool import EnginePool
    from bridle.engines.pool_replica import make_replica

    make = partial(open_engine, tokenizer=tokenizer, allow_untokenized=allow_untokenized)
    replicas = [make_replica(spec, make) for spec in specs]
    for place, one in enumerate(replicas):
        before = specs[:place].count(one.name)
        if before and one.reopen is None:
            one.name = f"{one.name}#{before + 1}"
    return EnginePool(replicas, settings=settings)


def _other(name: str, spec: ModelSpec, routing: RoutingSettings) -> OtherModel:
    from bridle.gateway.models import OtherModel
    from bridle.prompting.renderer import load_renderer

    if not spec.engines:
        return OtherModel(name, spec)
    source = spec.tokenizer or default_tokenizer(spec.engines[0])
    source = source and tokenizer_folder(source)
    engine = open_replicas(spec.engines, source, settings=routing, allow_untokenized=True)
    return OtherModel(name, spec, engine, None if source is None else load_renderer(source))


def _required(source: str | None, spec: str) -> str:
    if source is None:
        raise ConfigError(
            f"--engine {spec} needs --tokenizer: the folder with the model's tokenizer, "
            "because the gateway renders and tokenises by itself"
        )
    return source


def tokenizer_folder(source: str) -> str:
    """The folder of a tokenizer that is given as `ORG/NAME` of a model hub; any other as it is.

    Its files come from the hub's cache, or, unless `HF_HUB_OFFLINE` is set, from the hub.
    `ConfigError` if they cannot be had.
    """
    if not HUB_ID.fullmatch(source) or Path(source).exists():
        return source
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, allow_patterns=TOKENIZER_FILES)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        message = f"tokenizer {source!r} is no folder, and the hub does not give it: {why}"
        raise ConfigError(message) from error


def default_tokenizer(spec: str) -> str | None:
    """The tokenizer of an engine that was given without one; `None` = it brings none."""
    kind, _, rest = spec.partition(":")
    return {"scripted": "builtin", "embedded": rest}.get(kind)
