import asyncio
import socket

import httpx
import pytest
from tests.server.house import KNOWN, a_service, served, until

from bridle.errors import ConfigError
from bridle.server.app import serving


async def test_it_serves_on_a_free_port_and_lets_it_go(tmp_path):
    async with a_service(tmp_path) as service:
        async with (
            serving(served(service), host="127.0.0.1", port=0) as url,
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
                async with serving(served(service), host="127.0.0.1", port=port):
                    pass


async def test_waiting_readers_are_let_go_when_it_ends(tmp_path):
    async with a_service(tmp_path) as service, httpx.AsyncClient(timeout=60) as http:
        async with (
            asyncio.TaskGroup() as group,
            serving(served(service), host="127.0.0.1", port=0) as url,
        ):
            asked = http.get(f"{url}/v1/groups?wait_s=60", headers=KNOWN)
            waiting = group.create_task(asked)
            await until(lambda: service.groups.ticket()._waiters)
        assert waiting.result().json() == {"groups": [], "cursor": 0}


async def test_an_unknown_path_is_refused_in_the_same_shape(tmp_path):
    async with (
        a_service(tmp_path) as service,
        serving(served(service), host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        told = await http.get("/nowhere")
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")
