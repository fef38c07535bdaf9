"""Settings of a gateway, under the same names in TOML, flags and environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bridle.config import Settings


class GatewaySettings(Settings):
    """Address, limits and timeouts of the gateway. Times are seconds."""

    host: str = "127.0.0.1"
    """Address of both listeners; loopback unless a sandbox must reach it from elsewhere."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the data routes; 0 = any free one."""
    control_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the control routes; `None` = the same listener as the data routes."""
    public_url: str | None = Field(default=None, pattern=r"^https?://[^/]")
    """Address that harnesses get instead of `http://host:port` (another name of the same listener,
    as seen from inside a sandbox). `{port}` in it stands for the port of the data routes, which
    each of several workers has for itself."""
    data_dir: Path | None = None
    """Folder of `control.token`, and of the files by which the next start knows the loaded weights
    and the released engines; `None` = they live in memory only."""
    control_token: str | None = Field(default=None, min_length=16, repr=False)
    """`None` = `BRIDLE_CONTROL_TOKEN`, else the one kept in `data_dir`, else a new one."""
    retry_grace_s: float = Field(default=10, ge=0)
    """Time that a call whose client has gone is kept for a retry; 0 cancels it at once."""
    headers_after_s: float = Field(default=10, gt=0)
    """A stream's headers leave after this even if nothing is sampled yet (one client gives up
    after 60 s without headers)."""
    keepalive_s: float = Field(default=15, gt=0)
    """Longest silence in a started stream."""
    stream: Literal["live", "whole"] = "whole"
    """Delivery of a streamed reply: `live`, as it is sampled (where the model's calls begin with a
    token of their own, or the engine parses by itself), or `whole`, when it is committed: then no
    harness ever keeps half of a turn."""
    prompt: Literal["renderer", "engine"] = "renderer"
    """Renderer of a prompt that extends none: Bridle's `renderer`, the same on every engine, or the
    `engine` by its own chat template, asked once per such prompt. Extensions are rendered here in
    either case, from the tokens as sampled."""
    max_body_bytes: int = Field(default=32 << 20, gt=0)
    """Larger requests, as decoded, are refused with 413. 32 MiB is Anthropic's own limit; raise it
    for harnesses that send many images."""
    head_timeout_s: float = Field(default=20, gt=0)
    """Time that a begun request may take to its last header line."""
    body_timeout_s: float = Field(default=60, gt=0)
    """Time that a request's body may take to arrive."""
    write_timeout_s: float = Field(default=300, gt=0)
    """Time that a client may take to accept a reply before it counts as gone."""
    min_output_tokens: int = Field(default=64, ge=1)
    """Less room than this in the model's context is a context overflow."""
    allow_untokenized: bool = False
    """Serve an engine that gives no ids or logprobs: captures text only, nothing can be trained."""
