"""The server's HTTP application: its routes, their OpenAPI 3.1 description, and its listener.

Routes of nodes and engines are here, those of tasks in `v1_routes` and `polar_routes`. Client
connections have the limits of `bridle.gateway.listener`, here on uvicorn.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bridle import __version__
from bridle.errors import ConfigError, cannot_listen
from bridle.gateway.listener import UNFINISHED_BYTES, most_connections
from bridle.gateway.weights import AddReplica
from bridle.hosts import Hosts
from bridle.server import polar_routes, v1_routes
from bridle.server.answering import KNOWN, Asked, Endpoint, Refusal, ServerContext, reply, route
from bridle.server.auth import Role
from bridle.server.schemas import error_json
from bridle.types import JSON

HEAD_S: Final = 20.0
"""Seconds from the first byte of a request, or from the connection, to the end of its head."""


class Connection(H11Protocol):
    """One client connection with a deadline for each request's head."""

    most: ClassVar[int | None] = None
    """Connections at a time; `None` = `most_connections()`."""
    head_s: ClassVar[float] = HEAD_S
    room: ClassVar[int] = UNFINISHED_BYTES
    """Bytes of unfinished heads, over all connections of a listener."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - uvicorn's own, passed through
        super().__init__(*args, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        self._unfinished = 0
        """Bytes of the head that is being read."""
        self.made_at = self.loop.time()

    @property
    def is_waiting(self) -> bool:
        """Return whether no request is being answered."""
        # `None` before the first request, whatever its type says.
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    @property
    def is_known(self) -> bool:
        """Return whether its last request was authenticated."""
        return self.cycle is not None and KNOWN in self.cycle.scope["state"]  # type: ignore[redundant-expr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Make room, then take the client in; it has the time of a head to send one."""
        if len(self.connections) >= (self.most or most_connections()):
            self._make_room()
        super().connection_made(transport)
        self._watch()

    def _make_room(self) -> None:
        """Close an eighth of the oldest without a valid token, as the gateway's listener does."""
        held = [one for one in self.connections if isinstance(one, Connection)]
        waiting = [one for one in held if one.is_waiting]
        strangers = [one for one in held if not one.is_known]
        closed = [one for one in strangers if one.is_waiting] or strangers or waiting
        closed.sort(key=lambda one: (one.cycle is not None, one.made_at))
        for one in closed[: 1 + len(closed) // 8]:
            one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Time and count the head that these bytes may begin, and stop at its end."""
        if self.is_waiting:
            self._watch()
        super().data_received(data)
        if self.is_waiting:
            self._count(len(data))
        else:
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline and the bytes."""
        self._unwatch()
        super().connection_lost(exc)

    def _count(self, more: int) -> None:
        assert isinstance(self.config, _Config)
        self._unfinished += more
        self.config.unfinished += more
        if self.config.unfinished > self.room:
            self._make_room()

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def _unwatch(self) -> None:
        self._count(-self._unfinished)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Config(uvicorn.Config):
    """Settings of a listener, and a sum over its connections."""

    unfinished = 0
    """Bytes of unfinished heads."""


def make_app(served: ServerContext, mounts: Sequence[Mount] = ()) -> Starlette:
    """All routes as one ASGI application, and whatever else is served under paths of its own."""
    routes = [
        *polar_routes.routes(served),
        *v1_routes.routes(served),
        *node_routes(served),
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
    served: ServerContext,
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


ERROR: Final[JSON] = {
    "type": "object",
    "required": ["error", "detail"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "param"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        },
        "detail": {"type": "string"},
    },
}

REFUSALS: Final = {
    "400": "the body is no JSON",
    "401": "no known token",
    "403": "the token lacks the role",
    "404": "there is none of that name",
    "406": "none of the accepted types can be had",
    "409": "the id is taken by another body, or the session has nothing to score",
    "413": "the body is too large",
    "422": "a field is wrong; `param` names it",
    "429": "the owner has too many unfinished sessions, or this address sent too many wrong tokens",
    "502": "the engines did not do their part",
    "503": "the database or a file cannot be used now; try again",
}


def describe(routes: Sequence[Route]) -> JSON:
    schemas: JSON = {"Error": ERROR}
    paths: JSON = {}
    for one in routes:
        path = re.sub(r":path}", "}", one.path)
        for method in sorted((one.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(one, path, method, schemas)
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
    name = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
    refused = {
        status: {"description": text, "content": _content({"$ref": "#/components/schemas/Error"})}
        for status, text in REFUSALS.items()
    }
    operation: JSON = {
        "operationId": name,
        "summary": endpoint.about,
        "security": [] if endpoint.is_open else [{"bearer": []}, {"polar": []}],
        "parameters": [*_in_path(path), *_in_query(endpoint)],
        "responses": {"200": {"description": "done"}, **refused},
    }
    if endpoint.body is not None:
        schema = endpoint.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[endpoint.body.__name__] = schema
        ref = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": _content(ref)}
    return operation


def _in_path(path: str) -> list[JSON]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _in_query(endpoint: Endpoint) -> list[JSON]:
    return [
        {"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()
    ]


def _content(schema: JSON) -> JSON:
    return {"application/json": {"schema": schema}}


def node_routes(served: ServerContext) -> list[Route]:
    """Return the routes of nodes and of the engines that they use."""
    drain_s = {"type": "integer", "minimum": 0, "maximum": 3600, "default": 0}
    return [
        route(served, "GET", "/v1/nodes", Role.READ, show_nodes),
        route(served, "POST", "/v1/nodes/{name}/drain", Role.ADMIN, drain_node),
        route(served, "POST", "/v1/replicas", Role.ADMIN, add_replica, body=AddReplica),
        route(
            served,
            "DELETE",
            "/v1/replicas",
            Role.ADMIN,
            remove_replica,
            query={"name": {"type": "string"}, "drain_s": drain_s},
        ),
    ]


async def show_nodes(asked: Asked) -> Response:
    """`GET /v1/nodes`: which nodes there are, their slots, and what they do."""
    return reply({"nodes": asked.service.workers.nodes()})


async def drain_node(asked: Asked) -> Response:
    """`POST /v1/nodes/{name}/drain`: no further session there; it leaves when its last has ended.

    `name` is its name or its `node_id`.
    """
    try:
        await asked.service.workers.drain_node(asked.path("name"))
    except ConfigError as error:
        raise Refusal(404, "not_found", str(error), param="name") from error
    return await show_nodes(asked)


async def add_replica(asked: Asked) -> Response:
    """`POST /v1/replicas`: a server joins the policy's engines, on every node."""
    wanted = await asked.body(AddReplica)
    await asked.service.workers.add_replica(wanted.engine)
    return await show_nodes(asked)


async def remove_replica(asked: Asked) -> Response:
    """`DELETE /v1/replicas?name=&drain_s=`: a server leaves them, its calls after `drain_s`."""
    name = asked.query("name")
    if not name:
        raise Refusal(422, "invalid", "name: the replica to remove", param="name")
    drain_s = asked.number("drain_s", 0, most=3600)
    try:
        await asked.service.workers.remove_replica(name, float(drain_s))
    except ConfigError as error:
        raise Refusal(404, "not_found", str(error), param="name") from error
    return await show_nodes(asked)
