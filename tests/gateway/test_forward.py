"""Requests passed on, replies passed back."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from bridle.gateway.forward import Forwarder
from bridle.gateway.listener import Listener


@asynccontextmanager
async def serving(handler):
    listener = Listener(handler, host="127.0.0.1", port=0, max_body_bytes=1 << 20, head_timeout_s=5)
    async with listener:
        yield listener.url


@asynccontextmanager
async def before(handler):
    """A client, and the URL of one that passes everything on to `handler`."""
    async with (
        serving(handler) as behind,
        Forwarder(keep=False) as forwarder,
        serving(lambda http: forwarder.forward(http, behind)) as url,
        aiohttp.ClientSession() as client,
    ):
        yield client, url


async def test_everything_about_a_request_arrives_and_everything_about_its_reply_returns():
    async def echo(http: web.BaseRequest) -> web.StreamResponse:
        told = [http.method, http.raw_path, http.headers["X-One"], (await http.read()).decode()]
        return web.json_response(told, status=418, headers={"Retry-After": "3"})

    async with before(echo) as (client, url):
        target = f"{url}/a%2Fb?c=%20d"
        from yarl import URL

        asked = client.put(URL(target, encoded=True), data=b"body", headers={"X-One": "1"})
        async with asked as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (418, "3")
            assert await reply.json() == ["PUT", "/a%2Fb?c=%20d", "1", "body"]


async def test_a_stream_is_passed_back_as_it_comes():
    go_on = asyncio.Event()

    async def slow(http: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        await answer.write(b"data: 1\n\n")
        await go_on.wait()
        await answer.write_eof(b"data: 2\n\n")
        return answer

    async with before(slow) as (client, url), client.get(url) as reply:
        assert await reply.content.readany() == b"data: 1\n\n"
        go_on.set()
        assert await reply.read() == b"data: 2\n\n"


async def test_a_reply_that_breaks_off_breaks_off():
    async def cut(http: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(http)
        await answer.write(b"begun")
        raise ConnectionResetError

    async with before(cut) as (client, url), client.get(url) as reply:
        try:
            await reply.read()
        except aiohttp.ClientPayloadError:
            return
    raise AssertionError("half of a reply was passed back as a whole one")


async def test_nobody_behind_is_a_502():
    async with (
        Forwarder(keep=True) as forwarder,
        serving(lambda http: forwarder.forward(http, "http://127.0.0.1:9")) as url,
        aiohttp.ClientSession() as client,
        client.get(url) as reply,
    ):
        assert reply.status == 502
        assert "worker is gone" in (await reply.json())["error"]["message"]


async def test_a_control_request_is_asked_with_its_token():
    async def told(http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=http.headers["Authorization"] + (await http.read()).decode())

    async with Forwarder(keep=True) as forwarder, serving(told) as url:
        answer = await forwarder.ask("POST", url + "/policy", body=b"{}", token="Bearer t")
    assert answer == (200, b"Bearer t{}")
