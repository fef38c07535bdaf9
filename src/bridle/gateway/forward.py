"""A request passed on to another process of the same gateway, and its reply passed back.

For what a connection's first request does not decide: control routes, and clients that use one
connection for several sessions. Bytes go through as they come, in both directions.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

import aiohttp
from aiohttp import web
from yarl import URL

from bridle.gateway.relay import json_response

CONNECT_S: Final = 10.0

HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of one connection, not of a message."""


class Forwarder:
    """Passes requests on; `keep` = over connections that are used again."""

    def __init__(self, *, keep: bool) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not keep),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def ask(
        self, method: str, url: str, *, body: bytes | None = None, token: str
    ) -> tuple[int, bytes]:
        """Status and body of a control request. `OSError` or `aiohttp.ClientError`."""
        async with self._client.request(
            method,
            URL(url, encoded=True),
            data=body,
            headers={"Authorization": token, "Content-Type": "application/json"},
        ) as reply:
            return reply.status, await reply.read()

    async def forward(self, http: web.BaseRequest, base_url: str) -> web.StreamResponse:
        """Ask `base_url` the same, and answer what it answers; 502 if it does not."""
        headers = [(name, value) for name, value in http.headers.items() if name.lower() not in HOP]
        try:
            async with self._client.request(
                http.method,
                URL(base_url + http.raw_path, encoded=True),
                headers=headers,
                data=http.content if http.body_exists else None,
                allow_redirects=False,
            ) as reply:
                return await _pass_back(http, reply)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            if http.writer.output_size:  # a reply has begun: it is cut where it was cut
                raise ConnectionResetError("the reply broke off") from error
            return json_response(b'{"error":{"message":"the gateway\'s worker is gone"}}', 502)


async def _pass_back(http: web.BaseRequest, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    answer = web.StreamResponse(status=reply.status, reason=reply.reason)
    for name, value in reply.headers.items():
        if name.lower() not in HOP and name.lower() not in {"date", "server"}:
            answer.headers.add(name, value)
    await answer.prepare(http)
    async for piece in reply.content.iter_any():
        await answer.write(piece)
    await answer.write_eof()
    return answer
