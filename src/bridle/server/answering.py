"""Request handling that all routes share: authentication, body limits, errors as JSON.

Refusals are `{"error": {"code", "message", "param"}, "detail"}`. A database that cannot be used is
503 with `Retry-After`; only a bug of ours is 500.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import orjson
import structlog
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bridle.config import explain, first_fault
from bridle.dialects.json_reader import check_depth, check_json, check_values
from bridle.errors import (
    BridleError,
    ConfigError,
    EngineError,
    RequestError,
    StateError,
    StoreError,
)
from bridle.gateway.attempts import TOO_MANY, WrongTokens
from bridle.gateway.faults import trace_of
from bridle.gateway.listener import most_connections
from bridle.server.addresses import Addresses
from bridle.server.auth import Auth, Caller, Role, sent_tokens
from bridle.server.closing import ConflictError
from bridle.server.permits import Permits
from bridle.server.schemas import BATCH, error_json
from bridle.server.service import Service
from bridle.server.state import QuotaError
from bridle.server.views import Views
from bridle.server.wire import Row
from bridle.trajectory.result import encode
from bridle.types import JSON

Model = TypeVar("Model", bound=BaseModel)

MAX_BODY: Final = 64 << 20
"""Bytes of the largest request: a thousand tasks of 64 KB."""

MOST_VALUES: Final = 1_000_000
"""Members and items of all objects and arrays of a request: a thousand tasks of a thousand."""

LONG_BYTES: Final = 1 << 18
"""Bytes from which a body is decoded in a thread."""

BODY_S: Final = 120.0
"""Seconds that a request's body may take to arrive."""

OWNERS: Final = 4
"""One owner's requests under way take this part of all connections at most."""

KNOWN: Final = "bridle_known"
"""In the state of a request: its token is valid."""

JSON_TYPE: Final = "application/json"
MSGPACK_TYPE: Final = "application/msgpack"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"

UNKNOWN: Final = (
    "a known token is needed: --token, BRIDLE_SERVER_TOKEN, or http://x:TOKEN@host; "
    "the server's own is in server.token of its data folder"
)

log = structlog.get_logger(__name__)


class Refusal(Exception):
    """A request is answered with this status."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        wait_s: int = 0,
        **more: object,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s
        self.body = error_json(code, message, param=param, **more)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Objects that routes need."""

    service: Service
    permits: Permits
    auth: Auth
    addresses: Addresses
    """Where callbacks may go."""
    under_way: Counter[str] = field(default_factory=Counter)
    """Requests that are being answered, by owner."""
    wrong: WrongTokens = field(default_factory=WrongTokens)

    @contextmanager
    def share(self, owner: str) -> Iterator[None]:
        """Count a request of an owner inside. `QuotaError` beyond its share of connections."""
        most = most_connections() // OWNERS
        if self.under_way[owner] >= most:
            raise QuotaError(f"owner {owner!r} has {most} requests under way, the most of one")
        self.under_way[owner] += 1
        try:
            yield
        finally:
            self.under_way[owner] -= 1


class Page(NamedTuple):
    """A part of a list."""

    after: int
    """The rows behind this cursor."""
    limit: int

    def told(self, what: str, rows: Sequence[Row], place: str, form: Callable[[Row], JSON]) -> JSON:
        """The answer: `rows` in their form under `what`, and `cursor`, the last one's `place`."""
        cursor = rows[-1][place] if rows else self.after
        return {what: [form(row) for row in rows], "cursor": cursor}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, past its token."""

    request: Request
    caller: Caller
    served: ServerContext

    @property
    def service(self) -> Service:
        return self.served.service

    @property
    def views(self) -> Views:
        """Return the caller's views of the state."""
        return self.service.views.of(self.caller.tenant)

    def path(self, name: str) -> str:
        """A part of the path. `Refusal` 404 for what nothing can be called."""
        value: str = self.request.path_params[name]
        if "\x00" in value:  # nothing has such a name, and PostgreSQL does not take it
            raise Refusal(404, "not_found", f"no {name} holds a NUL", param=name)
        return value

    def query(self, name: str) -> str | None:
        """A query parameter; the last one counts."""
        value: str | None = self.request.query_params.get(name)
        return value

    def number(self, name: str, default: int, *, most: int, least: int = 0) -> int:
        """A whole number of the query. `Refusal` 422 if it is none, or out of bounds."""
        given = self.query(name)
        if given is None:
            return default
        try:
            value = int(given)
        except ValueError:
            value = least - 1
        if not least <= value <= most or len(given) > 20:
            message = f"{name}: a whole number from {least} to {most}; given: {given[:40]!r}"
            raise Refusal(422, "invalid", message, param=name)
        return value

    def page(self, *, least: int = 0) -> Page:
        """Return the page that is asked for; `least` is the cursor before the first row."""
        after = self.number("cursor", least, least=least, most=2**62)
        return Page(after, self.number("limit", 100, least=1, most=BATCH))

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        """A query parameter that is one of these. `Refusal` 422 otherwise."""
        given = self.query(name)
        if given is not None and given not in choices:
            message = f"{name}: {given[:40]!r} is not known; known: {', '.join(choices)}"
            raise Refusal(422, "invalid", message, param=name)
        return given

    async def body(self, model: type[Model]) -> Model:
        """The request's JSON. `Refusal` 400 for what is no JSON, 413 for too much, 422 with the
        field's name for a wrong one.
        """
        given = await self._bytes() or b"{}"
        try:
            if len(given) > LONG_BYTES:
                return await asyncio.to_thread(_read, given, model)
            return _read(given, model)
        except RequestError as error:
            if error.status == 413:
                raise Refusal(413, "too_large", str(error)) from None
            param = (error.param or "").replace("[", ".").replace("]", "")
            raise Refusal(422, "invalid", str(error), param=param or None) from None
        except orjson.JSONDecodeError as error:
            raise Refusal(400, "malformed", f"the body is no JSON: {error}") from None
        except ValidationError as error:
            raise invalid(error) from None

    async def _bytes(self) -> bytes:
        parts, size = [], 0
        announced = self.request.headers.get("content-length", "0")
        try:
            async with asyncio.timeout(BODY_S):
                async for part in self.request.stream():
                    size += len(part)
                    if size > MAX_BODY or (announced.isdigit() and int(announced) > MAX_BODY):
                        raise Refusal(413, "too_large", f"a body has at most {MAX_BODY} bytes")
                    parts.append(part)
        except TimeoutError:
            raise Refusal(408, "too_slow", f"the body did not arrive in {BODY_S:g} s") from None
        return b"".join(parts)


def _read(given: bytes, model: type[Model]) -> Model:
    return model.model_validate(_decoded(given))


def _decoded(given: bytes) -> Any:  # noqa: ANN401 - JSON
    check_values(given, MOST_VALUES)
    try:
        value = orjson.loads(given)
        check_depth(given, value, "")
    except (orjson.JSONDecodeError, RequestError):
        check_json(given)
        raise
    return value


Answer = Callable[[Asked], Awaitable[Response]]


class Endpoint:
    """A route's ASGI application, and what `openapi` tells of it."""

    def __init__(
        self,
        served: ServerContext,
        path: str,
        role: Role | None,
        answer: Answer,
        body: type[BaseModel] | None,
        query: Mapping[str, JSON],
    ) -> None:
        self._served = served
        self._path = path
        self._role = role
        self._answer = answer
        self.body = body
        self.query = query
        self.about = (answer.__doc__ or "").partition("\n\n")[0]
        self.is_open = role is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with ExitStack() as share:
            try:
                asked = Asked(request, self._caller(scope), self._served)
                if not self.is_open:
                    share.enter_context(self._served.share(asked.caller.name))
                response = await self._answer(asked)
            except ClientDisconnect:
                return
            except Exception as error:  # noqa: BLE001 - the top of a served request
                response = _refused(error)
            self._served.service.metrics.answered(request.method, self._path, response.status_code)
            await response(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        headers = scope["headers"]
        caller = self._served.auth.caller(headers)
        if caller is None:
            if self._role is None:
                return Caller(name="anyone", roles=frozenset())
            peer = scope["client"]
            if any(sent_tokens(headers)) and (
                wait_s := self._served.wrong.wait_s(None if peer is None else peer[0])
            ):
                raise Refusal(429, "too_many_attempts", TOO_MANY, wait_s=wait_s)
            raise Refusal(401, "unauthenticated", UNKNOWN)
        if self._role is not None and not caller.may(self._role):
            message = f"token {caller.name!r} lacks the role {self._role.value!r}"
            raise Refusal(403, "forbidden", message)
        scope.setdefault("state", {})[KNOWN] = True
        return caller


def route(
    served: ServerContext,
    method: str,
    path: str,
    role: Role | None,
    answer: Answer,
    *,
    body: type[BaseModel] | None = None,
    query: Mapping[str, JSON] | None = None,
) -> Route:
    """One route; `role` is what a token needs, `None` = open to all.

    `body` and `query` (name -> JSON schema) are for the description; the handler reads them itself.
    """
    return Route(path, Endpoint(served, path, role, answer, body, query or {}), methods=[method])


PAGE: Final[Mapping[str, JSON]] = {
    "cursor": {"type": "integer", "minimum": -1, "maximum": 2**62},
    "limit": {"type": "integer", "minimum": 1, "maximum": BATCH, "default": 100},
}
"""The query of a page: where to go on, and how far."""


def reply(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type=JSON_TYPE)


def packed_reply(value: object) -> Response:
    return Response(msgspec.msgpack.encode(value), media_type=MSGPACK_TYPE)


def invalid(error: ValidationError) -> Refusal:
    """422 with the first field that is wrong."""
    first = first_fault(error)
    param = None if first is None else ".".join(str(part) for part in first["loc"])
    return Refusal(422, "invalid", str(explain(error, "the body")), param=param)


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
"""Refusals that pass."""


def _refused(error: Exception) -> Response:
    if isinstance(error, Refusal):
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


def accepted(asked: Asked, known: tuple[str, ...]) -> str:
    """Return which of the `known` media types the caller accepts; the first if it names none."""
    wanted: str = asked.request.headers.get("accept", "*/*")
    for part in wanted.split(","):
        kind: Any = part.partition(";")[0].strip().lower()
        if kind in known:
            return str(kind)
        if kind in ("*/*", "application/*", ""):
            return known[0]
    message = f"accept: {wanted[:80]!r}; this can be had: {', '.join(known)}"
    raise Refusal(406, "not_acceptable", message)
