"""The policy's weights, steered over HTTP: which version samples, and how sampling stops for it.

A trainer that loads weights by itself asks for a `hold`, loads, and publishes the version; one
request does it all where the engines load from a folder. Sessions go on: calls that were running
are resumed from their tokens, and each token knows the version that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from bridle.config import Settings
from bridle.engines.pool import EnginePool
from bridle.engines.pool_handover import Release
from bridle.engines.pool_replica import check_version, make_replica
from bridle.errors import ConfigError, StoreError, boundary
from bridle.folders import private_file, private_folder
from bridle.types import JSON, without_user_info

WEIGHTS_FILE: Final = "weights.json"
"""In the gateway's data folder: the folder that its engines have loaded, and its version."""

RELEASED_FILE: Final = "released.json"
"""In the same folder: the servers that trainers have, which the next process must not touch."""

_RELEASES: Final = TypeAdapter(dict[str, Release])


@dataclass(slots=True)
class Policy:
    """Version of the weights that sample, and whether sampling is paused."""

    version: int
    paused: bool = False
    file: Path | None = None
    """File that names the folder of the weights, for the gateway's next start."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while this file or that of the releases is written."""

    @classmethod
    def of(cls, version: int, data_dir: Path | None) -> Self:
        """Return the policy's state at `version`, with its file in the gateway's data folder."""
        return cls(version, file=None if data_dir is None else data_dir / WEIGHTS_FILE)


class SetPolicy(Settings):
    """Body of `POST /policy`; what is absent stays."""

    version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Policy version from here on, of tokens whose engine does not tell it. Refused without
    `weights` where an engine samples with a LoRA adapter of another version."""
    paused: bool | None = None
    """New calls are refused while paused; those in flight go on."""
    hold: Literal["abort", "wait", "keep", False] | None = None
    """Stop sampling on all replicas and answer when nothing samples: running calls are ended and
    resumed later (`abort`), awaited (`wait`), or held where they are (`keep`, where engines can).
    Meanwhile new calls wait. `false` = go on, under `version`."""
    weights: str | None = None
    """Folder, as the engines see it, whose weights all replicas load, as `version`."""
    mode: Literal["abort", "wait", "keep"] = "abort"
    """Way in which sampling is held while `weights` are loaded."""
    released: bool | None = None
    """`true` = drain `replicas` by `mode`, and send nothing to them, no health check either: their
    trainer has their memory. `false` = they serve again, under `version` or with `weights`."""
    cut: bool = False
    """Have calls fail while `released` lasts; otherwise they wait."""
    by: str = Field(default="", max_length=200)
    """Name of the trainer, which alone can have them serve again; empty = it has none."""
    rolling: bool = False
    """Load `weights` into one replica after the other; the rest goes on under the old ones."""
    replicas: tuple[str, ...] | None = None
    """The replicas that load `weights`, or are `released`; `None` = all."""
    only_older: bool = False
    """Load `weights` only where those in place are older: for who comes late."""
    timeout_s: float = Field(default=60, gt=0)
    """Time that a hold may take; then nothing is held."""

    @model_validator(mode="after")
    def _names_its_version(self) -> Self:
        if self.weights is not None and (self.version is None or self.hold is not None):
            message = "`weights` needs `version`, and holds by itself"
            raise ValueError(message)
        if self.released and not (self.version is None and self.weights is None):
            message = "released engines load nothing: give `version` and `weights` at the resume"
            raise ValueError(message)
        return self


class SetEngine(Settings):
    """Body of `POST /engines/{id}`."""

    state: Literal["released", "resumed"] | None = None
    """`released` = nothing is sent to it any more when this is answered. `resumed` = it is awake:
    it is looked at, loads what it lacks, and serves."""
    version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Version of its weights when it is `resumed`, or of `weights`."""
    weights: str | None = None
    """Folder, as the engine sees it, that it loads."""
    mode: Literal["abort", "wait", "cut"] = "abort"
    """Effect of a release on running calls: they end and go on later (`abort`), are awaited
    (`wait`), or fail, as new ones do (`cut`)."""
    by: str = Field(default="", max_length=200)
    """Name of the trainer; an engine that was released by a name is resumed by that name only."""
    timeout_s: float = Field(default=60, gt=0)
    """Time that a release may take; then nothing is released."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.state is None and self.weights is None:
            message = "give `state` (released, resumed) or `weights`"
            raise ValueError(message)
        return self

    def policy(self, engine: str) -> SetPolicy:
        """Return the request as one of `POST /policy` for the replica `engine`, its name or id;
        `all` = all.

        `ValidationError` if its fields do not go together.
        """
        return SetPolicy(
            released=None if self.state is None else self.state == "released",
            version=self.version,
            weights=self.weights,
            mode="abort" if self.mode == "cut" else self.mode,
            cut=self.mode == "cut",
            by=self.by,
            timeout_s=self.timeout_s,
            replicas=None if engine == "all" else (engine,),
        )


class AddReplica(Settings):
    """Body of `POST /replicas`."""

    engine: str = Field(pattern=r"^(sglang:)?https?://")
    """A server, as `--engine` takes it."""


async def set_policy(wanted: SetPolicy, policy: Policy, engines: EnginePool) -> None:
    """Change the policy of the engines as `POST /policy` asks for.

    `ConfigError` for a mistake, after which nothing has changed; `EngineError` if the engines could
    not do it, `StoreError` if they did and the new weights could not be recorded for the gateway's
    next process: the same may be asked again.
    """
    if wanted.released is not None:
        await _hand_over(wanted, policy, engines)
    elif wanted.weights is not None and wanted.version is not None:
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
        await _record(wanted, policy)
    else:
        check_version(engines.each(), wanted.version)
        if wanted.hold:
            await engines.hold(wanted.hold, timeout_s=wanted.timeout_s)
        if wanted.version is not None:
            await engines.set_version(wanted.version)
            policy.version = wanted.version
            await _record(wanted, policy)
        if wanted.hold is False:
            await engines.release()
    if wanted.paused is not None:
        policy.paused = wanted.paused


async def _hand_over(wanted: SetPolicy, policy: Policy, engines: EnginePool) -> None:
    """Release replicas or have them serve again, and write down which are released."""
    try:
        if wanted.released:
            await engines.give_up(
                wanted.replicas,
                abort=wanted.mode != "wait",
                cut=wanted.cut,
                by=wanted.by,
                timeout_s=wanted.timeout_s,
            )
        else:
            await engines.take_back(
                wanted.replicas, version=wanted.version, weights=wanted.weights, by=wanted.by
            )
    finally:
        if policy.file is not None:
            async with policy.writing:  # read within it: the last one to write knows all
                content = _RELEASES.dump_json(engines.released())
                await asyncio.to_thread(_write, policy.file.with_name(RELEASED_FILE), content)
    if wanted.version is not None:
        policy.version = max(policy.version, wanted.version)
        await _record(wanted, policy)


async def _record(wanted: SetPolicy, policy: Policy) -> None:
    """Record the folder of the version that samples now; forget it if a trainer has loaded it."""
    if policy.file is not None and wanted.version is not None:
        async with policy.writing:
            if wanted.weights is not None:
                await asyncio.to_thread(_keep, policy.file, wanted.weights, wanted.version)
            else:
                await asyncio.to_thread(_forget, policy.file, wanted.version)


def kept_releases(data_dir: Path | None) -> dict[str, Release]:
    """Return the servers that were released to trainers when a gateway's last process ended.

    `ConfigError` if its file cannot be read.
    """
    if data_dir is None or not (path := data_dir / RELEASED_FILE).exists():
        return {}
    with boundary(ConfigError, f"{path}: cannot be read"):
        return _RELEASES.validate_json(path.read_bytes())


def kept_weights(data_dir: Path | None) -> tuple[str, int] | None:
    """Return the folder and version of the weights that a gateway's last process had loaded; `None`
    = none.

    `ConfigError` if its file cannot be read.
    """
    if data_dir is None or not (path := data_dir / WEIGHTS_FILE).exists():
        return None
    with boundary(ConfigError, f"{path}: cannot be read"):
        kept = json.loads(path.read_text())
        return str(kept["weights"]), int(kept["version"])


def _keep(path: Path, weights: str, version: int) -> None:
    _write(path, json.dumps({"weights": weights, "version": version}).encode())


def _write(path: Path, content: bytes) -> None:
    with boundary(StoreError, f"{path}: cannot be written"):
        private_folder(path.parent)
        aside = path.with_name(f"{path.name}.part")
        with private_file(aside).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def _forget(path: Path, version: int) -> None:
    """Forget the kept folder: this version's weights were loaded by a trainer."""
    if (kept := kept_weights(path.parent)) and kept[1] != version:
        with boundary(StoreError, f"{path}: cannot be removed"):
            path.unlink(missing_ok=True)


def policy_json(policy: Policy, engines: EnginePool, model: str) -> JSON:
    """Return the policy version, whether sampling is paused or held, and the engines' states.

    It is the reply of `GET /policy`.
    """
    return {
        "version": policy.version,
        "paused": policy.paused,
        "hold": engines.held,
        "model": model,
        "replicas": [one["name"] for one in engines.replicas()],
        "engines": engines_json(engines.replicas()),
    }


_SHOWN: Final = ("id", "name", "state", "for_s", "version", "released_by", "error")


def engines_json(replicas: Sequence[JSON]) -> list[JSON]:
    """Return the list of `GET /engines`, made from the list of `GET /replicas`."""
    shown = [{name: one[name] for name in _SHOWN} for one in replicas]
    return [one | ({"state": "serving"} if one["state"] == "live" else {}) for one in shown]


async def add_replica(wanted: AddReplica, engines: EnginePool) -> None:
    """Add an inference server. `ConfigError` if it is there already, `EngineError` if it cannot
    serve.
    """
    from bridle.engines import open_engine

    await engines.add(make_replica(wanted.engine, open_engine))


async def remove_replica(name: str, drain_s: float, engines: EnginePool) -> None:
    """Remove an inference server; its calls continue elsewhere after `drain_s` seconds.

    `ConfigError` for an unknown name or the only server.
    """
    name = without_user_info(name)
    if not any(one["name"] == name for one in engines.replicas()):
        raise ConfigError(
            f"the engine has no replica {name!r}; it has: {[r['name'] for r in engines.replicas()]}"
        )
    await engines.remove(name, timeout_s=drain_s)
