"""Two real `bridle serve` on one PostgreSQL: each session runs once, and one outlives the other.

Killing one also kills a node in the midst of its sessions, with its gateway and its harnesses. One
that is stopped (SIGSTOP) for longer than its lease comes back to sessions that are another's.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import ExitStack

import pytest
from tests.node.house import AGENT
from tests.server.house import database_of
from tests.server.test_callbacks import Receiver

from bridle.capture.sqlite import SqliteReader
from bridle.client import AsyncClient

TASKS, SAMPLES = 10, 2
PATIENCE_S = 100.0

SKEWED = """
import runpy, time
now = time.time
time.time = lambda: now() + {skew_s}
runpy.run_module("bridle.cli", run_name="__main__", alter_sys=True)
"""
"""The command line of a machine whose clock is wrong."""

SCRIPT = {
    "conversations": [
        {"turns": [{"shell": ["echo done > out.txt"], "delay_s": 0.3}, {"content": "Done."}]}
    ]
}


def tasks(receiver):
    return [
        {
            "task_id": f"task-{number}",
            "instruction": "Write done to out.txt.",
            "num_samples": SAMPLES,
            "runtime": {"backend": "local"},
            "agent": {"harness": "command", "command": AGENT},
            "evaluator": {"strategy": "command", "config": {"command": "grep -q done out.txt"}},
            "callback_url": receiver.url,
        }
        for number in range(TASKS)
    ]


class Server:
    """A server's process."""

    def __init__(self, folder, database, stack, *, skew_s=0):
        folder.mkdir()
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        # Long enough for a busy machine: one that renews late is no dead one.
        (folder / "bridle.toml").write_text("[server]\nlease_s = 10\n")
        self.data = folder / "data"
        command = (
            *(sys.executable, "-c", SKEWED.format(skew_s=skew_s)),
            *("serve", "--port", "0", "--concurrency", "2"),
            *("--engine", f"scripted:{folder / 'script.json'}", "--data", self.data),
            *("--database", database, "--callback-to", "127.0.0.0/8"),
            *("--config", folder / "bridle.toml", "--trajectories", folder.parent / "trajectories"),
        )
        log = stack.enter_context((folder / "log").open("wb"))
        self.log = folder / "log"
        self.process = stack.enter_context(subprocess.Popen(command, stderr=log))
        stack.callback(self.process.kill)

    async def url(self):
        """Return its address, once it listens."""
        said = await self.says("rollout server at ")
        return said.partition("rollout server at ")[2].partition(",")[0]

    async def says(self, words):
        """Its log, once it has these words."""
        async with asyncio.timeout(PATIENCE_S):
            while words not in (said := self.log.read_text()):
                assert self.process.poll() is None, said
                await asyncio.sleep(0.05)
        return said

    def runs(self):
        """Run ids of the sessions that its node captured."""
        with SqliteReader(self.data / "capture.sqlite") as reader:
            return [one.session_id for one in reader.sessions()]


@pytest.mark.postgres
@pytest.mark.timeout(300)
async def test_a_server_takes_over_the_sessions_of_a_killed_server(tmp_path):
    with ExitStack() as stack:
        async with Receiver().up() as receiver:
            first, second = (
                Server(tmp_path / name, str(database_of(tmp_path)), stack) for name in "ab"
            )
            url = await second.url()
            await in_mid_batch(first, receiver)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            sessions = await all_ended(url)
            second.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.process.wait, 60) == 0
        judge(sessions, first.runs(), second.runs(), receiver)
        again = {f"{one['session_id']}.r2" for one in sessions if one["attempt"] == 2}
        assert again <= set(second.runs())


@pytest.mark.postgres
@pytest.mark.timeout(300)
@pytest.mark.parametrize("skew_s", [-3600, 3600])
async def test_suspended_server_finds_its_sessions_ended_by_another(tmp_path, skew_s):
    with ExitStack() as stack:
        async with Receiver().up() as receiver:
            database = str(database_of(tmp_path))
            first = Server(tmp_path / "a", database, stack, skew_s=skew_s)
            second = Server(tmp_path / "b", database, stack)
            url = await second.url()
            await in_mid_batch(first, receiver)
            assert "took over" not in second.log.read_text()
            first.process.send_signal(signal.SIGSTOP)
            await second.says("took over what a server was running")
            first.process.send_signal(signal.SIGCONT)
            sessions = await all_ended(url)
            for server in (first, second):
                server.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert "took over" not in first.log.read_text()
        assert any(one["attempt"] == 2 for one in sessions)
        judge(sessions, first.runs(), second.runs(), receiver)


async def in_mid_batch(server, receiver):
    """Submit all tasks to a server, and wait until a few have ended and it runs others."""
    async with AsyncClient(await server.url()) as client:
        await client.submit_many(tasks(receiver))
        async with asyncio.timeout(PATIENCE_S):
            while len(receiver.got) < 6 or not (await client.status())["running"]:  # noqa: ASYNC110 - others do it
                await asyncio.sleep(0.01)


async def all_ended(url):
    """All sessions, once their tasks have ended and all callbacks are delivered."""
    async with AsyncClient(url, patience_s=PATIENCE_S) as client:
        for number in range(TASKS):
            await client.wait(f"task-{number}", timeout_s=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while (await client.status())["callbacks"].keys() != {"delivered"}:  # noqa: ASYNC110 - others do it
                await asyncio.sleep(0.05)
        return [
            session
            for number in range(TASKS)
            for session in await client.sessions(f"task-{number}")
        ]


def judge(sessions, by_first, by_second, receiver):
    """Check that each session ended once, on one server, and that its deliveries are equal."""
    assert len(sessions) == TASKS * SAMPLES
    assert {one["status"] for one in sessions} == {"COMPLETED"}
    runs = Counter([*by_first, *by_second])
    assert set(runs.values()) == {1}  # no run twice, on whichever server
    assert by_first
    assert by_second
    for one in sessions:
        # Only a session that the first server was running ran again. A first server that was
        # stopped for a time shares the queue afterwards: it may run that session itself.
        whys = [earlier["why"] for earlier in one["earlier"]]
        name, attempt = one["session_id"], one["attempt"]
        assert (len(whys), set(whys)) in [(0, set()), (1, {"interrupted"})]
        assert attempt == len(whys) + 1
        last = name if attempt == 1 else f"{name}.r{attempt}"
        assert runs.pop(last) == 1
        if attempt == 2:
            runs.pop(name, None)  # it may have been killed before its node knew of it
    assert not runs
    result = defaultdict(set)
    for headers, content in receiver.got:
        body = json.loads(content)
        results = [body] if "session_id" in body else body["results"]
        result[headers["x-bridle-delivery"]].add(
            tuple((one["session_id"], one["run_id"], one["reward"]) for one in results)
        )
    assert len(result) == TASKS * (SAMPLES + 1)
    assert all(len(versions) == 1 for versions in result.values())
