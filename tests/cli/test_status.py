"""`bridle status`; more of it is tested in `test_serve`."""

import asyncio

from tests.server.house import a_service, ended, served, submission, with_token

from bridle.server.app import serving


async def test_a_server_and_a_task_are_shown_in_counts(tmp_path, say):
    async with (
        a_service(tmp_path) as service,
        serving(served(service), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a", 2)], owner="o")
        await ended(service, "a")
        await service.pause()
        said = await asyncio.to_thread(say, "status", "--server", with_token(url))
        assert "0 of 4 slots in use, paused; policy version 0" in said.out
        said = await asyncio.to_thread(say, "status", "a", "--json", "--server", with_token(url))
        assert [one["session_id"] for one in said.json["sessions"]] == ["a.0", "a.1"]
        said = await asyncio.to_thread(say, "status", "a", "--server", with_token(url))
        assert ("owner" in said.out, " o " in said.out) == (True, True)
        said = await asyncio.to_thread(say, "status", "nobody", "--server", with_token(url))
        assert (said.code, "no task 'nobody'" in said.err) == (3, True)
