"""What can be set about a server: the `[server]` table of a config file; flags come before it."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from pydantic import Field

from bridle.errors import ConfigError
from bridle.server.permits import Permits
from bridle.server.schemas import ServiceSettings


class ServerSettings(ServiceSettings):
    """Where the server listens, where it keeps what it accepts, and whom it serves."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs tokens."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 = any free one."""
    data: Path = Path("runs/server")
    """Folder of the capture, of logs, and, by default, of all else."""
    database: str | None = None
    """`postgresql://...` or a SQLite file; `None` = `server.sqlite` in `data`."""
    trajectories: str | None = None
    """Folder or fsspec URL (`s3://bucket/path`); `None` = `trajectories` in `data`."""
    tokens: Path | None = None
    """TOML file with `[[tokens]]`."""
    permits: Permits = Permits()
    """What tasks may name on this machine."""

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def checked(self, *, has_tokens: bool) -> ServerSettings:
        """With the defaults that depend on where it listens. `ConfigError` if it would be open."""
        if not has_tokens and not self.on_loopback:
            raise ConfigError(
                f"host {self.host!r} can be reached from elsewhere: give tokens "
                "(--tokens FILE, or BRIDLE_SERVER_TOKEN)"
            )
        permits = self.permits.model_copy(update={"local": self.on_loopback})
        return self.model_copy(update={"permits": permits})
