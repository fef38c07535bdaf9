"""Settings of a server: the `[server]` table of a config file. Command-line flags override it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bridle.config import Settings
from bridle.datasets.manifest import read_manifest
from bridle.hosts import is_loopback
from bridle.server.submission_policy import SubmissionPolicy


class OwnerSettings(Settings):
    """Settings of one owner."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """Its share of the run slots is its weight over that of all owners with waiting sessions."""
    max_queued_samples: int | None = Field(default=None, ge=1)
    """Instead of the server's."""


class ServiceSettings(Settings):
    """Rates and timeouts of the service."""

    max_inflight_groups: int | None = Field(default=None, ge=1)
    """Groups of one owner that have started and not ended; `None` = as many as there are slots."""
    max_unacked_groups: int | None = Field(default=None, ge=1)
    """No further group of an owner starts while this many ended ones are not acknowledged; `None` =
    any number. For a trainer that acknowledges groups."""
    groups_per_version: int | None = Field(default=None, ge=1)
    """Groups that the trainer consumes per policy version; `max_version_lag` needs it."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Largest staleness of a group's first token when the group is used. Groups are held back so
    that none is wasted: at version v, at most
    `groups_per_version * (v + 1 + max_version_lag)` have been started since version 0."""
    on_stale: Literal["keep", "cancel"] = "keep"
    """Action for a running session that is more than `max_version_lag` versions behind: it
    continues or is cancelled."""
    max_queued_samples: int | None = Field(default=None, ge=1)
    """Samples of one owner that are accepted and not started; `None` = any number."""
    owners: dict[str, OwnerSettings] = Field(default_factory=dict)
    """Settings of single owners, by the name of their tokens."""
    lease_s: float = Field(default=60, gt=0)
    """A server that has not renewed its leases for so long is dead, and others take over its
    runs."""
    drain_s: float = Field(default=30, ge=0)
    """After SIGTERM, how long running sessions may continue; then they are queued again."""
    store_patience_s: float = Field(default=600, ge=0)
    """Time that writing a trajectory is retried (a full disk, an object store that is down); then
    the session ends with `store_error` and may be run again."""
    callback_give_up_s: float = Field(default=86_400, gt=0)
    """Time that a callback is retried before it is dead."""
    keep_days: float | None = Field(default=None, gt=0)
    """Files of acknowledged groups (trajectories, capture, logs, artifacts) are removed after so
    many days; `None` = never."""
    keep_gb: float | None = Field(default=None, gt=0)
    """Files of acknowledged groups are removed, oldest first, beyond this size; `None` = never."""
    keep_rows_days: float | None = Field(default=None, gt=0)
    """Rows of acknowledged groups (sessions, results, callbacks) are removed after so many days;
    their tasks' names and counts stay. `None` = never."""
    keep_unacked_days: float | None = Field(default=None, gt=0)
    """Groups count as acknowledged after so many days; `None` = never."""

    def quota_of(self, owner: str) -> int | None:
        """Return how many samples an owner may have queued; `None` = any number."""
        own = self.owners.get(owner, OwnerSettings()).max_queued_samples
        return self.max_queued_samples if own is None else own


class ServerSettings(ServiceSettings):
    """The server's address, database, files and tokens."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 = any free one."""
    data: Path = Path("runs/server")
    """Folder of the capture, of logs, and, by default, of all else."""
    database: str | None = None
    """`postgresql://...` or a SQLite file; `None` = `server.sqlite` in `data`."""
    trajectories: str | None = None
    """Folder or fsspec URL (`s3://bucket/path`); `None` = `trajectories` in `data`."""
    tokens: Path | None = None
    """TOML file with `[[tokens]]`; the operator's own token is in `server.token` of `data`."""
    engines_from: str | None = None
    """File or URL that lists engines; it is read every few seconds, and engines join and leave as
    it says. `None` = only the given engines."""
    hosts: tuple[str, ...] = ()
    """Names that the `Host` header may have besides `localhost` and the machine's name and
    addresses; other requests get 421."""
    permits: SubmissionPolicy = SubmissionPolicy()
    """Names, paths and addresses that submitted tasks may use."""

    def checked(self) -> ServerSettings:
        """Return them with the defaults that depend on the listening address.

        `ConfigError` if the manifest of verified tasks cannot be read.
        """
        if self.permits.verified is not None:
            read_manifest(self.permits.verified)
        permits = self.permits.model_copy(update={"local": is_loopback(self.host)})
        return self.model_copy(update={"permits": permits})
