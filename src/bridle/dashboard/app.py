"""The dashboard as an ASGI application: pages over a source, static files, headers, access control.

Handlers are plain functions, so the server runs them on worker threads: they read files and build
trajectories. Only GET and HEAD are allowed, except for two forms: the login form, and the one that
forks a session of a server, which a page of another origin cannot send. Every response carries the
content security policy.

Access control takes a bearer token, or a token that was entered once into the login form. The
form's cookie names a sign-in of this process, not the token: it expires with the process or after
`KEEP_S`, and neither scripts nor pages of other sites can use it. The token is checked again at
each request, so a revoked one stops working at once.

The templates' `environment` and its filters stand at the end: times, sizes, shares and charts as
text.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import jinja2
import structlog
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridle.dashboard.session import (
    compare,
    composition,
    conversation_of,
    cut,
    longest,
    pretty,
    said,
    token_page,
)
from bridle.dashboard.source import (
    CERTIFIED,
    COMPARED_SCORERS,
    DataSource,
    RunReport,
    SessionView,
)
from bridle.dashboard.summaries import SampleGroup, SessionFilter, SessionRow, most_different
from bridle.errors import BridleError
from bridle.gateway.faults import trace_of
from bridle.trajectory.result import encode, trajectory_bytes
from bridle.trajectory.sample import Trace
from bridle.trajectory.scores import share
from bridle.trajectory.transcript import script_of
from bridle.types import JSON

HERE = Path(__file__).parent

NONE = "\u2013"
"""Text of an unknown number."""

Segment = tuple[str, float, float, float]

T = TypeVar("T")

COOKIE: Final = "bridle_dashboard"
KEEP_S: Final = 12 * 3600.0
MOST: Final = 200
"""Sign-ins that are kept; the oldest is dropped first."""

TOKEN: Final = "bridle.token"  # noqa: S105 - a key
"""Key of an ASGI scope under which handlers find the request's token."""

MAX_FORM: Final = 4096
"""Most bytes of a submitted form."""

MOST_FORKS: Final = 64
"""Forks that one click may submit."""


class LoginForm(Protocol):
    """Function that renders the login form."""

    def __call__(self, request: Request, *, wrong: bool) -> Response:
        """Render the form; `wrong` = the last token was refused."""


class Guard:
    """Access control for an ASGI application: `allows` says whether a token may read."""

    def __init__(
        self,
        allows: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allows = allows
        self._clock = clock
        self._kept: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def around(self, app: ASGIApp, form: LoginForm) -> ASGIApp:
        """Return `app` behind a check of the token; a browser without it gets the login form."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            request = Request(scope, receive, send)
            answer = await self._answer(request, form)
            await (app if answer is None else answer)(scope, receive, send)

        return guarded

    async def _answer(self, request: Request, form: LoginForm) -> Response | None:
        """Answer the request if it must not pass; `None` = it may pass."""
        # Not `request.url`, which contains the `Host` header that the client sent.
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path == "/login" and request.method == "POST":
            return await self._sign_in(request, form)
        if (token := self._token(request)) is not None:
            request.scope[TOKEN] = token
        # The form needs its style before anybody is known.
        if token is not None or path.startswith("/static/"):
            return None
        if path == "/login" or "text/html" in request.headers.get("accept", ""):
            return form(request, wrong=False)
        return PlainTextResponse("a known token is needed", 401)

    def _token(self, request: Request) -> str | None:
        """Return the request's token; `None` = it has none that may read."""
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return sent.strip() if self._allows(sent.strip()) else None
        token, since = self._kept.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        fresh = bool(token) and self._clock() - since < KEEP_S
        return token if fresh and self._allows(token) else None

    async def _sign_in(self, request: Request, form: LoginForm) -> Response:
        try:
            token = (await _form(request)).get("token", "").strip()
        except HTTPException as error:
            return PlainTextResponse(error.detail, error.status_code)
        base = request.scope.get("root_path", "")
        if not token or not await run_in_threadpool(self._allows, token):
            return form(request, wrong=True)
        name = secrets.token_urlsafe(32)
        self._kept[name] = (token, self._clock())
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)
        answer = RedirectResponse(f"{base}/", 303)
        answer.set_cookie(
            COOKIE,
            name,
            max_age=int(KEEP_S),
            path=base or "/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer


async def _form(request: Request) -> dict[str, str]:
    """Read a submitted form: the first value of each field. `HTTPException` if it is too large."""
    sent = b""
    async for part in request.stream():
        sent += part
        if len(sent) > MAX_FORM:
            raise HTTPException(413, f"the submitted form is larger than {MAX_FORM} bytes")
    return {name: values[0] for name, values in parse_qs(sent.decode(errors="replace")).items()}


LIST: Final = 100
"""Rows per page of a list."""

TREE: Final = 300
"""Exchanges per page of the conversation tree."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

AS_TEXT: Final = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
"""Headers of a file that an agent wrote: it is served as text, and nothing in it may run."""

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


def make_app(
    source: DataSource | Callable[[str], DataSource], guard: Guard | None = None
) -> ASGIApp:
    """Build the dashboard of a source, to be served alone or mounted under a path.

    Without a `guard` everybody who reaches it may read. A callable `source` is called with each
    request's token (empty on the login form) and returns the data that its owner may see.
    """
    pages = _Pages(source if callable(source) else lambda _: source)
    shown: list[tuple[str, Callable[[Request], Response]]] = [
        ("/", pages.overview),
        ("/sessions", pages.sessions),
        ("/tasks", pages.tasks),
        ("/task", pages.task),
        ("/compare", pages.compare),
        ("/compare-runs", pages.compare_runs),
        ("/certificate", partial(pages.report, "certificate.html", CERTIFIED)),
        ("/scorers", partial(pages.report, "scorers.html", COMPARED_SCORERS)),
        ("/session/{session_id}", pages.session),
        ("/session/{session_id}/exchange/{exchange_id}", pages.session),
        ("/session/{session_id}/exchange/{exchange_id}/{part}.json", pages.raw),
        ("/session/{session_id}/attempts", pages.attempts),
        ("/session/{session_id}/{part}.json", pages.download),
        ("/session/{session_id}/trace/{number:int}", pages.trace),
        ("/session/{session_id}/trace/{number:int}/messages", pages.messages),
        ("/session/{session_id}/file/{name:path}", pages.file),
    ]
    routes: list[BaseRoute] = [Route(path, handler) for path, handler in shown]
    routes.append(Route("/session/{session_id}/fork", pages.fork, methods=["POST"]))
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
    """Middleware that adds `HEADERS` to every response that does not set them."""

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

    def __init__(self, sources: Callable[[str], DataSource]) -> None:
        self._sources = sources

    def _source(self, request: Request) -> DataSource:
        return self._sources(request.scope.get(TOKEN, ""))

    def overview(self, request: Request) -> Response:
        return self._page(request, "overview.html", seen=self._source(request).overview())

    def sessions(self, request: Request) -> Response:
        query = request.query_params
        names = ("status", "cause", "harness", "task", "run", "text", "sort")
        wanted = SessionFilter(**{name: query.get(name, "")[:300] for name in names})
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
        return self._page(request, "task.html", group=self._group(request))

    def compare(self, request: Request) -> Response:
        """Render two sessions of a task side by side, with their first different message."""
        group = self._group(request)
        pair, conversations = [], []
        for name in ("a", "b"):
            session_id = request.query_params.get(name, "")
            found = (one for one in group.samples if one.line.session_id == session_id)
            sample = _known(next(found, None), f"no session {session_id[:200]!r} of this task")
            pair.append(sample)
            conversations.append(self._conversation(request, sample.line))
        difference = compare(*conversations)
        return self._page(
            request, "compare.html", group=group, pair=pair, difference=difference,
            lengths=[len(messages) for messages in conversations],
        )  # fmt: skip

    def _conversation(self, request: Request, line: SessionRow) -> list[JSON]:
        shown = self._source(request).session(line.session_id, line.run)
        if shown is None:
            return conversation_of(None)
        with _holding(shown):
            return conversation_of(shown.trajectory)

    def compare_runs(self, request: Request) -> Response:
        """Render two runs, or two steps of a training, side by side."""
        query, sides = request.query_params, []
        for name in ("a", "b"):
            run, version = query.get(name, ""), query.get(f"v{name}", "")
            found = self._source(request).session_set(run, _digits(version, 0) if version else None)
            sides.append(_known(found, f"no run {run[:200]!r}"))
        pair = most_different(*sides)
        conversations = (
            [self._conversation(request, line) for line in pair[1:]] if pair else [[], []]
        )
        return self._page(
            request, "compare_runs.html", sides=sides, pair=pair,
            runs=[run.name for run in self._source(request).overview().runs],
            difference=compare(*conversations), lengths=[len(one) for one in conversations],
        )  # fmt: skip

    def report(self, template: str, kind: RunReport[Any], request: Request) -> Response:
        """Render a report on a run, with a page of its list."""
        run, at = request.query_params.get("run", ""), _number(request, "at")
        missing = f"no {kind.title} the run {run[:200]!r}"
        found = _known(self._source(request).report(kind, run), missing)
        return self._page(request, template, found=found, run=run, at=at, step=LIST)

    def _group(self, request: Request) -> SampleGroup:
        query = request.query_params
        found = self._source(request).group(query.get("id", ""), query.get("run", ""))
        return _known(found, f"no task {query.get('id', '')[:200]!r}")

    def session(self, request: Request) -> Response:
        """Render a session, with the chosen exchange beside its tree; htmx asks for that alone."""
        shown = self._shown(request)
        with _holding(shown):
            return self._session(request, shown)

    def _session(self, request: Request, shown: SessionView) -> Response:
        session, wanted = shown.session, request.path_params.get("exchange_id")
        detail = None
        if wanted is not None:
            detail = None if session is None else session.detail(wanted)
            detail = _known(detail, f"no exchange {wanted[:200]!r} in this session")
            if request.headers.get("hx-target") == "exchange":
                return self._page(request, "exchange.html", shown=shown, detail=detail)
        place = 0 if wanted is None or session is None else session.place(wanted) or 0
        at = _number(request, "at", place // TREE * TREE)
        rows = [] if session is None else session.rows(at, TREE)
        return self._page(
            request, "session.html", shown=shown, detail=detail, rows=rows, at=at, step=TREE,
            composition=composition, longest=longest,
        )  # fmt: skip

    def attempts(self, request: Request) -> Response:
        """Render the tree of a session and its forks, a page of its rows at a time."""
        shown = self._shown(request)
        path, query = request.path_params, request.query_params
        tree = self._source(request).attempts(path["session_id"], query.get("run", ""))
        tree = _known(tree, "the capture of this session is not available here")
        at = _number(request, "at")
        with _holding(shown):
            replies = {} if shown.session is None else shown.session.replies()
            return self._page(
                request, "attempts.html", shown=shown, tree=tree, replies=replies, at=at, step=LIST,
                rows=tree.rows[at : at + LIST],
            )  # fmt: skip

    async def fork(self, request: Request) -> Response:
        """Submit forks of a session, and show their task."""
        if urlsplit(request.headers.get("origin", "")).netloc != request.headers.get("host"):
            raise HTTPException(
                403,
                "this form does not come from a page of this dashboard: submit forks from the "
                "session's page",
            )
        submit = self._source(request).fork
        if submit is None:
            raise HTTPException(
                403,
                "forks cannot be submitted here: this dashboard shows a folder and no server, or "
                "your token lacks the right",
            )
        form = await _form(request)
        at, samples = (_digits(form.get(name, ""), 1) for name in ("at", "samples"))
        session_id, samples = request.path_params["session_id"], min(max(1, samples), MOST_FORKS)
        task_id = await run_in_threadpool(submit, session_id, at, samples)
        base = request.scope.get("root_path", "")
        return RedirectResponse(f"{base}/task?{urlencode({'id': task_id})}", 303)

    def raw(self, request: Request) -> Response:
        """Send the bytes of a request or a reply."""
        shown, part = self._shown(request), request.path_params["part"]
        if shown.session is None or part not in ("request", "reply"):
            raise HTTPException(
                404,
                "there is no such part of this exchange; a captured exchange has the parts "
                "'request' and 'reply'",
            )
        with shown.session.lock:
            found = shown.session.raw(request.path_params["exchange_id"], part)
        return _as_text(_known(found, "no such exchange"))

    def download(self, request: Request) -> Response:
        """Send a session's trajectory, or the script by which it is replayed."""
        shown, part = self._shown(request), request.path_params["part"]
        if part == "trajectory" and shown.trajectory is not None:
            with _holding(shown):
                return _as_text(trajectory_bytes(shown.trajectory))
        if part == "script" and shown.session is not None:
            with _holding(shown):
                return _as_text(encode(script_of(shown.session.capture)))
        raise HTTPException(
            404,
            f"this session has no {part!r} to download; captured sessions have 'trajectory' and "
            "'script'",
        )

    def trace(self, request: Request) -> Response:
        """Render a page of a trace's tokens."""
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
        """Send a log or kept file as plain text, whatever its type."""
        query, path = request.query_params, request.path_params
        found = self._source(request).file(path["session_id"], query.get("run", ""), path["name"])
        if found is None:
            raise HTTPException(404, f"this session kept no file {path['name'][:200]!r}")
        if isinstance(found, bytes):
            return _as_text(found)
        return FileResponse(found, media_type="text/plain; charset=utf-8", headers=AS_TEXT)

    def login(self, request: Request, *, wrong: bool) -> Response:
        response = self._page(request, "login.html", wrong=wrong)
        response.status_code = 401
        return response

    def refused(self, request: Request, error: Exception) -> Response:
        """Render a refusal, such as a page that does not exist."""
        assert isinstance(error, HTTPException)
        return self._error(request, error.status_code, str(error.detail))

    def failed(self, request: Request, error: Exception) -> Response:
        """Render the error of a source that cannot be read."""
        status = getattr(error, "status", None)
        known = status if status in (401, 403, 404, 409, 422) else 503
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

    def _shown(self, request: Request) -> SessionView:
        session_id = request.path_params["session_id"]
        shown = self._source(request).session(session_id, request.query_params.get("run", ""))
        return _known(shown, f"no session {session_id[:200]!r} here")

    def _trace(self, request: Request) -> tuple[SessionView, int, Trace]:
        shown, number = self._shown(request), request.path_params["number"]
        traces = () if shown.trajectory is None else shown.trajectory.traces
        if number >= len(traces):
            raise HTTPException(404, f"no trace {number} in this session; it has {len(traces)}")
        return shown, number, traces[number]

    def _page(self, request: Request, template: str, **values: object) -> Response:
        base: str = request.scope.get("root_path", "")

        def url(path: str, **query: object) -> str:
            """Return a quoted path of the dashboard with the non-empty query parameters."""
            given = {name: value for name, value in query.items() if value not in (None, "")}
            return base + quote(path) + (f"?{urlencode(given)}" if given else "")

        html = (
            environment()
            .get_template(template)
            .render(
                url=url,
                title=self._source(request).title,
                can_fork=self._source(request).fork is not None,
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


def _known(found: T | None, missing: str) -> T:
    """Return what was found. `HTTPException` 404 if there is nothing."""
    if found is None:
        raise HTTPException(404, missing)
    return found


def _number(request: Request, name: str, default: int = 0) -> int:
    """Parse a non-negative integer of the query; `default` for anything else."""
    return _digits(request.query_params.get(name, ""), default)


def _digits(given: str, default: int) -> int:
    return int(given) if given.isascii() and given.isdigit() and len(given) < 16 else default


def _holding(shown: SessionView) -> AbstractContextManager[object]:
    """Return a lock that keeps other threads from reading the session."""
    return nullcontext() if shown.session is None else shown.session.lock


def _as_text(content: bytes) -> Response:
    return Response(content, media_type="text/plain; charset=utf-8", headers=AS_TEXT)


def seconds(value: float | None) -> str:
    """Format a duration: `12 ms`, `3.4 s`, `5 min 2 s`, `2 h 4 min`."""
    if value is None:
        return NONE
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ago(at: float | None) -> str:
    """Format a Unix time as its age in one unit, such as `5 min ago`."""
    if at is None:
        return NONE
    past = max(0.0, time.time() - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if past >= size:
            return f"{past / size:.0f} {unit} ago"
    return f"{past:.0f} s ago"


def clock(at: float | None) -> str:
    """Return a Unix time as date and time in UTC; `None` is a dash."""
    return NONE if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def count(value: float | None) -> str:
    """Format an integer with thin spaces: `12 345`."""
    return NONE if value is None else f"{value:,.0f}".replace(",", "\u202f")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; from 1000 on as `count` does."""
    if value is not None and abs(value) >= 1000:
        return count(value)
    return NONE if value is None else f"{value:.{digits}g}"


def segments(values: Iterable[tuple[str, float]]) -> list[Segment]:
    """Return the parts of a bar that is 100 wide: `(name, value, x, width)`."""
    listed = [(name, float(value)) for name, value in values if value]
    whole = sum(value for _, value in listed) or 1.0
    found, at = [], 0.0
    for name, value in listed:
        wide = 100 * value / whole
        found.append((name, value, round(at, 3), round(wide, 3)))
        at += wide
    return found


def columns(ends: Sequence[tuple[float, int, int]]) -> list[tuple[int, float, float, str]]:
    """Return a column chart 100 high: `(x, height of completed, of others, title)` per column."""
    top = max((done + other for _, done, other in ends), default=0) or 1
    return [
        (n, 100 * done / top, 100 * other / top, f"{clock(at)}: {done} completed, {other} not")
        for n, (at, done, other) in enumerate(ends)
    ]


def dots(rewards: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return rewards as dots on a line 100 wide: `(x, y, reward)`; equal ones are stacked."""
    if not rewards:
        return []
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    seen: dict[float, int] = {}
    found = []
    for reward in sorted(rewards):
        x = round(100 * (reward - low) / (high - low), 2)
        seen[x] = seen.get(x, 0) + 1
        found.append((x, float(seen[x]), reward))
    return found


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return the Jinja environment of the pages, which escapes every value."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = (seconds, ago, clock, count, number, share, cut, pretty, said, segments, columns, dots)
    made.filters.update({one.__name__: one for one in named})
    return made
