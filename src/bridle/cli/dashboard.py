"""`bridle dashboard`: pages over a folder of runs, or over a rollout server, in a browser."""

from __future__ import annotations

import hmac
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import orjson
import typer

from bridle.cli.output import notes
from bridle.cli.serving import Stop, run_until_signal
from bridle.errors import ConfigError
from bridle.hosts import is_loopback

if TYPE_CHECKING:
    from bridle.dashboard.app import Guard
    from bridle.dashboard.source import DataSource

TOKEN_ENV: Final = "BRIDLE_DASHBOARD_TOKEN"  # noqa: S105 - the variable's name
"""What a browser must know to look; needed off loopback."""

AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Name under which it is asked, beside localhost and addresses; repeatable.",
        show_default=False,
    ),
]


def dashboard(
    target: Annotated[
        str,
        typer.Argument(
            help="A run, a training, a data folder, a folder of them, or a rollout server's URL."
        ),
    ] = "runs",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8090,
    allow_host: AllowHostOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
) -> None:
    """Show runs, sessions, exchanges and tokens in a browser, until Ctrl-C; changes nothing.

    A server is asked with the token in BRIDLE_SERVER_TOKEN, or its own where it is yours; a browser
    must know it too. Off loopback a browser must know the token in BRIDLE_DASHBOARD_TOKEN.
    """
    allowed = tuple(allow_host or ())
    with _source(target) as (source, token):
        guard = guard_of(host, os.environ.get(TOKEN_ENV) or token)
        run_until_signal(lambda stop: _serve(source, guard, host, port, allowed, stop, json=json))


def guard_of(host: str, token: str | None) -> Guard | None:
    """Return the guard of the dashboard; `None` = open to all who reach it.

    `ConfigError` for a dashboard that others reach and that has no token.
    """
    from bridle.dashboard.app import Guard

    if token:
        return Guard(lambda sent: hmac.compare_digest(sent.encode(), token.encode()))
    if not is_loopback(host):
        raise ConfigError(f"others reach {host}: set {TOKEN_ENV}, which a browser must then know")
    return None


@contextmanager
def _source(target: str) -> Iterator[tuple[DataSource, str | None]]:
    """Yield the source that is shown, and the token that reads it, if any."""
    from bridle.dashboard.folder import FolderSource

    if target.startswith(("http://", "https://")):
        from bridle.client import Client
        from bridle.dashboard.server import ServerSource

        with Client(target, patience_s=1.0) as client:
            client.status()
            yield ServerSource(client, client.url), client.token
        return
    path = Path(target)
    if not path.exists():
        raise ConfigError(f"there is no {target}")
    folder = FolderSource(path)
    try:
        yield folder, None
    finally:
        folder.close()


async def _serve(
    source: DataSource,
    guard: Guard | None,
    host: str,
    port: int,
    allowed: Sequence[str],
    stop: Stop,
    *,
    json: bool,
) -> None:
    from bridle.dashboard.app import make_app
    from bridle.server.app import listening

    app = make_app(source, guard)
    async with listening(app, host=host, port=port, allowed=allowed) as url:
        if json:  # a line that can be waited for
            sys.stdout.write(orjson.dumps({"url": url}).decode() + "\n")
            sys.stdout.flush()
        notes.print(f"dashboard of {source.title} at {url}", markup=False, soft_wrap=True)
        await stop.wait()
