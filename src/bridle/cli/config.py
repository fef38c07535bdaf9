"""The config file, and the engines, tokenizers and models that it or the flags name."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

from bridle.capture.records import Store
from bridle.config import ModelSpec, Settings, load_toml, merged, validated, with_flags
from bridle.engines import check_model_folder, open_engine
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import RoutingSettings, make_replica
from bridle.errors import ConfigError, Problems
from bridle.gateway.app import GatewayServer
from bridle.gateway.models import OtherModel, check_models
from bridle.gateway.settings import GatewaySettings
from bridle.node.fleet import ExecutorSettings
from bridle.prompting.renderer import PromptRenderer, load_renderer
from bridle.server.settings import ServerSettings
from bridle.types import JSON


class RenderingSettings(Settings):
    """Settings of the policy's prompts, which the gateway makes of messages.

    Models of `[models]` with an engine of their own have the defaults.
    """

    history: Literal["exact", "template"] = "exact"
    """`exact` keeps all sampled tokens in the prompt, reasoning too. `template` renders the
    conversation anew where the model's template drops reasoning: a new root, by `unbridged`.
    """
    family: str | None = None
    """Template family, e.g. `qwen3`; `None` = the one whose prompts are the template's."""
    thinking: bool | None = None
    """State of the template's thinking where a request doesn't say; `None` = its default."""


class FileConfig(Settings):
    """Contents of a config file."""

    engines: tuple[str, ...] = ()
    """Replicas of the policy's engine, each as `--engine` takes it."""
    tokenizer: str | None = None
    """Folder, hub id or `builtin`; `None` = the engine's own, if it has one."""
    rendering: RenderingSettings = RenderingSettings()
    gateway: GatewaySettings = GatewaySettings()
    routing: RoutingSettings = RoutingSettings()
    server: ServerSettings = ServerSettings()
    executor: ExecutorSettings = ExecutorSettings()
    """Place of the sessions: in this process or on a Ray cluster."""
    telemetry: tuple[str, ...] = ()
    """Trackers: wandb, mlflow, tensorboard, trackio, otel, or `package.module:Class`."""
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    """Model names and globs with their own engine or sampling; the first match counts."""


def load_config(
    path: Path | None,
    *,
    engines: Sequence[str] = (),
    tokenizer: str | None = None,
    telemetry: str | None = None,
    **tables: Mapping[str, Any] | None,
) -> FileConfig:
    """Read a config file; variables (`from_environment`) override it, and flags override both.

    `tables` are flags of `gateway`, `server` and `executor`. A flag is not given where it is
    `None`. `ConfigError` for a mistake, and if nothing names an engine.
    """
    variables = from_environment(os.environ)
    where = "the arguments" if path is None else str(path)
    where += " and the variables BRIDLE_..." if variables else ""
    given = merged({} if path is None else load_toml(path), variables)
    flags = {
        "engines": tuple(engines) or None,
        "tokenizer": tokenizer,
        "telemetry": None if telemetry is None else tuple(telemetry.split(",")),
        **tables,
    }
    config = validated(FileConfig, with_flags(given, flags), where)
    if not config.engines and not config.server.engines_from:
        raise ConfigError(
            "no engine is given: give --engine, `engine=` in Python, or `engines = [...]` in a"
            " config file"
        )
    return config


def from_environment(environment: Mapping[str, str]) -> JSON:
    """Return the config keys that environment variables set: `BRIDLE_GATEWAY__PORT`, two
    underscores between a table and its key.

    A value is parsed as in the file where it can be (`["http://..."]`, `4`, `true`), else it is
    text. Variables of other names (`BRIDLE_CACHE`) are left alone; a table that does not exist
    is kept, for `validated` to refuse.
    """
    given: JSON = {}
    for name, value in environment.items():
        path = name.removeprefix("BRIDLE_").lower().split("__")
        field = FileConfig.model_fields.get(path[0])
        is_table = field is not None and isinstance(field.default, Settings)
        other = len(path) == 1 and (field is None or is_table)
        if other or not name.startswith("BRIDLE_"):
            continue
        one: object = value
        with suppress(tomllib.TOMLDecodeError):
            one = tomllib.loads(f"value = {value}")["value"]
        for part in reversed(path):
            one = {part: one}
        given = merged(given, cast("JSON", one))
    return given


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Files of a hub model that a tokenizer may need, without weights."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Engine, renderer and other models of a gateway; nothing is started."""

    engine: EnginePool
    renderer: PromptRenderer
    models: Sequence[OtherModel]

    def gateway(self, store: Store, settings: GatewaySettings, **more: Any) -> GatewayServer:  # noqa: ANN401 - as `GatewayServer` takes them
        """Return a gateway with these engines, not started."""
        return GatewayServer(
            engine=self.engine,
            renderer=self.renderer,
            models=self.models,
            store=store,
            settings=settings,
            **more,
        )


def open_setup(config: FileConfig) -> EngineSetup:
    """Open the engines, the prompt renderer and the other models that a config names.

    Engines of other models never train, so they may give text only. `ConfigError` names all
    mistakes at once.
    """
    problems = Problems()
    first = config.engines[0]
    source = None
    with problems.noting():
        if first.startswith("embedded:"):
            check_model_folder(first.removeprefix("embedded:"))
        given = _required(config.tokenizer or default_tokenizer(first), first)
        folder = tokenizer_folder(given)
        renderer = load_renderer(folder, **config.rendering.model_dump())
        source = folder
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
    return EngineSetup(engine, renderer, models)


def open_replicas(
    specs: Sequence[str],
    tokenizer: str | None,
    *,
    settings: RoutingSettings | None = None,
    allow_untokenized: bool = False,
) -> EnginePool:
    """Return one pool of the engines that `specs` name; a second in-process engine of the same spec
    is named `#2`.

    `ConfigError` for a spec that names no engine, or a server that is named twice.
    """
    make = partial(open_engine, tokenizer=tokenizer, allow_untokenized=allow_untokenized)
    replicas = [make_replica(spec, make) for spec in specs]
    for index, replica in enumerate(replicas):
        before = specs[:index].count(replica.name)
        if before and replica.reopen is None:
            replica.name = f"{replica.name}#{before + 1}"
    return EnginePool(replicas, settings=settings)


def _other(name: str, spec: ModelSpec, routing: RoutingSettings) -> OtherModel:
    if not spec.engines:
        return OtherModel(name, spec)
    source = spec.tokenizer or default_tokenizer(spec.engines[0])
    source = source and tokenizer_folder(source)
    engine = open_replicas(spec.engines, source, settings=routing, allow_untokenized=True)
    return OtherModel(name, spec, engine, None if source is None else load_renderer(source))


def _required(source: str | None, spec: str) -> str:
    if source is None:
        raise ConfigError(
            f"engine {spec} needs the model's tokenizer, because the gateway renders prompts:"
            " give its folder or hub id (--tokenizer, `tokenizer=` in Python)"
        )
    return source


def tokenizer_folder(source: str) -> str:
    """Return the local folder of a tokenizer `ORG/NAME` of the model hub; folders unchanged.

    Its files come from the hub's cache, or, unless `HF_HUB_OFFLINE` is set, from the hub.
    `ConfigError` if neither has them, and for a folder that is missing.
    """
    if source == "builtin" or Path(source).exists():
        return source
    if not HUB_ID.fullmatch(source):
        raise ConfigError(
            f"tokenizer {source!r}: no such folder; give a folder, a hub id ORG/NAME, or 'builtin'"
        )
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, allow_patterns=TOKENIZER_FILES)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        message = f"tokenizer {source!r} is not a folder and cannot be fetched from the hub: {why}"
        raise ConfigError(message) from error


def default_tokenizer(spec: str) -> str | None:
    """Return the tokenizer that an engine's spec brings; `None` = it brings none."""
    kind, _, rest = spec.partition(":")
    return {"scripted": "builtin", "embedded": rest}.get(kind)
