"""`bridle dashboard`: pages over a folder of runs, or over a rollout server, in a browser."""

from __future__ import annotations

import hmac
import ipaddress
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import orjson
import typer

from bridle.cli.output import notes
from bridle.cli.serving import Stop, run_until_signal
from bridle.errors import ConfigError

if TYPE_CHECKING:
    from bridle.dashboard.guard import Guard
    from bridle.dashboard.source import Source

TOKEN_ENV: Final = "BRIDLE_DASHBOARD_TOKEN"  # noqa: S105 - the variable's name
"""What a browser must know to look; needed off loopback."""

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def dashboard(
    target: Annotated[
        str,
        typer.Argument(
            help="A run, a training, a data folder, a folder of them, or a rollout server's URL."
        ),
    ] = "runs",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8090,
    json: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
) -> None:
    """Show runs, sessions, exchanges and tokens in a browser, until Ctrl-C; changes nothing.

    A server is asked with the token in BRIDLE_SERVER_TOKEN. Off loopback a browser must know the
    token in BRIDLE_DASHBOARD_TOKEN.
    """
    guard = guard_of(host, os.environ.get(TOKEN_ENV))
    with _source(target) as source:
        run_until_signal(lambda stop: _serve(source, guard, host, port, stop, json=json))


def guard_of(host: str, token: str | None) -> Guard:
    """Who may look. `ConfigError` for a server that others reach and that has no token."""
    from bridle.dashboard.guard import Guard

    if token:
        return Guard(lambda sent: hmac.compare_digest(sent.encode(), token.encode()))
    if not _is_loopback(host):
        raise ConfigError(f"others reach {host}: set {TOKEN_ENV}, which a browser must then know")
    return Guard(hosts={*LOOPBACK, host})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _source(target: str) -> Iterator[Source]:
    from bridle.dashboard.folder import Folder

    if target.startswith(("http://", "https://")):
        from bridle.client import Client
        from bridle.dashboard.served import Served

        with Client(target, patience_s=1.0) as client:
            client.status()
            yield Served(client, target)
        return
    path = Path(target)
    if not path.exists():
        raise ConfigError(f"there is no {target}")
    folder = Folder(path)
    try:
        yield folder
    finally:
        folder.close()


async def _serve(
    source: Source, guard: Guard, host: str, port: int, stop: Stop, *, json: bool
) -> None:
    from bridle.dashboard.app import make_app
    from bridle.server.app import listening

    async with listening(make_app(source, guard), host=host, port=port) as url:
        if json:  # a line that can be waited for
            sys.stdout.write(orjson.dumps({"url": url}).decode() + "\n")
            sys.stdout.flush()
        notes.print(f"dashboard of {source.title} at {url}", markup=False, soft_wrap=True)
        await stop.wait()
