"""Requests of clients with pooled connections after one whose body was refused."""

import asyncio
import gzip
import io
from collections.abc import AsyncIterator

import aiohttp
import httpx
import orjson
import pytest
from tests.gateway.house import house, user

LARGE = orjson.dumps({"model": "m", "messages": [user("some words " * 200_000)]})
GOOD = orjson.dumps({"model": "m", "messages": [user("go")]})
GZIP = {"Content-Encoding": "gzip"}


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not announced."""
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]


BODIES = {
    "announced": (413, lambda: LARGE, {}),
    "in chunks": (413, lambda: pieces(LARGE), {}),
    "a bomb": (413, lambda: gzip.compress(LARGE), GZIP),
    "a bomb in chunks": (413, lambda: pieces(gzip.compress(bytes(1 << 26), 1)), GZIP),
    "of an unknown key": (401, lambda: LARGE, {"Authorization": "Bearer x"}),
    "a bomb of an unknown key": (
        401,
        lambda: gzip.compress(bytes(1 << 26), 1),
        {**GZIP, "Authorization": "Bearer x"},
    ),
    "no gzip": (400, lambda: GOOD, GZIP),
}


@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.parametrize("library", ["httpx", "aiohttp"])
async def test_a_client_s_next_request_is_served_after_a_refused_body(library, name):
    expected, body, headers = BODIES[name]
    async with (
        house({"content": "a"}, max_body_bytes=1 << 20) as home,
        httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as pooled,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session,
    ):
        caller = await home.session()

        async def status(content, headers) -> int:
            headers = {**caller.headers, **headers}
            if library == "httpx":
                return (await pooled.post(caller.url, content=content, headers=headers)).status_code
            data = io.BytesIO(content) if isinstance(content, bytes) else content
            async with session.post(caller.url, data=data, headers=headers) as response:
                await response.read()
                return response.status

        async with asyncio.timeout(60):
            for _ in range(5):
                assert await status(body(), headers) == expected
                assert await status(GOOD, {}) == 200
