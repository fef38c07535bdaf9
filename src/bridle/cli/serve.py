"""`bridle serve` and `bridle dashboard`: the rollout server, and pages in a browser.

The server has a node in its process or nodes on a Ray cluster. The pages are about a folder of runs
or a rollout server; `serve` mounts them under its own address, too (`dashboard_mount`).
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from starlette.routing import Mount

from bridle import telemetry
from bridle.aio import Nursery
from bridle.bridges import parquet
from bridle.capture.sqlite import SqliteStore
from bridle.cli.config import FileConfig, open_setup
from bridle.cli.process import Stop, long_running, run_until_signal
from bridle.cli.terminal import (
    AllowHostOption,
    EngineOptions,
    JsonOption,
    PromptOption,
    StreamOption,
    TelemetryOption,
    check_folder,
    check_storage,
    notes,
    print_json_line,
    with_option_groups,
)
from bridle.client import Client
from bridle.credentials import announce_server, is_loopback
from bridle.dashboard.app import Guard, make_app
from bridle.dashboard.folder import FolderSource
from bridle.dashboard.server import ServerSource
from bridle.dashboard.source import DataSource
from bridle.errors import ConfigError, install_extra
from bridle.folders import FolderLock, private_file
from bridle.node.base import SessionRunner
from bridle.node.cluster import ClusterRunner
from bridle.node.local import LocalNode, NodeSettings
from bridle.node.results import ServerFolder
from bridle.server.app import serve_api, serve_app
from bridle.server.callbacks import CallbackAddresses, CallbackSender, callback_secret
from bridle.server.http import (
    TOKEN_FILE,
    Auth,
    Caller,
    ServerContext,
    TokenRole,
    callback_secrets,
    load_tokens,
    own_token,
)
from bridle.server.scheduler import first_named, follow
from bridle.server.service import Service
from bridle.server.settings import ServerSettings
from bridle.server.storage import Database, TrajectoryFiles

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
        guard = access_control(host, os.environ.get(TOKEN_ENV, "").strip() or token)
        run_until_signal(
            lambda stop: _serve_pages(source, guard, host, port, allowed, stop, json=json)
        )


def access_control(host: str, token: str | None) -> Guard | None:
    """Return the access control of the dashboard; `None` = open to everybody who reaches it.

    `ConfigError` off loopback without a token.
    """
    if token:
        return Guard(lambda sent: hmac.compare_digest(sent.encode(), token.encode()))
    if not is_loopback(host):
        raise ConfigError(
            f"other machines can reach a dashboard at {host}: set {TOKEN_ENV}, a token that "
            "browsers must then give"
        )
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
        raise ConfigError(f"{target}: no such file or folder; give a run, or the URL of a server")
    with closing(FolderSource(path)) as folder:
        yield folder, None


async def _serve_pages(
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
    """Yield the routes of the dashboard under `MOUNT_PATH`, open to every token with the role
    `read`.

    The dashboard reads the server's own API with the token of the request. `url` returns the
    server's address once it listens; `data` holds the capture of a node of this process, if there
    is one.
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
    """Return whether the caller with this token has the role."""
    caller = _caller(auth, token)
    return caller is not None and caller.may(role)


def _caller(auth: Auth, token: str) -> Caller | None:
    return auth.caller([(b"authorization", b"Bearer " + token.encode())])


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """Flags of the `[server]` table, and `--json`."""

    engines_from: Annotated[
        str | None, typer.Option(help="File or URL that lists engines, read periodically.")
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None
    port: Annotated[
        int | None, typer.Option(help="Port of the server; 0 takes a free one. [8080]")
    ] = None
    data: Annotated[Path | None, typer.Option(help="Data folder. [runs/server]")] = None
    database: Annotated[
        str | None,
        typer.Option(help="postgresql://... or a file; default: SQLite in the data folder."),
    ] = None
    trajectories: Annotated[
        str | None, typer.Option(help="Folder or URL (s3://...) of trajectories.")
    ] = None
    tokens: Annotated[
        Path | None, typer.Option(help="TOML file with the [[tokens]] of other users.")
    ] = None
    allow_host: AllowHostOption = None
    allow_path: Annotated[
        list[Path] | None, typer.Option(help="Folder whose files tasks may name; repeatable.")
    ] = None
    callback_to: Annotated[
        list[str] | None,
        typer.Option(help="Host name or network that callbacks may be sent to; repeatable."),
    ] = None
    json: JsonOption = False

    def table(self) -> dict[str, Any]:
        """Return the flags as values of the config table `[server]`; `None` = not given."""
        names = ("engines_from", "host", "port", "data", "database", "trajectories", "tokens")
        permits = {"host_paths": self.allow_path or None, "callbacks": self.callback_to or None}
        lists = {"hosts": self.allow_host or None, "permits": permits}
        return {name: getattr(self, name) for name in names} | lists


@with_option_groups
def serve(
    engines: EngineOptions,
    server: ServeFlags,
    executor: Annotated[
        str | None, typer.Option(help="Where sessions run: local (the default) or ray.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Harnesses running at once on a node; default: twice the cores."),
    ] = None,
    telemetry: TelemetryOption = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve the dashboard too, under /ui.")
    ] = False,
    stream: StreamOption = None,
    prompt: PromptOption = None,
) -> None:
    """Serve rollouts over HTTP until Ctrl-C; accepted tasks survive restarts."""
    loaded = engines.load(
        gateway={"stream": stream, "prompt": prompt},
        server=server.table(),
        executor={"kind": executor, "node": {"run_slots": concurrency}},
        telemetry=telemetry,
    )
    _check_output(loaded.server)
    run_until_signal(lambda stop: _serve(loaded, stop, dashboard=dashboard, as_json=server.json))


def _check_output(server: ServerSettings) -> None:
    check_folder(server.data, "--data")
    if server.trajectories and "://" in server.trajectories:
        check_storage(server.trajectories, "--trajectories")
    elif server.trajectories:
        check_folder(Path(server.trajectories), "--trajectories")


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """A running server."""

    service: Service
    url: str
    token_file: Path
    """File with the operator's token."""


async def _serve(config: FileConfig, stop: Stop, *, dashboard: bool, as_json: bool) -> None:
    if config.server.engines_from and not config.engines:
        found = await first_named(config.server.engines_from, stop)
        if not found:
            return
        config = config.model_copy(update={"engines": tuple(found)})
    async with server_of(config, dashboard=dashboard) as served:
        if as_json:
            print_json_line({"url": served.url, "token_file": str(served.token_file)})
        where = f", on the Ray cluster {ray}" if (ray := _cluster(config)) else ""
        notes.print(f"rollout server at {served.url}, data in {config.server.data}{where}")
        notes.print(f"its token is in {served.token_file}; clients of this user find it")
        if dashboard:
            notes.print(f"its dashboard is at {served.url}/ui/")
        with long_running():
            await stop.wait()
            if left := await served.service.drain():
                what = (
                    "continue without it" if ray else "still run; the next server runs them again"
                )
                notes.print(f"{left} sessions {what}")


def _cluster(config: FileConfig) -> str | None:
    """Return the address of the Ray cluster that runs sessions; `None` = this process does."""
    if config.executor.kind == "local":
        return None
    from bridle.node.ray import address

    return address()


@asynccontextmanager
async def server_of(config: FileConfig, *, dashboard: bool = False) -> AsyncIterator[ServerSetup]:
    """Run a server within the context: engines, gateways, nodes, database, HTTP and, if asked for,
    the dashboard.

    `ConfigError` or `EngineError` if it cannot start; it cleans up after itself.
    """
    settings = config.server.checked()
    data = settings.data
    async with AsyncExitStack() as stack:
        stack.enter_context(FolderLock(data))
        tokens = load_tokens(settings.tokens, own=own_token(data))
        signing = callback_secrets(tokens)
        auth = Auth(tokens)
        owner = _owner(data)
        workers = await stack.enter_async_context(workers_of(config, data, owner))
        stack.enter_context(send_to_trackers(config, data, workers))
        database = await Database.open(settings.database or str(data / "server.sqlite"))
        await stack.enter_async_context(database)
        service = Service(
            database=database,
            files=TrajectoryFiles(settings.trajectories or data / "trajectories", parquet),
            workers=workers,
            settings=settings,
            owner=owner,
        )
        await stack.enter_async_context(service)
        await workers.settle()
        addresses = CallbackAddresses(settings.permits.callbacks)
        nursery = await stack.enter_async_context(Nursery(service.failed))
        deliverer = CallbackSender(service, addresses, callback_secret(data), secrets=signing)
        nursery.start(deliverer.run(), name="deliverer")
        if settings.engines_from:
            nursery.start(follow(settings.engines_from, workers, config.engines), name="engines")
        served = ServerContext(service, settings.permits, auth, addresses)
        mounts = []
        if dashboard:
            mounts.append(stack.enter_context(dashboard_mount(lambda: url, auth, data)))
        url = await stack.enter_async_context(
            serve_api(
                served,
                host=settings.host,
                port=settings.port,
                mounts=mounts,
                allowed=settings.hosts,
                announced=lambda url: _announced(url, data / TOKEN_FILE),
            )
        )
        yield ServerSetup(service, url, data / TOKEN_FILE)


@contextmanager
def _announced(url: str, token_file: Path) -> Iterator[None]:
    """Let clients find the token inside, or note that they cannot."""
    with ExitStack() as stack:
        try:
            stack.enter_context(announce_server(url, token_file))
        except OSError as error:
            notes.print(f"clients cannot find the token by themselves: {error}", markup=False)
        yield


def _owner(data: Path) -> str:
    """Return the owner of this server's leases, the same at every start on this folder."""
    path = private_file(data / "server.id")
    if not path.read_text():  # new, or the disk was full when it was
        path.write_text(secrets.token_hex(8))
    return path.read_text()


@asynccontextmanager
async def open_node(
    config: FileConfig, folder: Path, cpus: float | None = None
) -> AsyncIterator[LocalNode]:
    """Open the node that a config describes; without configured run slots it has two per CPU."""
    given = config.executor.node.model_dump(exclude_unset=True)
    if cpus is not None:
        given.setdefault("run_slots", max(1, round(2 * cpus)))
    setup = open_setup(config)
    async with AsyncExitStack() as stack:
        logs = stack.enter_context(ServerFolder.open(folder / "node"))
        store = await stack.enter_async_context(await SqliteStore.open(folder / "capture.sqlite"))
        own = config.gateway.model_copy(update={"data_dir": folder})
        gateway = setup.gateway(store, own)
        await stack.enter_async_context(gateway)
        settings = NodeSettings.model_validate(given)
        node = LocalNode(gateway=gateway, store=store, folder=logs, settings=settings)
        await stack.enter_async_context(node)
        yield node


@asynccontextmanager
async def workers_of(config: FileConfig, data: Path, owner: str) -> AsyncIterator[SessionRunner]:
    """Open the nodes that run a server's sessions; `owner` is the server's name.

    `ConfigError` or `EngineError` if they cannot start.
    """
    if config.executor.kind == "local":
        async with open_node(config, data) as node:
            yield node
        return
    try:
        from bridle.node.ray import RayCluster
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"executor 'ray' cannot be loaded: {error}; run {install_extra('ray')}"
        ) from error
    settings = config.executor.ray
    async with (
        ClusterRunner(owner, outlive=True, timeouts=settings) as runner,
        RayCluster(runner, settings, opens=partial(open_node, config), folder=data / "nodes"),
    ):
        yield runner


@contextmanager
def send_to_trackers(config: FileConfig, data: Path, workers: SessionRunner) -> Iterator[None]:
    """Within the context, send the nodes' events to the experiment trackers that `config` names."""
    facts = config.model_dump(mode="json", include={"engines", "tokenizer", "telemetry"})
    with (
        telemetry.open_trackers(config.telemetry, data, facts) as trackers,
        workers.events.listening(trackers.on_event),
    ):
        yield
