"""Settings of a server: the `[server]` table of a config file. Flags take precedence."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from bridle.hosts import is_loopback
from bridle.server.permits import Permits
from bridle.server.schemas import ServiceSettings


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
    """TOML file with `[[tokens]]`, beside the operator's own in `server.token` of `data`."""
    engines_from: str | None = None
    """File or URL that names engines and is read again and again; they join and leave the policy's
    engines. `None` = only those that are given."""
    hosts: tuple[str, ...] = ()
    """Names in the `Host` header under which it is asked, beside `localhost`, the machine's own
    name and addresses; a request to any other is refused with 421."""
    permits: Permits = Permits()
    """What tasks may name on this machine."""

    def checked(self) -> ServerSettings:
        """With the defaults that depend on where it listens."""
        permits = self.permits.model_copy(update={"local": is_loopback(self.host)})
        return self.model_copy(update={"permits": permits})
