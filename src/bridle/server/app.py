"""The server's HTTP application: its routes, their OpenAPI 3.1 description, and its listener.

Client connections have the limits of `bridle.gateway.listener`, here on uvicorn. The OpenAPI
description comes from the route tables and their pydantic models.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, ClassVar, Final

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bridle import __version__
from bridle.credentials import Hosts
from bridle.errors import cannot_listen
from bridle.gateway.listener import UNFINISHED_BYTES, most_connections
from bridle.server import polar, routes_v1
from bridle.server.http import (
    KNOWN,
    ApiRequest,
    Endpoint,
    RouteTable,
    ServerContext,
    error_json,
    reply,
)
from bridle.types import JSON

Announced = Callable[[str], AbstractContextManager[object]]
"""Announces the URL of a server."""
HEAD_S: Final = 20.0
"""Seconds from the first byte of a request, or from the connection, to the end of its head."""


class ApiConnection(H11Protocol):
    """One client connection with a deadline for each request's head."""

    most: ClassVar[int | None] = None
    """The most connections; `None` = `most_connections()`."""
    head_s: ClassVar[float] = HEAD_S
    room: ClassVar[int] = UNFINISHED_BYTES
    """The most bytes of unfinished heads, over all connections of a listener."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - uvicorn's own, passed through
        super().__init__(*args, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        self._unfinished = 0
        """Bytes of the unfinished head."""
        self.made_at = self.loop.time()

    @property
    def is_waiting(self) -> bool:
        """Return whether no request is in progress on the connection."""
        # `None` before the first request, whatever its type says.
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    @property
    def is_known(self) -> bool:
        """Return whether the connection's last request was authenticated."""
        return self.cycle is not None and KNOWN in self.cycle.scope["state"]  # type: ignore[redundant-expr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Close other connections if there are too many, and start the deadline of the first
        header.
        """
        if len(self.connections) >= (self.most or most_connections()):
            self._close_some()
        super().connection_made(transport)
        self._start_deadline()

    def _close_some(self) -> None:
        """Close an eighth of some connections: of those that wait without a valid token, else of
        all without one, else of all that wait.
        Connections that never sent a request are closed first, then the oldest.
        """
        connections = [one for one in self.connections if isinstance(one, ApiConnection)]
        waiting = [one for one in connections if one.is_waiting]
        unknown = [one for one in connections if not one.is_known]
        closed = [one for one in unknown if one.is_waiting] or unknown or waiting
        closed.sort(key=lambda one: (one.cycle is not None, one.made_at))
        for one in closed[: 1 + len(closed) // 8]:
            one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take received bytes; closes some connections if all unfinished heads are too large."""
        if self.is_waiting:
            self._start_deadline()
        super().data_received(data)
        if self.is_waiting:
            self._count(len(data))
        else:
            self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the header's deadline and release the connection's share of the buffered bytes."""
        self._stop_deadline()
        super().connection_lost(exc)

    def _count(self, more: int) -> None:
        assert isinstance(self.config, _Config)
        self._unfinished += more
        self.config.unfinished += more
        if self.config.unfinished > self.room:
            self._close_some()

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_deadline(self) -> None:
        self._count(-self._unfinished)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Config(uvicorn.Config):
    """Settings of a listener, and a total over its connections."""

    unfinished = 0
    """Bytes of unfinished heads."""


ROUTES = RouteTable([*polar.ROUTES, *routes_v1.ROUTES])


@ROUTES.add("GET", "/openapi.json", None)
async def openapi(_: ApiRequest) -> Response:
    """Return the OpenAPI description of the server's routes."""
    return reply(describe(ROUTES))


def make_app(context: ServerContext, mounts: Sequence[Mount] = ()) -> Starlette:
    """Return the ASGI application of all the server's routes and of `mounts`."""
    app = Starlette(routes=[*ROUTES, *mounts], exception_handlers={HTTPException: _no_route})
    app.state.context = context
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "error")
    route = f"{request.method} {request.url.path[:200]}"
    message = f"the rollout server has no route {route}; /openapi.json lists its routes"
    return reply(error_json(code, message), error.status_code)


@asynccontextmanager
async def serve_api(
    context: ServerContext,
    *,
    host: str,
    port: int,
    mounts: Sequence[Mount] = (),
    allowed: Collection[str] = (),
    announced: Announced = nullcontext,
) -> AsyncIterator[str]:
    """Serve the API within the context; yields the server's URL.

    Raises `ConfigError` if the port is not available. `allowed` are names that the `Host` header
    may have besides the listener's own. `announced` is entered with the URL before the first
    connection. On leaving, requests in progress get one second.
    """
    app = make_app(context, mounts)
    async with serve_app(app, host=host, port=port, allowed=allowed, announced=announced) as url:
        try:
            yield url
        finally:
            context.service.stopping.set()
            context.service.group_ended.notify_all()


@asynccontextmanager
async def serve_app(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    allowed: Collection[str] = (),
    connection: type[ApiConnection] = ApiConnection,
    announced: Announced = nullcontext,
) -> AsyncIterator[str]:
    """Serve an ASGI application within the context; yields its URL.

    `allowed` are names that the `Host` header may have besides the listener's own. `announced` is
    entered with the URL before the first connection.
    """
    listener = _bound(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}"
    config = _Config(
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
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        stack.enter_context(announced(url))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        task = group.create_task(server.serve(sockets=[listener]), name="http")
        try:
            await server.up.wait()
            yield url
        finally:
            server.should_exit = True
            await asyncio.wait({task})


def _guarded(app: ASGIApp, hosts: Hosts) -> ASGIApp:
    """Return the application behind a check of the `Host` header, against DNS rebinding."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        refused = hosts.refusal(names)
        if refused is None:
            await app(scope, receive, send)
        else:
            await reply(error_json("misdirected", refused), 421)(scope, receive, send)

    return guarded


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to its process."""

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


REFUSALS: Final = {
    "400": "the body is not JSON",
    "401": "the token is unknown or missing",
    "403": "the token lacks the role",
    "404": "nothing has this name",
    "406": "none of the accepted types is available",
    "408": "the body did not arrive in time",
    "409": "the id has another body, or the session has nothing to score",
    "413": "the body is too large",
    "421": "the `Host` header names no address or name of this server",
    "422": "a field is wrong; `param` names it",
    "429": "the owner has too many unfinished sessions, or this address sent too many wrong tokens",
    "502": "the engines failed",
    "503": "the database or a file cannot be used now; try again",
}


class ApiErrorDetail(BaseModel):
    """Cause of an error response."""

    code: str
    message: str
    param: str | None


class Error(BaseModel):
    """Error response."""

    error: ApiErrorDetail
    detail: str


def describe(routes: Sequence[Route]) -> JSON:
    """Return the OpenAPI description of `routes`."""
    schemas: JSON = {}
    error = {"application/json": {"schema": _schema(Error, schemas)}}
    refused = {status: {"description": text, "content": error} for status, text in REFUSALS.items()}
    paths: JSON = {}
    for one in routes:
        path = re.sub(r":path}", "}", one.path)
        for method in sorted((one.methods or set()) - {"HEAD"}):
            operation = _operation(one, path, method, schemas)
            operation["responses"] |= refused
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bridle rollout server", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "polar": {"type": "apiKey", "in": "header", "name": "x-polar-control-token"},
            },
        },
    }


def _operation(one: Route, path: str, method: str, schemas: JSON) -> JSON:
    endpoint = one.endpoint
    assert isinstance(endpoint, Endpoint)
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    operation: JSON = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": (endpoint.handler.__doc__ or "").partition("\n\n")[0],
        "security": [{"bearer": []}, {"polar": []}] if endpoint.role is not None else [],
        "parameters": [*in_path, *_in_query(endpoint.query, schemas)],
        "responses": {"200": {"description": "done"}},
    }
    if endpoint.body is not None:
        content = {"application/json": {"schema": _schema(endpoint.body, schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _in_query(model: type[BaseModel] | None, schemas: JSON) -> list[JSON]:
    if model is None:
        return []
    schema = model.model_json_schema(ref_template=REF)
    schemas.update(schema.pop("$defs", {}))
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": one}
        for name, one in schema["properties"].items()
    ]


def _schema(model: type[BaseModel], schemas: JSON) -> JSON:
    """Add a model to `schemas`; return the reference to it."""
    schema = model.model_json_schema(ref_template=REF)
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    return {"$ref": REF.format(model=model.__name__)}


REF: Final = "#/components/schemas/{model}"
