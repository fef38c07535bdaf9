"""Every adapter of a server against servers that go wrong: an `EngineError` of the right kind.

A server is first well, so that the adapter starts on it, and then answers as each test says.
"""

import asyncio
import gc
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from tests.engines.shapes import SHAPES, collect, request
from tests.engines.spoilers import editing

from bridle.engines.base import CutError
from bridle.engines.connection import HttpCall
from bridle.engines.openai import OpenAIEngine
from bridle.errors import EngineError
from bridle.scripted.server import EngineServer
from bridle.testing import scripted_engine
from bridle.types import FinishReason

TURN = {"content": "Hello, world, and all who live in it. " * 8}
HTML = b"<!doctype html><title>502 Bad Gateway</title>"
HI = [{"role": "user", "content": "hi"}]


class Proxy:
    """Stands between an adapter and a server: `spoil` answers in its place, `edit` changes it."""

    def __init__(self, server, spoil=None):
        self._server = server
        self.spoil = spoil
        self.edit = None

    @asynccontextmanager
    async def open_with(self):
        """This proxy and its address."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as self._session:
                yield self, f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def answer(self, request):
        body = await request.read()
        samples = request.method == "POST" and request.path in SAMPLING
        if self.spoil is not None and samples:
            return await self.spoil(request)
        url = self._server.url + request.path_qs
        async with self._session.request(
            request.method, url, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            text, kind = await answer.read(), answer.content_type
            if self.edit is not None and samples:
                text = self.edit(text)
            return web.Response(body=text, status=answer.status, content_type=kind)


SAMPLING = {"/generate", "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"}
ALL = {**SHAPES, "openai": None}


@asynccontextmanager
async def connect(name, silent_s=60.0):
    """Open a server of that kind, a proxy and an adapter that has started through the proxy."""
    shape = ALL[name]
    inside = scripted_engine([TURN])
    server = EngineServer(inside) if shape is None else shape.server(inside, **shape.serving)
    async with server, Proxy(server).open_with() as (proxy, url):
        if shape is None:
            adapter = OpenAIEngine(url + "/v1", timeout_s=silent_s)
        else:
            adapter = shape.adapter(url, timeout_s=silent_s, **shape.reading)
        async with aclosing(adapter):
            await adapter.start()
            yield adapter, proxy


@pytest.fixture(params=ALL, name="reached")
async def opened(request):
    """An adapter that has started, and the proxy between it and its server."""
    async with connect(request.param) as pair:
        yield pair


def call(**fields):
    return request(messages=HI, **fields)


def status(code, body=b'{"error":{"message":"no"}}', headers=None):
    async def answer(_request):
        reply = {"Retry-After": "999", **(headers or {})}
        return web.Response(status=code, body=body, headers=reply, content_type="application/json")

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "body", "retryable", "says"),
    [
        (500, b'{"error":{"message":"no"}}', True, "answered 500"),
        (503, b'{"detail":"loading"}', True, "loading"),
        (429, b'{"message":"busy"}', True, "busy"),
        (502, HTML, True, "a page, not JSON"),
        (200, HTML, False, "a page, not JSON"),
        (401, b"{}", False, "is the API key right"),
        (200, b"", False, "empty body|not JSON|cannot be read|answered 200"),
    ],
)
async def test_an_http_error_of_a_server_is_an_engine_error_retryable_by_its_status(
    reached, stream, code, body, retryable, says
):
    adapter, proxy = reached
    proxy.spoil = status(code, body)
    with pytest.raises(EngineError, match=says) as caught:
        await collect(adapter, call(stream=stream))
    assert caught.value.retryable is retryable
    assert code == 200 or caught.value.retry_after_s == 999


async def test_calls_leave_nothing_behind_however_they_end(reached):
    adapter, proxy = reached
    come = asyncio.Event()

    async def silence(_request):
        come.set()
        await asyncio.sleep(30)

    await collect(adapter, call())
    chunks = adapter.generate(call(stream=True))
    await anext(chunks)
    await chunks.aclose()
    proxy.spoil = status(503)
    for stream in (False, True):
        with pytest.raises(EngineError):
            await collect(adapter, call(stream=stream))
    proxy.spoil = silence
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(collect(adapter, call()))
        await come.wait()
        waiting.cancel()
    del waiting, chunks
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is HttpCall] == []


async def test_a_server_that_hangs_times_out():
    async def silence(_request):
        await asyncio.sleep(30)

    async def give_up(adapter, stream):
        with pytest.raises(EngineError, match="sent nothing") as caught:
            await collect(adapter, call(request_id=f"hung-{stream}", stream=stream))
        assert caught.value.retryable

    async def try_both(name):
        async with connect(name, silent_s=5.0) as (adapter, proxy), asyncio.TaskGroup() as group:
            proxy.spoil = silence
            for stream in (False, True):
                group.create_task(give_up(adapter, stream))

    async with asyncio.timeout(25), asyncio.TaskGroup() as group:
        for name in ALL:
            group.create_task(try_both(name))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_restarts_is_used_again(reached, stream):
    async def dies(request):
        request.transport.close()
        return web.Response()

    adapter, proxy = reached
    proxy.spoil = dies
    if isinstance(adapter, OpenAIEngine):
        with pytest.raises(EngineError):
            await collect(adapter, call(stream=stream))
    else:
        with pytest.raises(EngineError) as caught:
            await collect(adapter, call(stream=stream))
        assert caught.value.retryable
    proxy.spoil = None
    chunks = await collect(adapter, call(stream=stream))
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_half_a_stream_raises_a_cut_error(reached):
    adapter, proxy = reached

    def half(text):
        pieces = text.split(b"\n\n")
        return b"\n\n".join(pieces[: len(pieces) // 2]) + b'\n\ndata: {"cho'

    proxy.edit = half
    with pytest.raises(CutError):
        await collect(adapter, call(stream=True))


def without(*names):
    """Takes fields out of every object of an answer, stream or not."""

    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in names}
        return [strip(one) for one in value] if isinstance(value, list) else value

    return editing(strip)


def shorter(value):
    """One logprob less in every list of them."""
    if isinstance(value, dict):
        return {k: (v[:-1] if k in LISTS and isinstance(v, list) else shorter(v))
                for k, v in value.items()}  # fmt: skip
    return [shorter(one) for one in value] if isinstance(value, list) else value


LISTS = {"content", "token_logprobs", "output_token_logprobs"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "edit",
    [
        without("logprobs", "output_token_logprobs"),
        editing(shorter),
        without("token_ids", "output_ids", "response_token_ids", "output_token_logprobs"),
    ],
    ids=["no logprobs", "too few logprobs", "no ids"],
)
async def test_ids_and_logprobs_that_do_not_belong_together_are_refused(reached, stream, edit):
    adapter, proxy = reached
    if isinstance(adapter, OpenAIEngine):
        return  # it promises neither
    proxy.edit = edit
    with pytest.raises(EngineError):
        await collect(adapter, call(stream=stream))


def aborting(value):
    if isinstance(value, dict):
        reply = {k: aborting(v) for k, v in value.items()}
        if isinstance(reply.get("finish_reason"), str):
            reply["finish_reason"] = "abort"
        elif reply.get("finish_reason"):
            reply["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None}
        return reply
    return [aborting(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_of_the_server_keeps_the_tokens(reached, stream):
    adapter, proxy = reached
    whole = await collect(adapter, call(stream=stream))
    proxy.edit = editing(aborting)
    chunks = await collect(adapter, call(stream=stream))
    assert chunks[-1].finish_reason is FinishReason.ABORT
    count = sum(len(chunk.output_ids) for chunk in whole)
    assert sum(len(chunk.output_ids) for chunk in chunks) == count


async def test_a_server_that_lost_its_tokenizer_still_samples(reached):
    """Its text is empty, its ids are not; of a server of text nothing is left but its end."""
    adapter, proxy = reached

    def mute(value):
        if isinstance(value, dict):
            return {k: ("" if k in {"text", "content"} and isinstance(v, str) else mute(v))
                    for k, v in value.items()}  # fmt: skip
        return [mute(one) for one in value] if isinstance(value, list) else value

    proxy.edit = editing(mute)
    chunks = await collect(adapter, call())
    assert chunks[-1].finish_reason is FinishReason.STOP
    if not isinstance(adapter, OpenAIEngine):
        assert sum(len(chunk.output_ids) for chunk in chunks) > 0
