"""HTTP client of serving engines: connection pool, distinct failures, calls that can be aborted.

Every failure becomes an `EngineError`: no answer, an error status, a page that is not JSON, a reply
that breaks off.
"""

from __future__ import annotations

import io
import math
import re
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from bridle.engines import vllm_schemas
from bridle.engines.base import RETRYABLE, CutError
from bridle.engines.connection import (
    CONNECT_S,
    KEEPALIVE_S,
    Connections,
    CutReplyError,
    HttpCall,
    HttpReply,
    NoConnectionError,
)
from bridle.errors import ConfigError, ContextOverflowError, EngineError
from bridle.types import JSON, is_server_url, without_user_info

_OVERFLOW = re.compile(r"maximum (?:context|model) length(?: is| of)? \(?(\d+)", re.IGNORECASE)
_LARGE = 1 << 20

KEY_CHARS = 8
"""Shortest API key that is hidden in errors: a shorter one may be a part of any text."""


class EngineClient:
    """Client of one server. `timeout_s` is how long it may be silent within one call.

    `attempts` is how often a failed connect of a call is tried.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None, timeout_s: float, attempts: int = 1
    ) -> None:
        if not is_server_url(base_url):
            raise ConfigError(
                f"{without_user_info(base_url)!r} is not the URL of a server: give "
                "http://HOST:PORT or https://HOST"
            )
        url = URL(base_url.rstrip("/").removesuffix("/v1"))
        self.base_url = without_user_info(str(url))
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._key = (api_key or "").strip()  # a key from a file ends with a line break
        if self._key:
            if not self._key.isprintable():
                raise ConfigError(
                    f"the API key for {self.base_url} has a line break or another control character"
                    " in it; BRIDLE_ENGINE_API_KEY takes the key alone"
                )
            self._headers["Authorization"] = f"Bearer {self._key}"
        elif url.user is not None:
            named = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {named}"
        self.connections = Connections(
            URL(self.base_url), self._headers, silent_s=timeout_s, attempts=attempts
        )
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s
                ),
            )
        return self._session

    def _url(self, path: str) -> URL:
        if path not in self._urls:
            self._urls[path] = URL(self.base_url + path)
        return self._urls[path]

    async def aclose(self) -> None:
        """Close all connections; idempotent."""
        await self.connections.aclose()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, *, optional: bool = False) -> JSON:
        """Get a JSON object from the engine; an empty one if an `optional` path does not exist."""
        async with self._failures(path), self._opened().get(self._url(path)) as response:
            body = await response.read()
        if optional and response.status in {403, 404, 405, 501}:
            return {}
        if response.status != 200:
            raise self._error(path, response.status, body)
        if not body:
            return {}
        return _object(body, self._url(path))

    async def command(self, path: str, body: JSON | None = None) -> bool:
        """Post a command to the engine; `False` if the server lacks the route.

        Raises `EngineError` if it fails.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        async with self._failures(path), await self._posted(path, data) as response:
            answer = await response.read()
        if response.status in {403, 404, 405, 501}:
            return False
        if response.status != 200:
            raise self._error(path, response.status, answer)
        return True

    async def post(self, path: str, body: bytes, call: HttpCall, *, prompt_tokens: int) -> bytes:
        """Send a POST, unless `begin` has sent it, and return the whole body of its 200 answer.

        `prompt_tokens` is reported in the error for a context overflow.
        """
        try:
            reply = await self.connections.post(path, body, call)
        except CutReplyError as error:
            raise _cut(error) from error
        except (TimeoutError, OSError) as error:
            raise self._failure(path, error) from error
        answer = reply.body
        if reply.status != 200:
            raise self._error(
                path,
                reply.status,
                answer,
                prompt_tokens=prompt_tokens,
                retry_after=reply.retry_after,
            )
        if answer[:1] != b"{":
            raise self._error(path, 200, answer)
        return answer

    async def stream(
        self, path: str, body: bytes, call: HttpCall, *, prompt_tokens: int
    ) -> AsyncGenerator[list[bytes], None]:
        """Send a POST; yield the data of server-sent events, as many as each read brought.

        Ends at `[DONE]` or with the connection.
        """
        decoder, begun = EventDecoder(), False
        try:
            async with self.connections.stream(path, body, call) as (reply, more):
                begun = reply.status == 200 and reply.content_type == b"text/event-stream"
                if not begun:
                    raise await self._refused(path, reply, more, prompt_tokens)
                while data := await more():
                    several = decoder.feed(data)
                    if b"[DONE]" in several:
                        if before := several[: several.index(b"[DONE]")]:
                            yield before
                        reply.ends = True
                        return
                    if several:
                        yield several
        except TimeoutError as error:
            if begun:
                raise CutError("the engine stopped sending in mid-reply") from None
            raise self._failure(path, error) from error
        except OSError as error:
            raise (_cut(error) if begun else self._failure(path, error)) from error

    async def _refused(
        self,
        path: str,
        reply: HttpReply,
        more: Callable[[], Awaitable[bytes]],
        prompt_tokens: int,
    ) -> EngineError:
        answer = b""
        while data := await more():
            answer += data
        return self._error(
            path,
            reply.status,
            answer,
            prompt_tokens=prompt_tokens,
            retry_after=reply.retry_after,
        )

    def _error(self, path: str, status: int, body: bytes, **facts: Any) -> EngineError:  # noqa: ANN401 - as `engine_error` takes them
        """Return the error for an unexpected answer, without the API key that it may repeat."""
        shown = self.hidden(body.decode(errors="surrogateescape"))
        shown_body = shown.encode(errors="surrogateescape")
        return engine_error(status, shown_body, self._url(path), **facts)

    def hidden(self, text: str) -> str:
        """Return the text of a server without the API key, if that is no mere word."""
        return text.replace(self._key, "***") if len(self._key) >= KEY_CHARS else text

    async def _posted(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        # aiohttp wants large bodies as files, so that writing one gives way to others.
        data = io.BytesIO(body) if len(body) >= _LARGE else body
        return await self._opened().post(self._url(path), data=data)

    @asynccontextmanager
    async def _failures(self, path: str) -> AsyncIterator[None]:
        try:
            yield
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._failure(path, error) from error

    def _failure(self, path: str, error: Exception) -> EngineError:
        if isinstance(error, NoConnectionError | aiohttp.ConnectionTimeoutError):
            where = self._url(path)
            message = f"{where} took no connection in {CONNECT_S:g} s; is the engine running there?"
            return EngineError(message, retryable=True, kind="engine_reset")
        if isinstance(error, TimeoutError):
            message = f"{self._url(path)} sent nothing for {self._timeout_s:g} s"
            return EngineError(message, retryable=True, kind="engine_silent")
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        why = getattr(cause, "strerror", None) or str(error) or type(error).__name__
        message = f"{self._url(path)} cannot be reached: {why}; is the engine running there?"
        return EngineError(message, retryable=True, kind="engine_reset")


def engine_error(
    status: int,
    body: bytes,
    url: URL,
    *,
    prompt_tokens: int = 0,
    retry_after: str | None = None,
) -> EngineError:
    """Return the error for an engine's unexpected answer; `retry_after` is its header."""
    wait_s = None if retry_after is None else parse_retry_after(retry_after, time.time())
    kind = "engine_500" if status >= 500 and status != 503 else "engine_error"
    if body.lstrip()[:1] == b"<":
        how = " with a page, not JSON: is this the engine's address? Is there a proxy in between?"
    else:
        message = _message(body)
        overflow = _OVERFLOW.search(message)
        if status in {400, 413, 422} and overflow is not None:
            return ContextOverflowError(prompt_tokens, int(overflow[1]), None)
        how = f": {message}" + ("; is the API key right?" if status in {401, 403} else "")
    return EngineError(
        f"{url} answered {status}{how}",
        retryable=status in RETRYABLE,
        status=status,
        retry_after_s=wait_s,
        kind=kind,
    )


def parse_retry_after(header: str, now: float) -> float | None:
    """Return the seconds that a `Retry-After` header (a number or a date) asks for; `None` if
    neither.
    """
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return None
    return max(0.0, wait_s) if math.isfinite(wait_s) else None


def _message(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body, type=vllm_schemas.ErrorAnswer)
    except msgspec.MsgspecError:
        return body[:300].decode(errors="replace") or "(empty body)"
    detail: Any = answer.error or answer.message or answer.detail
    if isinstance(detail, vllm_schemas.ErrorDetail):
        detail = detail.message
    return str(detail) if detail else body[:300].decode(errors="replace")


def _object(body: bytes, url: URL) -> JSON:
    try:
        return msgspec.json.decode(body, type=JSON)
    except msgspec.MsgspecError:
        raise engine_error(200, body, url) from None


def _cut(error: Exception) -> CutError:
    return CutError(
        f"the connection to the engine ended in mid-reply: {str(error) or type(error).__name__}"
    )


def _plain_events(text: bytes) -> list[bytes] | None:
    """Return the data of events that `text` is, each one line of data; `None` = it is others."""
    if text[:6] != b"data: " or text[-2:] != b"\n\n" or b"\r" in text:
        return None
    events = text[6:-2].split(b"\n\ndata: ")
    return events if text.count(b"\n") == 2 * len(events) else None


class EventDecoder:
    """Incremental parser of server-sent events."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._lines: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Take bytes of an event stream; return the data of each server-sent event that ends in
        them.
        """
        if not self._pieces and not self._lines and (events := _plain_events(piece)):
            return events
        self._pieces.append(piece)
        if b"\n" not in piece:  # a line may be long: its pieces are joined once
            return []
        joined = piece if len(self._pieces) == 1 else b"".join(self._pieces)
        *whole, rest = joined.split(b"\n")
        self._pieces = [rest] if rest else []
        found, lines = list[bytes](), self._lines
        for line in whole:
            text = line[:-1] if line[-1:] == b"\r" else line
            if text[:5] == b"data:":
                lines.append(text[6:] if text[5:6] == b" " else text[5:])
            elif not text and lines:
                found.append(lines[0] if len(lines) == 1 else b"\n".join(lines))
                lines.clear()
        return found
