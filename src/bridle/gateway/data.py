"""The data routes: everything that a harness may ask, in any provider's dialect.

What can be refused is refused before any header of a reply, in the provider's own shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from aiohttp import web

from bridle.aio import Turnstile
from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import Route, RouteKind, WireFormat, caller
from bridle.engines.base import EngineInfo
from bridle.errors import BridleError, RequestError
from bridle.gateway import faults
from bridle.gateway.admission import Taken
from bridle.gateway.call import Call
from bridle.gateway.exchange import Exchanges
from bridle.gateway.faults import trace_of
from bridle.gateway.keys import presented_keys
from bridle.gateway.linear import settle
from bridle.gateway.listener import Connection
from bridle.gateway.metrics import Metrics
from bridle.gateway.plain import PlainPath
from bridle.gateway.plain_live import Handed
from bridle.gateway.registry import GatewaySession, Registry
from bridle.gateway.relay import Relay, json_response, refusal
from bridle.gateway.responses import Responses
from bridle.gateway.routing import Target, asked, split_target
from bridle.types import ModelRequest

log = structlog.get_logger()

BEGUN_PER_ROUND: Final = 8
"""Requests that begin per round of the event loop. Of 256 streams that begin in one moment half
have their first token after 294 ms instead of 379, the last after the same time
(benchmarks/streaming.py). Calls that take the same step one after the other find their code in the
processor's caches: at 2 a round each call costs 15 % more, at 8 it costs 2 %
(benchmarks/gateway.py, 32 sessions)."""


SERVED: Final = (
    "models are asked by POST at /v1/chat/completions, /v1/responses, /v1/messages and "
    "/v1beta/models/MODEL:generateContent"
)
"""Ends the refusal of a provider's other routes."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request's head, read; the next one of its connection mostly says the same."""

    raw: str
    """The target as it came."""
    target: Target
    method: str
    fields: list[tuple[bytes, bytes]]
    """Header fields as they came, but for the length of the body."""
    headers: dict[str, str]
    """By their names in lower case."""
    keys: list[str]
    route: Route | None
    """`None` = there is no such route."""
    wire: WireFormat


def read_head(http: web.BaseRequest) -> Head:
    """Return the parsed head of a model request; a repeated head on a connection is not parsed
    again.
    """
    raw, method, connection = http.raw_path, http.method, http.protocol
    fields = [one for one in http.raw_headers if one[0] not in _LENGTHS]
    assert isinstance(connection, Connection)
    known = connection.head
    if isinstance(known, Head) and (raw, method, fields) == (known.raw, known.method, known.fields):
        return known
    target = split_target(raw)
    headers = {name.lower(): value for name, value in http.headers.items()}
    keys = presented_keys(headers, target.query)
    route = recognise(method, target.path, target.query, headers)
    wire = DIALECTS[caller(target.path, headers) if route is None else route.dialect]
    head = Head(raw, target, method, fields, headers, keys, route, wire)
    connection.head = head
    return head


_LENGTHS: Final = (b"Content-Length", b"content-length")


class DataPlane:
    """Answers harnesses."""

    def __init__(
        self,
        *,
        registry: Registry,
        exchanges: Exchanges,
        relay: Relay,
        info: EngineInfo,
        metrics: Metrics,
        restore: Callable[[GatewaySession], None],
        responses: Responses,
        plain: PlainPath,
    ) -> None:
        self._registry = registry
        self._exchanges = exchanges
        self._relay = relay
        self._info = info
        self._metrics = metrics
        self._restore = restore
        self._responses = responses
        self._admission = plain.admission
        self.plain = plain
        self._turnstile = Turnstile(BEGUN_PER_ROUND)

    async def handle(self, http: web.BaseRequest, head: Head) -> web.StreamResponse:
        """Serve one model request; errors are in the dialect's form."""
        connection = http.protocol
        assert isinstance(connection, Connection)
        if connection.handed is None:
            await self._turnstile.enter()
        route, wire = head.route, head.wire
        try:
            response = await self._served(http, head)
        except RequestError as error:
            response = refusal(wire, error)
        except ConnectionError:
            raise
        except BridleError as error:
            log.warning("request_failed", error=f"{type(error).__name__}: {error}")
            response = refusal(wire, faults.request_error(error))
        except Exception as error:
            log.error("request_failed", trace=trace_of(error))  # noqa: TRY400 - no variables in a log
            if http.writer.output_size:
                raise ConnectionResetError(
                    "a call failed after its reply had begun, so its connection was cut"
                ) from error
            response = refusal(wire, faults.request_error(error))
        what = "unknown" if route is None else route.kind
        self._metrics.requests.values[wire.dialect, what, response.status] += 1
        return response

    def _authenticate(self, http: web.BaseRequest, head: Head) -> GatewaySession:
        session = self._registry.authenticate(head.target.token, head.keys)
        assert isinstance(http.protocol, Connection)
        http.protocol.is_known = True
        return session

    async def _serve(self, http: web.BaseRequest, head: Head) -> web.StreamResponse:
        target, route, wire = head.target, head.route, head.wire
        if route is None:
            raise RequestError(
                f"the gateway has no such route for {http.method} requests; check the base URL",
                status=404,
                code="not_found",
            )
        match route.kind:
            case RouteKind.PROBE:
                return web.Response()
            case RouteKind.UPGRADE:
                return _upgrade_refused()
            case RouteKind.UNSUPPORTED:
                what = route.resource or target.path
                message = f"{http.method} of {what!r} is not served here; {SERVED}"
                raise RequestError(message, status=404, code="not_found")
            case RouteKind.MODELS | RouteKind.MODEL:
                self._authenticate(http, head)
                names = self._exchanges.models.names()
                return json_response(wire.models(route, names, self._info.context_length))
            case RouteKind.COUNT_TOKENS | RouteKind.GENERATE | RouteKind.STORED:
                session = self._authenticate(http, head)
                self._restore(session)
                if route.kind is RouteKind.STORED:
                    answer = await self._responses.answer(session, route, target.query)
                    with Taken(self._admission, session, len(answer)):
                        return await self._relay.stored(http, answer)
                if route.kind is RouteKind.COUNT_TOKENS:
                    return await self._count(http, session, route, wire)
                return await self._generate(http, session, head.headers, route, wire)

    async def _served(self, http: web.BaseRequest, head: Head) -> web.StreamResponse:
        assert isinstance(http.protocol, Connection)
        handed, http.protocol.handed = http.protocol.handed, None
        if isinstance(handed, Handed):
            return await self._answer(http, handed, head)
        return await self._serve(http, head)

    async def _answer(
        self, http: web.BaseRequest, handed: Handed, head: Head
    ) -> web.StreamResponse:
        """Answer the client of a call that the plain path began."""
        assert head.route is not None, "it was begun"
        try:
            while not http.content.is_eof():
                await http.content.readany()
        except BaseException:
            handed.lost()
            raise
        try:
            return await self._relay.answer(
                http,
                handed.session,
                handed.call,
                handed.request,
                head.route,
                head.wire,
                waited_s=time.perf_counter() - handed.call.clock_start,
                begun=handed.begun,
            )
        finally:
            handed.taken.give_back()

    async def _count(
        self, http: web.BaseRequest, session: GatewaySession, route: Route, wire: WireFormat
    ) -> web.StreamResponse:
        with Taken(self._admission, session) as taken:
            body = await self._admission.body(http, taken)
            try:
                request = await self._admission.read(session, wire, route, body)
                request = self._responses.whole(session, route, body, request)
                tokens = await self._exchanges.count(session, wire, request)
            finally:
                settle(session)  # while what it has read is remembered
                self._admission.refused(session, body)
        return json_response(wire.token_count(tokens))

    async def _generate(
        self,
        http: web.BaseRequest,
        session: GatewaySession,
        headers: dict[str, str],
        route: Route,
        wire: WireFormat,
    ) -> web.StreamResponse:
        with Taken(self._admission, session) as taken:
            call, request = await self._admitted(http, session, headers, route, wire, taken)
            response = await self._relay.answer(http, session, call, request, route, wire)
        self.plain.offer(http, session, headers, route, wire, request)
        return response

    async def _admitted(
        self,
        http: web.BaseRequest,
        session: GatewaySession,
        headers: dict[str, str],
        route: Route,
        wire: WireFormat,
        taken: Taken,
    ) -> tuple[Call, ModelRequest]:
        """Return the call that answers the request, begun or joined."""
        session.requests += 1
        body = b""
        try:
            body = await self._admission.body(http, taken)
            body = self._responses.resolved(session, wire.dialect, body)
            settle(session)
            request = await self._admission.read(session, wire, route, body)
            if session.sealed:  # sealed while the body arrived
                raise faults.session_ended()
            request = self._responses.whole(session, route, body, request)
            harness = session.record.metadata.get("harness")
            said = asked(headers, request, harness, session.kind_rules)
            return await self._exchanges.admit(session, wire, request, said), request
        except BridleError as error:
            settle(session)
            self._admission.refused(session, body)
            session.note_error(faults.request_error(error))
            raise


def _upgrade_refused() -> web.Response:
    return web.Response(status=426, headers={"Upgrade": "HTTP/1.1", "Connection": "Upgrade"})
