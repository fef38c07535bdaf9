"""Settings of the `[executor]` table of a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bridle.config import Settings
from bridle.executors.members import Patience
from bridle.lifecycle.manager import NodeSettings


class RaySettings(Patience):
    """Address of the cluster, and the machines that run sessions."""

    address: str | None = None
    """`HOST:PORT` of the cluster's head, or `local` for a new cluster of this machine alone;
    `None` = `RAY_ADDRESS`, else the cluster that this machine belongs to, else a new one."""
    namespace: str = "bridle"
    """Ray's namespace of the node actors; servers that share nodes share it."""
    resource: str = "bridle_node"
    """Machines that offer it compute sessions; `CPU` = every one that offers processors."""
    folder: Path | None = None
    """Folder on each machine's own disk for captures and logs; `None` = `nodes` in the server's
    data folder, by the same path on each."""
    engines_from: str | None = None
    """Who tells of further engines, by a method `engines()` that gives their URLs: the name of an
    actor of the cluster (`NAME`, or `NAMESPACE/NAME`), or `serve:APP`, a Ray Serve application."""
    engines_s: float = Field(default=10, gt=0)
    """Seconds between two times of asking it; an engine that is told no more has its calls for
    `engines_drain_s`."""
    engines_drain_s: float = Field(default=60, ge=0)
    watch_s: float = Field(default=1, gt=0)
    """Seconds between looks for machines that have joined or left."""


class ExecutorSettings(Settings):
    """Choice of the executor."""

    kind: Literal["local", "ray"] = "local"
    """`local`: in the server's process; `ray`: on the machines of a Ray cluster."""
    node: NodeSettings = NodeSettings()
    """How much each node does at once; what is not given follows the machine that it is on."""
    ray: RaySettings = RaySettings()
    """Looked at where `kind` is `ray`."""
