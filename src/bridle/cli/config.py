"""`--config FILE`: engines, gateway, server, executor... in one TOML file; flags come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from bridle.config import ModelSpec, Settings, explain, load_toml
from bridle.datasets.jsonl import merge
from bridle.engines.pool_replica import RoutingSettings
from bridle.errors import ConfigError
from bridle.gateway.settings import GatewaySettings
from bridle.node.scheduling import ExecutorSettings
from bridle.server.settings import ServerSettings


class FileConfig(Settings):
    """Contents of a config file."""

    engines: tuple[str, ...] = ()
    """Replicas of the policy's engine, each as `--engine` takes it."""
    tokenizer: str | None = None
    """Folder or `builtin`; `None` = the engine's own where it has one."""
    gateway: GatewaySettings = GatewaySettings()
    routing: RoutingSettings = RoutingSettings()
    server: ServerSettings = ServerSettings()
    executor: ExecutorSettings = ExecutorSettings()
    """Where sessions are computed."""
    telemetry: tuple[str, ...] = ()
    """Trackers: wandb, mlflow, tensorboard, trackio, otel, or `package.module:Class`."""
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    """Model names and globs with an engine or a sampling of their own, first match first."""


def load_config(
    path: Path | None,
    *,
    engines: Sequence[str] = (),
    tokenizer: str | None = None,
    gateway: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    executor: Mapping[str, Any] | None = None,
    telemetry: str | None = None,
) -> FileConfig:
    """The file's settings (defaults without one) under those of the flags; `None` = not given.

    `ConfigError` names a mistake, and says so if neither names an engine.
    """
    given = {} if path is None else load_toml(path)
    table = given.get("gateway", {})
    if isinstance(table, dict):
        flags = {name: value for name, value in (gateway or {}).items() if value is not None}
        given["gateway"] = {**table, **flags}
    for name, said in (("server", server), ("executor", executor)):
        if said:
            table = given.get(name, {})
            given[name] = merge(table if isinstance(table, dict) else {}, dict(said))
    if engines:
        given["engines"] = tuple(engines)
    if tokenizer is not None:
        given["tokenizer"] = tokenizer
    if telemetry is not None:
        given["telemetry"] = tuple(telemetry.split(","))
    try:
        config = FileConfig.model_validate(given)
    except ValidationError as error:
        raise explain(error, "the command" if path is None else str(path)) from error
    if not config.engines and not config.server.engines_from:
        raise ConfigError("no engine: give --engine, or `engines = [...]` in --config FILE")
    return config
