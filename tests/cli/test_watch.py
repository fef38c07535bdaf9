"""`bridle watch`: its exit code says whether all went well."""

import asyncio

from tests.server.house import FakeWorkers, a_service, failure, served, submission, with_token

from bridle.server.app import serving


async def test_the_exit_code_tells_of_one_that_was_not_completed(tmp_path, say):
    workers = FakeWorkers(answers={"b": failure("harness_crash")})
    async with (
        a_service(tmp_path, workers) as service,
        serving(served(service), host="127.0.0.1", port=0) as url,
    ):
        await service.submit([submission("a"), submission("b")], owner="o")
        for names, code in ((["a"], 0), (["a", "b"], 1)):
            said = await asyncio.to_thread(
                say, "watch", "--json", "--server", with_token(url), *names
            )
            assert said.code == code
            assert [one["task_id"] for one in said.json["tasks"]] == names
        said = await asyncio.to_thread(say, "watch", "--server", with_token(url))
        assert (said.code, "0 tasks" in said.out) == (0, True)
