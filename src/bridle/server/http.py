"""Request handling that all routes share: authentication, limits, and errors as JSON.

Bearer tokens with roles come from a file, from the environment, and the operator's own:
`server.token` in the data folder, made at the first start. A sent token's digest is compared with
every known one in constant time.

An error is `{"error": {"code", "message", "param"}, "detail"}`; Polar's clients read `detail`. A
database that cannot be used gives 503 with `Retry-After`; only a bug gives 500.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec
import orjson
import structlog
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bridle.config import Settings, explain, field_path, first_fault, load_toml, validated
from bridle.credentials import load_or_make_token
from bridle.dialects.json_reader import check_depth, check_json, check_values
from bridle.errors import (
    BridleError,
    ConfigError,
    EngineError,
    RequestError,
    StateError,
    StoreError,
)
from bridle.gateway.faults import trace_of
from bridle.gateway.keys import TOO_MANY, WrongTokens
from bridle.gateway.listener import most_connections
from bridle.server.callbacks import CallbackAddresses
from bridle.server.finalize import ConflictError
from bridle.server.queries import Queries
from bridle.server.service import Service
from bridle.server.settings import SubmissionPolicy
from bridle.server.store import QuotaError
from bridle.trajectory.result import encode
from bridle.types import JSON

TOKEN_ENV: Final = "BRIDLE_SERVER_TOKEN"  # noqa: S105 - the variable's name
"""A token with the role `admin`; clients and the command line send its value."""

HEADER: Final = b"x-polar-control-token"
"""Header of Polar's clients. Others use `Authorization`: `Bearer`, or `Basic` with the token as
password, which HTTP clients make of `http://x:TOKEN@host`."""

TOKEN_FILE: Final = "server.token"  # noqa: S105 - the name of a file
"""File in the data folder with the operator's token, an admin's."""


class TokenRole(StrEnum):
    """A permission of a token."""

    SUBMIT = "submit"
    """Submit and cancel tasks."""
    READ = "read"
    """Read the owner's tasks, results and events, and acknowledge groups."""
    ADMIN = "admin"
    """Do everything for every owner, also change the policy, pause and replay callbacks."""
    METRICS = "metrics"
    """Read the metrics of the whole server (`GET /metrics`)."""


class ApiToken(Settings):
    """One entry of the token file: `token`, or the SHA-256 of it."""

    name: str = Field(min_length=1, max_length=200)
    """Owner whose tasks it submits and reads; several tokens may have one owner."""
    token: str | None = Field(default=None, min_length=16, repr=False)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    roles: tuple[TokenRole, ...] = (TokenRole.SUBMIT, TokenRole.READ)
    callback_secret: str | None = Field(default=None, min_length=16, repr=False)
    """Secret that signs the owner's callbacks; `None` = the server's, which all such owners
    share."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise ValueError("give each token's entry either `token` or `sha256`, and not both")
        return self

    @property
    def digest(self) -> bytes:
        """Return the sha256 digest of the token, by which callers are recognised."""
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        return _digest((self.token or "").encode())


class TokenFile(Settings):
    """The token file: `[[tokens]]` with `name`, `token` or `sha256`, and `roles`."""

    tokens: tuple[ApiToken, ...] = ()


class Caller(Settings):
    """The holder of a token."""

    name: str
    roles: frozenset[TokenRole]

    def may(self, role: TokenRole) -> bool:
        """Return whether the caller has this role; `admin` has all."""
        return role in self.roles or TokenRole.ADMIN in self.roles

    @property
    def tenant(self) -> str | None:
        """Owner whose tasks are the only ones that the caller may access; `None` = an admin: all
        tasks.
        """
        return None if TokenRole.ADMIN in self.roles else self.name


class Auth:
    """The known tokens."""

    def __init__(self, tokens: Iterable[ApiToken]) -> None:
        self._tokens = [
            (one.digest, Caller(name=one.name, roles=frozenset(one.roles))) for one in tokens
        ]

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Return the caller who sent these headers (names in lower case); `None` = unknown."""
        sent = [_digest(token) for token in sent_tokens(headers)]
        found = None
        for known, caller in self._tokens:
            for digest in sent:
                if hmac.compare_digest(known, digest):
                    found = caller
        return found


def load_tokens(
    path: Path | None, environment: Mapping[str, str] | None = None, *, own: ApiToken
) -> list[ApiToken]:
    """Return the server's API tokens: its `own` one, those of a file and that of the environment.

    Raises `ConfigError` for a file that cannot be used.
    """
    environment = os.environ if environment is None else environment
    tokens = [own]
    if path is not None:
        tokens += validated(TokenFile, load_toml(path), str(path)).tokens
    if given := environment.get(TOKEN_ENV, "").strip():
        tokens.append(_admin("environment", given, TOKEN_ENV))
    return tokens


def callback_secrets(tokens: Iterable[ApiToken]) -> dict[str, bytes]:
    """Return the callback secret of each owner that has one.

    Raises `ConfigError` if an owner has two secrets, or two owners have the same one.
    """
    secrets: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    for token in tokens:
        if token.callback_secret is None:
            continue
        secret = token.callback_secret.encode()
        if secrets.setdefault(token.name, secret) != secret:
            raise ConfigError(
                f"tokens of owner {token.name!r} have different callback_secrets; give all of "
                "them one"
            )
        if (other := owners.setdefault(secret, token.name)) != token.name:
            raise ConfigError(
                f"owners {other!r} and {token.name!r} have the same callback_secret; each needs"
                " its own"
            )
    return secrets


def own_token(folder: Path) -> ApiToken:
    """Return the operator's API token, kept in `folder` and made at the server's first start.

    Raises `ConfigError` if its file is unusable.
    """
    path = folder / TOKEN_FILE
    return _admin("operator", load_or_make_token(path), str(path))


def _admin(name: str, token: str, where: str) -> ApiToken:
    given = {"name": name, "token": token, "roles": (TokenRole.ADMIN,)}
    return validated(ApiToken, given, where)


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def sent_tokens(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yield the API tokens in a request's headers, whose names are in lower case."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield given.strip()
            elif scheme.lower() == b"basic":
                yield _password(given)
        if name == HEADER:
            yield value.strip()


Model = TypeVar("Model", bound=BaseModel)

MAX_BODY: Final = 64 << 20
"""Bytes of the largest body: a thousand tasks of 64 KB."""

MOST_VALUES: Final = 1_000_000
"""Members and items of all objects and arrays of a body: a thousand tasks of a thousand."""

LONG_BYTES: Final = 1 << 18
"""Bytes from which a body is decoded in a thread."""

BODY_S: Final = 120.0
"""Seconds that a request's body may take to arrive."""

OWNERS: Final = 4
"""One owner's requests in progress take at most this fraction (1/4) of all connections."""

KNOWN: Final = "bridle_known"
"""Key in the state of a request whose token is valid."""

JSON_TYPE: Final = "application/json"
MSGPACK_TYPE: Final = "application/msgpack"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"

UNKNOWN: Final = (
    "a valid token is needed: --token, BRIDLE_SERVER_TOKEN, or http://x:TOKEN@host; "
    "the server's own is in server.token of its data folder"
)

log = structlog.get_logger(__name__)


def error_json(code: str, message: str, *, param: str | None = None, **more: object) -> JSON:
    """Return the JSON body of an error reply: code, message and the wrong parameter."""
    return {"error": {"code": code, "message": message, "param": param, **more}, "detail": message}


class ApiError(Exception):
    """An error response with a status."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        wait_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s
        self.body = error_json(code, message, param=param)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Objects that routes need; `app.state.context` of the application."""

    service: Service
    policy: SubmissionPolicy
    auth: Auth
    addresses: CallbackAddresses
    in_progress: Counter[str] = field(default_factory=Counter)
    """Requests in progress, by owner."""
    wrong: WrongTokens = field(default_factory=WrongTokens)
    forking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a captured session is read for a fork: one at a time is in memory."""

    @contextmanager
    def counted(self, owner: str) -> Iterator[None]:
        """Count a request of `owner` while it is inside the context.

        Raises `QuotaError` if the owner has more than its share of all connections.
        """
        most = most_connections() // OWNERS
        if self.in_progress[owner] >= most:
            raise QuotaError(
                f"owner {owner!r} has {most} requests in progress, its limit; wait until one ends"
            )
        self.in_progress[owner] += 1
        try:
            yield
        finally:
            self.in_progress[owner] -= 1


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """An authenticated request."""

    request: Request
    caller: Caller
    context: ServerContext

    @property
    def service(self) -> Service:
        """Service object of the server, which carries out the request."""
        return self.context.service

    @property
    def queries(self) -> Queries:
        """Database queries, restricted to what the caller may see."""
        return self.service.queries.of(self.caller.tenant)

    def path(self, name: str) -> str:
        """Return the parameter `name` of the path. Raises `ApiError` 404 for a value that no id can
        have.
        """
        value: str = self.request.path_params[name]
        if "\x00" in value:  # PostgreSQL accepts no NUL
            raise ApiError(404, "not_found", f"{name} must not contain a NUL character", param=name)
        return value

    def query(self, model: type[Model]) -> Model:
        """Return the query parameters as `model`; of a repeated one the last.

        Raises `ApiError` 422 for a wrong one.
        """
        try:
            return model.model_validate(dict(self.request.query_params))
        except ValidationError as error:
            raise validation_error(error, "the query") from None

    async def body(self, model: type[Model]) -> Model:
        """Return the request's JSON body as `model`.

        Raises `ApiError`: 400 if it is not JSON, 408 if it does not arrive within `BODY_S`, 413 if
        it is too large, 422 with the field's name if a field is wrong.
        """
        given = await self._bytes() or b"{}"
        try:
            if len(given) > LONG_BYTES:
                return await asyncio.to_thread(_read, given, model)
            return _read(given, model)
        except RequestError as error:
            if error.status == 413:
                raise ApiError(413, "too_large", str(error)) from None
            param = (error.param or "").replace("[", ".").replace("]", "")
            raise ApiError(422, "invalid", str(error), param=param or None) from None
        except orjson.JSONDecodeError as error:
            raise ApiError(400, "malformed", f"the request's body is not JSON: {error}") from None
        except ValidationError as error:
            raise validation_error(error, "the body") from None

    async def _bytes(self) -> bytes:
        parts, size = [], 0
        announced = self.request.headers.get("content-length", "0")
        try:
            async with asyncio.timeout(BODY_S):
                async for part in self.request.stream():
                    size += len(part)
                    if size > MAX_BODY or (announced.isdigit() and int(announced) > MAX_BODY):
                        raise ApiError(
                            413, "too_large", f"a request's body may have at most {MAX_BODY} bytes"
                        )
                    parts.append(part)
        except TimeoutError:
            raise ApiError(
                408, "too_slow", f"the request's body did not arrive within {BODY_S:g} s"
            ) from None
        return b"".join(parts)


def _read(given: bytes, model: type[Model]) -> Model:
    check_values(given, MOST_VALUES)
    try:
        value = orjson.loads(given)
        check_depth(given, value, "")
    except (orjson.JSONDecodeError, RequestError):
        check_json(given)
        raise
    return model.model_validate(value)


Handler = Callable[[ApiRequest], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route's ASGI application, and its part of the OpenAPI description."""

    handler: Handler
    path: str
    role: TokenRole | None
    """Role that a token needs; `None` = the route is open to all."""
    body: type[BaseModel] | None
    query: type[BaseModel] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: ServerContext = scope["app"].state.context
        request = Request(scope, receive, send)
        with ExitStack() as stack:
            try:
                caller = self._caller(scope, context)
                if self.role is not None:
                    stack.enter_context(context.counted(caller.name))
                response = await self.handler(ApiRequest(request, caller, context))
            except ClientDisconnect:
                return
            except Exception as error:  # noqa: BLE001 - the top of a served request
                response = error_response(error)
            context.service.metrics.answered(request.method, self.path, response.status_code)
            await response(scope, receive, send)

    def _caller(self, scope: Scope, context: ServerContext) -> Caller:
        headers = scope["headers"]
        caller = context.auth.caller(headers)
        if caller is None:
            if self.role is None:
                return Caller(name="anyone", roles=frozenset())
            peer = scope["client"]
            if any(sent_tokens(headers)) and (
                wait_s := context.wrong.wait_s(None if peer is None else peer[0])
            ):
                raise ApiError(429, "too_many_attempts", TOO_MANY, wait_s=wait_s)
            raise ApiError(401, "unauthenticated", UNKNOWN)
        if self.role is not None and not caller.may(self.role):
            message = f"token {caller.name!r} lacks the role {self.role.value!r}"
            raise ApiError(403, "forbidden", message)
        scope.setdefault("state", {})[KNOWN] = True
        return caller


class RouteTable(list[Route]):
    """The routes of one file, each registered by a decorator on its handler."""

    def add(
        self,
        method: str,
        path: str,
        role: TokenRole | None,
        *,
        body: type[BaseModel] | None = None,
        query: type[BaseModel] | None = None,
    ) -> Callable[[Handler], Handler]:
        """Return the decorator that adds a handler to the table as a route for callers with `role`.

        `body` and `query` describe, for the OpenAPI page, the models that the handler itself reads.
        """

        def register(handler: Handler) -> Handler:
            self.append(Route(path, Endpoint(handler, path, role, body, query), methods=[method]))
            return handler

        return register


def reply(value: object, status: int = 200) -> Response:
    """Return an HTTP response whose body is `value` as JSON."""
    return Response(encode(value), status, media_type=JSON_TYPE)


def packed_reply(value: object) -> Response:
    """Return an HTTP response whose body is `value` as msgpack."""
    return Response(msgspec.msgpack.encode(value), media_type=MSGPACK_TYPE)


def validation_error(error: ValidationError, where: str) -> ApiError:
    """Return a 422 error that names the first wrong field; `where` is the part of the request."""
    first = first_fault(error)
    param = None if first is None else field_path(first)
    return ApiError(422, "invalid", str(explain(error, where)), param=param)


FAILURES: Final[tuple[tuple[type[BridleError], int, str], ...]] = (
    (ConflictError, 409, "conflict"),
    (QuotaError, 429, "quota"),
    (StateError, 503, "store_error"),
    (StoreError, 503, "store_error"),
    (EngineError, 502, "engine_error"),
    (ConfigError, 422, "invalid"),
    (BridleError, 503, "failed"),
)
"""Error -> status and code; the first that fits."""


RETRY_AFTER_S: Final = {429: "5", 503: "1"}
"""`Retry-After` of errors that are temporary."""


def error_response(error: Exception) -> Response:
    """Return the HTTP response for an exception: its status, its code, and `Retry-After` if any."""
    if isinstance(error, ApiError):
        response = reply(error.body, error.status)
        if error.wait_s:
            response.headers["retry-after"] = str(error.wait_s)
        return response
    for kind, status, code in FAILURES:
        if isinstance(error, kind):
            response = reply(error_json(code, str(error)), status)
            if status in RETRY_AFTER_S:
                response.headers["retry-after"] = RETRY_AFTER_S[status]
            return response
    reference = secrets.token_hex(4)
    log.error("request_failed", trace=trace_of(error), reference=reference)
    message = f"internal error of the server; reference {reference}"
    return reply(error_json("internal", message), 500)


def negotiate(request: ApiRequest, known: tuple[str, ...]) -> str:
    """Return the first media type of the caller's `Accept` that is one of `known`.

    A wildcard is the first known one. `ApiError` 406 if there is none.
    """
    wanted: str = request.request.headers.get("accept", "*/*")
    for part in wanted.split(","):
        kind: Any = part.partition(";")[0].strip().lower()
        if kind in known:
            return str(kind)
        if kind in ("*/*", "application/*", ""):
            return known[0]
    message = f"accept: {wanted[:80]!r}; available: {', '.join(known)}"
    raise ApiError(406, "not_acceptable", message)
