"""The policy's weights, steered over HTTP: which version samples, and how sampling stops for it.

A trainer that loads weights by itself asks for a `hold`, loads, and publishes the version; one
request does it all where the engines load from a folder. Sessions go on: calls that were running
are resumed from their tokens, and each token knows the version that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from bridle.config import Settings
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import make_replica
from bridle.errors import ConfigError, StoreError, boundary
from bridle.folders import private_file, private_folder
from bridle.types import JSON, without_user_info

WEIGHTS_FILE: Final = "weights.json"
"""In the gateway's data folder: the folder that its engines have loaded, and its version."""


@dataclass(slots=True)
class Policy:
    """Version of the weights that sample, and whether sampling is paused."""

    version: int
    paused: bool = False
    file: Path | None = None
    """Where it is kept which folder the weights are of, for the gateway's next life."""

    @classmethod
    def of(cls, version: int, data_dir: Path | None) -> Self:
        """That of a gateway with this data folder."""
        return cls(version, file=None if data_dir is None else data_dir / WEIGHTS_FILE)


class SetPolicy(Settings):
    """Body of `POST /policy`; what is absent stays."""

    version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Policy version from here on, of tokens whose engine does not tell it."""
    paused: bool | None = None
    """New calls are refused while paused; those in flight go on."""
    hold: Literal["abort", "wait", "keep", False] | None = None
    """Stop sampling on all replicas and answer when nothing samples: running calls are ended and
    resumed later (`abort`), awaited (`wait`), or held where they are (`keep`, where engines can).
    Meanwhile new calls wait. `false` = go on, under `version`."""
    weights: str | None = None
    """Folder, as the engines see it, whose weights all replicas load, as `version`."""
    mode: Literal["abort", "wait", "keep"] = "abort"
    """How sampling is held while `weights` are loaded."""
    released: bool | None = None
    """`true` = drain `replicas` by `mode`, and send nothing to them, no health check either: their
    trainer has their memory. `false` = they serve again, under `version`."""
    rolling: bool = False
    """Load `weights` into one replica after the other; the rest goes on under the old ones."""
    replicas: tuple[str, ...] | None = None
    """The replicas that load `weights`, or are `released`; `None` = all."""
    only_older: bool = False
    """Load `weights` only where those in place are older: for who comes late."""
    timeout_s: float = Field(default=60, gt=0)
    """How long a hold may take; then nothing is held."""

    @model_validator(mode="after")
    def _names_its_version(self) -> Self:
        if self.weights is not None and (self.version is None or self.hold is not None):
            message = "`weights` needs `version`, and holds by itself"
            raise ValueError(message)
        if self.released is not None and self.weights is not None:
            message = "`released` and `weights` are two requests: released engines load nothing"
            raise ValueError(message)
        return self


class AddReplica(Settings):
    """Body of `POST /replicas`."""

    engine: str = Field(pattern=r"^(sglang:)?https?://")
    """A server, as `--engine` takes it."""


async def set_policy(wanted: SetPolicy, policy: Policy, engines: EnginePool) -> None:
    """Do what `POST /policy` asks for.

    `EngineError` if the engines did not do their part, `StoreError` if they did and what they
    loaded could not be written down for the gateway's next life: the same may be asked again.
    """
    if wanted.weights is not None and wanted.version is not None:
        await engines.update_weights(
            wanted.weights,
            wanted.version,
            mode=wanted.mode,
            rolling=wanted.rolling,
            timeout_s=wanted.timeout_s,
            only=wanted.replicas,
            only_older=wanted.only_older,
        )
        policy.version = wanted.version
        await asyncio.to_thread(_keep, policy.file, wanted.weights, wanted.version)
    else:
        if wanted.hold:
            await engines.hold(wanted.hold, timeout_s=wanted.timeout_s)
        if wanted.version is not None:
            await engines.set_version(wanted.version)
            policy.version = wanted.version
            await asyncio.to_thread(_forget, policy.file, wanted.version)
        if wanted.hold is False:
            await engines.release()
        if wanted.released:
            abort = wanted.mode != "wait"
            await engines.give_up(wanted.replicas, abort=abort, timeout_s=wanted.timeout_s)
        elif wanted.released is False:
            engines.take_back(wanted.replicas)
    if wanted.paused is not None:
        policy.paused = wanted.paused


def kept_weights(data_dir: Path | None) -> tuple[str, int] | None:
    """The folder and version that the last life of a gateway had loaded; `None` = none.

    `ConfigError` if what it left cannot be read.
    """
    if data_dir is None or not (path := data_dir / WEIGHTS_FILE).exists():
        return None
    with boundary(ConfigError, f"{path}: cannot be read"):
        kept = json.loads(path.read_text())
        return str(kept["weights"]), int(kept["version"])


def _keep(path: Path | None, weights: str, version: int) -> None:
    if path is None:
        return
    with boundary(StoreError, f"{path}: cannot be written"):
        private_folder(path.parent)
        aside = path.with_name(f"{path.name}.part")
        with private_file(aside).open("w") as file:
            json.dump({"weights": weights, "version": version}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def _forget(path: Path | None, version: int) -> None:
    """A version that came with no folder is of weights that a trainer has loaded by itself."""
    if path is not None and (kept := kept_weights(path.parent)) and kept[1] != version:
        with boundary(StoreError, f"{path}: cannot be removed"):
            path.unlink(missing_ok=True)


def policy_json(policy: Policy, engines: EnginePool, model: str) -> JSON:
    """Return the reply of `GET /policy`."""
    return {
        "version": policy.version,
        "paused": policy.paused,
        "hold": engines.held,
        "model": model,
        "replicas": [one["name"] for one in engines.replicas()],
    }


async def add_replica(wanted: AddReplica, engines: EnginePool) -> None:
    """A server joins. `ConfigError` if it is there already, `EngineError` if it cannot serve."""
    from bridle.engines import open_engine

    await engines.add(make_replica(wanted.engine, open_engine))


async def remove_replica(name: str, drain_s: str, engines: EnginePool) -> None:
    """A replica leaves, its calls after `drain_s` seconds. `ConfigError` names a mistake."""
    try:
        seconds = float(drain_s)
    except ValueError:
        raise ConfigError(f"drain_s: {drain_s!r} is no number of seconds") from None
    name = without_user_info(name)
    if not any(one["name"] == name for one in engines.replicas()):
        raise ConfigError(
            f"no replica {name!r}; there are: {[r['name'] for r in engines.replicas()]}"
        )
    await engines.remove(name, timeout_s=seconds)
