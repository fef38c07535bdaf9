"""`bridle cancel`: what is ended, and what is not known."""

import asyncio

from tests.server.house import FakeWorkers, a_service, ended, served, submission, until, with_token

from bridle.server.app import serving


async def test_a_running_task_is_ended(tmp_path, say):
    workers = FakeWorkers(held=True)
    async with (
        a_service(tmp_path, workers) as service,
        serving(served(service), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a")], owner="o")
        await until(lambda: workers.living)
        said = await asyncio.to_thread(
            say, "cancel", "a", "b", "--json", "--server", with_token(url)
        )
        assert (said.code, said.json) == (1, {"unknown": ["b"]})
        assert (await ended(service, "a"))["state"] == "cancelled"
