import asyncio
import re
import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.server.house import KNOWN, TOKEN, a_service, an_app, served, until

from bridle import server
from bridle.errors import ConfigError
from bridle.server.app import ApiConnection, describe, make_app, serve_api, serve_app


async def test_server_uses_a_free_port_and_releases_it(tmp_path):
    async with a_service(tmp_path) as service:
        async with (
            serve_api(served(service), host="127.0.0.1", port=0) as url,
            httpx.AsyncClient() as http,
        ):
            assert (await http.get(f"{url}/health")).status_code == 200
        assert service.stopping.is_set()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(url.rpartition(":")[2])))


async def test_a_taken_port_is_a_config_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with a_service(tmp_path) as service:
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with serve_api(served(service), host="127.0.0.1", port=port):
                    pass


async def test_long_polls_end_when_the_server_stops(tmp_path):
    async with a_service(tmp_path) as service, httpx.AsyncClient(timeout=60) as http:
        context = served(service)
        async with (
            asyncio.TaskGroup() as group,
            serve_api(context, host="127.0.0.1", port=0) as url,
        ):
            asked = http.get(f"{url}/v1/groups?wait_s=60", headers=KNOWN)
            waiting = group.create_task(asked)
            await until(lambda: context.in_progress[TOKEN.name])
        assert waiting.result().json() == {"groups": [], "cursor": 0}


async def test_unknown_path_gives_an_error_in_the_common_form(tmp_path):
    async with (
        a_service(tmp_path) as service,
        serve_api(served(service), host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        response = await http.get("/nowhere")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert "the rollout server has no route GET /nowhere" in response.json()["detail"]
        response = await http.put("/v1/tasks")
        assert (response.status_code, response.json()["error"]["code"]) == (
            405,
            "method_not_allowed",
        )
        assert "the rollout server has no route PUT /v1/tasks" in response.json()["detail"]


async def test_openapi_describes_the_routes_and_all_its_references_resolve(tmp_path):
    async with an_app(tmp_path) as http:
        response = (await http.get("/openapi.json")).json()
    assert response["openapi"].startswith("3.1")
    assert {"/rollout/task/submit", "/v1/groups", "/policy"} <= set(response["paths"])
    schemas = set(response["components"]["schemas"])

    def look(value):
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                assert value["$ref"].removeprefix("#/components/schemas/") in schemas
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(response)
    operations = [one for path in response["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["summary"] for one in operations)


SOURCES = "".join(path.read_text() for path in Path(server.__path__[0]).glob("*.py"))


async def test_openapi_describes_every_refusal_of_the_server(tmp_path):
    statuses = set(re.findall(r"ApiError\(\s*(4\d\d)|error_json\([^()]+\), (4\d\d)", SOURCES))
    known = {one for pair in statuses for one in pair if one}
    async with an_app(tmp_path) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"404", "408", "421"} <= known
    assert known <= set(paths["/v1/groups"]["get"]["responses"])


def test_openapi_without_routes_has_no_paths():
    assert describe([])["paths"] == {}


HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"


class Few(ApiConnection):
    most = 8


class Hasty(ApiConnection):
    head_s = 3.0


class Cramped(ApiConnection):
    head_s = 600.0
    room = 1 << 18


async def answer(_):
    return PlainTextResponse("ok")


def limited(connection):
    app = Starlette(routes=[Route("/health", answer)])
    return serve_app(app, host="127.0.0.1", port=0, connection=connection)


async def half(url, sent=HALF):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(sent)
    return reader, writer


async def test_unfinished_requests_do_not_block_others():
    async with limited(Few) as url, httpx.AsyncClient(timeout=20) as http:
        held = [await half(url) for _ in range(30)]
        assert (await http.get(f"{url}/health")).text == "ok"
        await until(lambda: sum(reader.at_eof() for reader, _ in held) >= 20)
        for _, writer in held:
            writer.close()


async def test_connection_without_a_request_head_is_closed():
    async with limited(Hasty) as url, asyncio.timeout(20):
        opened = [await half(url, first) for first in (b"", HALF, HALF + b"a: b\r\n\r\n")]
        reader, writer = opened[-1]
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(HALF)
        for reader, writer in opened:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


async def test_memory_for_unfinished_request_heads_is_bounded():
    """Peers send heads of 15 KB each that they do not finish; a whole head counts no longer."""
    line = b"x: " + b"a" * 15_000 + b"\r\n"
    async with limited(Cramped) as url, asyncio.timeout(60):
        halves = [await half(url, HALF[:-2] + line) for _ in range(30)]
        with suppress(ConnectionResetError):
            assert await halves[0][0].read() == b""
        reader, writer = await half(url)
        for _ in range(20):
            writer.write(line + b"\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.write(HALF)
        for opened in (writer, *(one for _, one in halves)):
            opened.close()
            with suppress(ConnectionResetError):
                await opened.wait_closed()


async def test_connections_without_a_token_are_closed_first(tmp_path):
    whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    ours = whole.replace(b"/health", b"/v1/status")[:-2] + b"Authorization: Bearer %s\r\n\r\n"
    ours %= (TOKEN.token or "").encode()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        service = await stack.enter_async_context(a_service(tmp_path))
        app = make_app(served(service))
        listener = serve_app(app, host="127.0.0.1", port=0, connection=Few)
        url = await stack.enter_async_context(listener)
        known = await half(url, ours)
        assert b" 200 " in await known[0].readline()
        strangers = [await half(url, sent) for sent in (whole, HALF) * 20]
        await until(lambda: sum(other.at_eof() for other, _ in strangers) >= 15)  # half ones
        known[1].write(ours)
        await known[0].readuntil(b" 200 ")
        for _, writer in (known, *strangers):
            writer.close()
