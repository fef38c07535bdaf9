"""The server's HTTP application, and how it is served until it is asked to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from bridle.errors import cannot_listen
from bridle.hosts import Hosts
from bridle.server import node_routes, polar_routes, v1_routes
from bridle.server.answering import Asked, Served, reply, route
from bridle.server.connections import Connection
from bridle.server.openapi import describe
from bridle.server.schemas import error_json


def make_app(served: Served, mounts: Sequence[Mount] = ()) -> Starlette:
    """All routes as one ASGI application, and whatever else is served under paths of its own."""
    routes = [
        *polar_routes.routes(served),
        *v1_routes.routes(served),
        *node_routes.routes(served),
    ]

    async def openapi(_: Asked) -> Response:
        """`GET /openapi.json`: this description."""
        return reply(describe(routes))

    routes.append(route(served, "GET", "/openapi.json", None, openapi))
    return Starlette(routes=[*routes, *mounts], exception_handlers={HTTPException: _no_route})


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "error")
    return reply(error_json(code, error.detail), error.status_code)


@asynccontextmanager
async def serving(
    served: Served,
    *,
    host: str,
    port: int,
    mounts: Sequence[Mount] = (),
    allowed: Collection[str] = (),
) -> AsyncIterator[str]:
    """Serve inside; yields the server's URL. `ConfigError` if the port cannot be had.

    `allowed` are names in the `Host` header that are answered beside the listener's own. When it is
    left, answers that are under way get a second.
    """
    app = make_app(served, mounts)
    async with listening(app, host=host, port=port, allowed=allowed) as url:
        try:
            yield url
        finally:
            served.service.stopping.set()
            served.service.groups.beat()


@asynccontextmanager
async def listening(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    allowed: Collection[str] = (),
    connection: type[Connection] = Connection,
) -> AsyncIterator[str]:
    """Serve any application inside; as `serving`."""
    listener = _bound(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        _guarded(app, Hosts(host, allowed, "--allow-host (setting server.hosts)")),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
        http=connection,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve(sockets=[listener]), name="http")
        try:
            await server.up.wait()
            yield url
        finally:
            server.should_exit = True
            await asyncio.wait({task})
            listener.close()


def _guarded(app: ASGIApp, hosts: Hosts) -> ASGIApp:
    """The application, for requests to a name or address of the listener only."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        refused = hosts.refusal(sent)
        if refused is None:
            await app(scope, receive, send)
        else:
            await reply(error_json("misdirected", refused), 421)(scope, receive, send)

    return guarded


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to the process it lives in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        await self._serve(sockets)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener
