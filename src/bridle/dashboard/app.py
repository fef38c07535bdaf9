"""The dashboard as an ASGI application: pages over a source, static files, headers.

Handlers are plain functions, so the server runs them on worker threads: they read files and build
trajectories. Only GET and HEAD exist, but for the login form. Every answer carries the policy that
keeps a page from loading or running anything that is not ours.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlencode

import structlog
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridle.dashboard.guard import TOKEN, Guard
from bridle.dashboard.lines import Wanted
from bridle.dashboard.session import composition
from bridle.dashboard.showing import HERE, environment
from bridle.dashboard.source import Shown, Source
from bridle.dashboard.tokens import token_page
from bridle.errors import BridleError
from bridle.gateway.faults import trace_of
from bridle.trajectory.sample import Trace

LIST: Final = 100
"""Rows of a page of a list."""

TREE: Final = 300
"""Exchanges of a page of the conversation tree."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

AS_TEXT: Final = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
"""Headers of what an agent wrote, shown by itself: it is text, and nothing in it may run."""

HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

log = structlog.get_logger(__name__)


def make_app(source: Source | Callable[[str], Source], guard: Guard | None = None) -> ASGIApp:
    """The dashboard of a source, to be served alone or mounted under a path.

    `guard` decides who may look; `None` = whoever reaches it. A callable `source` gets the token of
    each request (empty on the login form) and returns what its owner may see.
    """
    pages = _Pages(source if callable(source) else lambda _: source)
    shown: list[tuple[str, Callable[[Request], Response]]] = [
        ("/", pages.overview),
        ("/sessions", pages.sessions),
        ("/tasks", pages.tasks),
        ("/task", pages.task),
        ("/session/{session_id}", pages.session),
        ("/session/{session_id}/exchange/{exchange_id}", pages.session),
        ("/session/{session_id}/exchange/{exchange_id}/{part}.json", pages.raw),
        ("/session/{session_id}/trace/{number:int}", pages.trace),
        ("/session/{session_id}/trace/{number:int}/messages", pages.messages),
        ("/session/{session_id}/file/{name:path}", pages.file),
    ]
    routes: list[BaseRoute] = [Route(path, handler) for path, handler in shown]
    routes.append(Mount("/static", StaticFiles(directory=HERE / "static")))
    handlers: dict[Any, Any] = {
        HTTPException: pages.refused,
        BridleError: pages.failed,
        Exception: pages.broken,
    }
    app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
    if guard is not None:
        app = guard.around(app, pages.login)
    return _Headers(app)


class _Headers:
    """Puts `HEADERS` on every answer that does not have its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _Pages:
    """One method per page."""

    def __init__(self, sources: Callable[[str], Source]) -> None:
        self._sources = sources

    def _source(self, request: Request) -> Source:
        return self._sources(request.scope.get(TOKEN, ""))

    def overview(self, request: Request) -> Response:
        return self._page(request, "overview.html", seen=self._source(request).overview())

    def sessions(self, request: Request) -> Response:
        query = request.query_params
        names = ("status", "cause", "harness", "task", "run", "text")
        wanted = Wanted(**{name: query.get(name, "")[:300] for name in names})
        at = _number(request, "at")
        listed = self._source(request).sessions(wanted, at, LIST)
        given = {name: getattr(wanted, name) for name in names if getattr(wanted, name)}
        return self._page(
            request, "sessions.html", listed=listed, wanted=wanted, given=given, at=at, step=LIST
        )

    def tasks(self, request: Request) -> Response:
        at, run = _number(request, "at"), request.query_params.get("run", "")
        groups, total = self._source(request).groups(run, at, LIST)
        given = {"run": run} if run else {}
        return self._page(
            request, "tasks.html", groups=groups, total=total, given=given, at=at, step=LIST
        )

    def task(self, request: Request) -> Response:
        query = request.query_params
        found = self._source(request).group(query.get("id", ""), query.get("run", ""))
        if found is None:
            raise HTTPException(404, f"no task {query.get('id', '')[:200]!r} here")
        return self._page(request, "task.html", group=found)

    def session(self, request: Request) -> Response:
        """A session; with an exchange, that beside its tree. htmx asks for the exchange alone."""
        shown = self._shown(request)
        with _holding(shown):
            return self._session(request, shown)

    def _session(self, request: Request, shown: Shown) -> Response:
        session, wanted = shown.session, request.path_params.get("exchange_id")
        detail = None
        if wanted is not None:
            detail = None if session is None else session.detail(wanted)
            if detail is None:
                raise HTTPException(404, f"no exchange {wanted[:200]!r} in this session")
            if request.headers.get("hx-target") == "exchange":
                return self._page(request, "exchange.html", shown=shown, detail=detail)
        place = 0 if wanted is None or session is None else session.place(wanted) or 0
        at = _number(request, "at", place // TREE * TREE)
        rows = [] if session is None else session.rows(at, TREE)
        return self._page(
            request, "session.html", shown=shown, detail=detail, rows=rows, at=at, step=TREE,
            composition=composition,
        )  # fmt: skip

    def raw(self, request: Request) -> Response:
        """The bytes of a request or a reply."""
        shown, part = self._shown(request), request.path_params["part"]
        if shown.session is None or part not in ("request", "reply"):
            raise HTTPException(404, "there is no such part")
        with shown.session.lock:
            found = shown.session.raw(request.path_params["exchange_id"], part)
        if found is None:
            raise HTTPException(404, "there is no such exchange")
        return _as_text(found)

    def trace(self, request: Request) -> Response:
        """A page of the tokens of a trace."""
        shown, number, trace = self._trace(request)
        decode = None if shown.session is None else shown.session.decode
        page = token_page(trace, _number(request, "at"), decode)
        return self._page(
            request, "trace.html", shown=shown, number=number, trace=trace, page=page,
            counts=composition(trace),
        )  # fmt: skip

    def messages(self, request: Request) -> Response:
        shown, number, trace = self._trace(request)
        with _holding(shown):
            return self._page(request, "messages.html", shown=shown, number=number, trace=trace)

    def file(self, request: Request) -> Response:
        """A log or kept file, as plain text whatever it is."""
        query, path = request.query_params, request.path_params
        found = self._source(request).file(path["session_id"], query.get("run", ""), path["name"])
        if found is None:
            raise HTTPException(404, f"no file {path['name'][:200]!r} of this session is kept")
        if isinstance(found, bytes):
            return _as_text(found)
        return FileResponse(found, media_type="text/plain; charset=utf-8", headers=AS_TEXT)

    def login(self, request: Request, *, wrong: bool) -> Response:
        """The form that asks for a token."""
        response = self._page(request, "login.html", wrong=wrong)
        response.status_code = 401
        return response

    def refused(self, request: Request, error: Exception) -> Response:
        """A page that is not there."""
        assert isinstance(error, HTTPException)
        return self._error(request, error.status_code, str(error.detail))

    def failed(self, request: Request, error: Exception) -> Response:
        """The source cannot be read now."""
        status = getattr(error, "status", None)
        known = status if status in (401, 403, 404) else 503
        log.warning("dashboard_source_failed", error=str(error))
        return self._error(request, known, str(error))

    def broken(self, request: Request, error: Exception) -> Response:
        reference = secrets.token_hex(4)
        log.error("dashboard_failed", trace=trace_of(error), reference=reference)
        return self._error(request, 500, f"internal error of the dashboard; reference {reference}")

    def _error(self, request: Request, status: int, text: str) -> Response:
        name = HTTPStatus(status).phrase
        response = self._page(request, "error.html", name=name, text=text)
        response.status_code = status
        return response

    def _shown(self, request: Request) -> Shown:
        session_id = request.path_params["session_id"]
        shown = self._source(request).session(session_id, request.query_params.get("run", ""))
        if shown is None:
            raise HTTPException(404, f"no session {session_id[:200]!r} here")
        return shown

    def _trace(self, request: Request) -> tuple[Shown, int, Trace]:
        shown, number = self._shown(request), request.path_params["number"]
        traces = () if shown.trajectory is None else shown.trajectory.traces
        if number >= len(traces):
            raise HTTPException(404, f"no trace {number} in this session; it has {len(traces)}")
        return shown, number, traces[number]

    def _page(self, request: Request, template: str, **values: object) -> Response:
        base: str = request.scope.get("root_path", "")

        def url(path: str, **query: object) -> str:
            """A path of the dashboard, quoted, with a query of what is not empty."""
            given = {name: value for name, value in query.items() if value not in (None, "")}
            return base + quote(path) + (f"?{urlencode(given)}" if given else "")

        html = (
            environment()
            .get_template(template)
            .render(
                url=url,
                title=self._source(request).title,
                path=request.scope["path"].removeprefix(base),
                **values,
            )
        )
        # What agents wrote may hold lone surrogates.
        return Response(
            html.encode("utf-8", "backslashreplace"),
            media_type="text/html",
            headers={"cache-control": "no-store", "vary": "HX-Target"},
        )


def _number(request: Request, name: str, default: int = 0) -> int:
    """A whole number of the query, not below 0; `default` for anything else."""
    given = request.query_params.get(name, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 16 else default


def _holding(shown: Shown) -> AbstractContextManager[object]:
    """Nobody else reads the session meanwhile."""
    return nullcontext() if shown.session is None else shown.session.lock


def _as_text(content: bytes) -> Response:
    return Response(content, media_type="text/plain; charset=utf-8", headers=AS_TEXT)
