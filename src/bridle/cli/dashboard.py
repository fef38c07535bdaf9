"""`bridle dashboard`: pages about a folder of runs or a rollout server, in a browser.

`bridle serve` mounts the same pages under its own address (`dashboard_mount`).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Final

import typer
from starlette.routing import Mount

from bridle.cli.options import AllowHostOption, JsonOption
from bridle.cli.output import notes, print_json_line
from bridle.cli.process import Stop, run_until_signal
from bridle.client import Client
from bridle.credentials import is_loopback
from bridle.dashboard.app import Guard, make_app
from bridle.dashboard.folder import FolderSource
from bridle.dashboard.server import ServerSource
from bridle.dashboard.source import DataSource
from bridle.errors import ConfigError
from bridle.server.app import serve_app
from bridle.server.http import Auth, Caller, TokenRole

TOKEN_ENV: Final = "BRIDLE_DASHBOARD_TOKEN"  # noqa: S105 - the variable's name
"""Token that browsers must give; required off loopback."""

MOUNT_PATH: Final = "/ui"


def dashboard(
    target: Annotated[
        str,
        typer.Argument(
            help="Run, training, data folder, folder of these, or URL of a rollout server."
        ),
    ] = "runs",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8090,
    allow_host: AllowHostOption = None,
    json: JsonOption = False,
) -> None:
    """Show runs, sessions, exchanges and tokens in a browser, until Ctrl-C.

    It changes nothing; of a server's sessions a person can submit forks. A server is read with the
    token in BRIDLE_SERVER_TOKEN, or its own token if it is yours; a browser must give it too. Off
    loopback a browser must give the token in BRIDLE_DASHBOARD_TOKEN.
    """
    allowed = tuple(allow_host or ())
    with _source(target) as (source, token):
        guard = access_control(host, os.environ.get(TOKEN_ENV) or token)
        run_until_signal(lambda stop: _serve(source, guard, host, port, allowed, stop, json=json))


def access_control(host: str, token: str | None) -> Guard | None:
    """Return the access control of the dashboard; `None` = open to everybody who reaches it.

    `ConfigError` off loopback without a token.
    """
    if token:
        return Guard(lambda sent: hmac.compare_digest(sent.encode(), token.encode()))
    if not is_loopback(host):
        raise ConfigError(f"{host} is not loopback: set {TOKEN_ENV}, which browsers must then give")
    return None


@contextmanager
def _source(target: str) -> Iterator[tuple[DataSource, str | None]]:
    """Open the data source that `target` names; yield it and its token, if any."""
    if target.startswith(("http://", "https://")):
        with Client(target, patience_s=1.0) as client:
            client.status()
            yield ServerSource(client, client.url), client.token
        return
    path = Path(target)
    if not path.exists():
        raise ConfigError(f"{target} does not exist")
    with closing(FolderSource(path)) as folder:
        yield folder, None


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
    app = make_app(source, guard)
    async with serve_app(app, host=host, port=port, allowed=allowed) as url:
        if json:
            print_json_line({"url": url})
        notes.print(f"dashboard of {source.title} at {url}", markup=False, soft_wrap=True)
        await stop.wait()


@contextmanager
def dashboard_mount(url: Callable[[], str], auth: Auth, data: Path) -> Iterator[Mount]:
    """Build the dashboard under `MOUNT_PATH`, open to every token with the role `read`.

    It reads the server's own API with the token of the request. `url` returns the server's address
    once it listens; `data` holds the capture of a node of this process, if there is one.
    """
    with ExitStack() as opened:
        folder = None
        with suppress(ConfigError):
            folder = opened.enter_context(closing(FolderSource(data / "capture.sqlite")))

        @cache
        def source_of(token: str) -> ServerSource:
            # The capture holds the sessions of all owners: only an admin may read it.
            caller = _caller(auth, token)
            own = folder if caller is not None and caller.tenant is None else None
            # The client replaces an empty token by the one that this user's clients find.
            client = opened.enter_context(Client(url(), token=token or "none", patience_s=1.0))
            may_submit = may(auth, token, TokenRole.SUBMIT)
            return ServerSource(client, "rollout server", own, may_submit=may_submit)

        guard = Guard(lambda token: may(auth, token, TokenRole.READ))
        yield Mount(MOUNT_PATH, make_app(source_of, guard))


def may(auth: Auth, token: str, role: TokenRole) -> bool:
    caller = _caller(auth, token)
    return caller is not None and caller.may(role)


def _caller(auth: Auth, token: str) -> Caller | None:
    return auth.caller([(b"authorization", b"Bearer " + token.encode())])
