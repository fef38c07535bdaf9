"""Access control: a token in a header, or entered once into a form and kept as a cookie.

The cookie names a sign-in of this process, not the token: it is worth nothing elsewhere, ends with
the process and after `KEEP_S`, is never shown to a script, and is sent by no other site's pages.
The token is asked about again at each request, so one that was taken back opens nothing more.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE: Final = "bridle_dashboard"
KEEP_S: Final = 12 * 3600.0
MOST: Final = 200
"""Sign-ins that are remembered."""

TOKEN: Final = "bridle.token"  # noqa: S105 - a key
"""Where a request's scope has the token that let it in."""

MAX_FORM: Final = 4096
"""Bytes of the login form."""


class Form(Protocol):
    """Makes the page that asks for a token."""

    def __call__(self, request: Request, *, wrong: bool) -> Response:
        """The page; `wrong` after a token that is not known."""


class Guard:
    """Lets those in who have a token that `allows` says yes to."""

    def __init__(
        self,
        allows: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allows = allows
        self._clock = clock
        self._kept: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def around(self, app: ASGIApp, form: Form) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            request = Request(scope, receive, send)
            answer = await self._answer(request, form)
            await (app if answer is None else answer)(scope, receive, send)

        return guarded

    async def _answer(self, request: Request, form: Form) -> Response | None:
        """Answer the request if it must not pass; `None` = it may pass."""
        # Not `request.url`, which is made with what the client sent as `Host`.
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
        """The token that a request has, if it may look."""
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return sent.strip() if self._allows(sent.strip()) else None
        token, since = self._kept.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        fresh = bool(token) and self._clock() - since < KEEP_S
        return token if fresh and self._allows(token) else None

    async def _sign_in(self, request: Request, form: Form) -> Response:
        sent = b""
        async for part in request.stream():
            sent += part
            if len(sent) > MAX_FORM:
                return PlainTextResponse("the form is too large", 413)
        token = parse_qs(sent.decode(errors="replace")).get("token", [""])[0].strip()
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
