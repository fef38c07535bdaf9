"""A client as others wrote it for Polar: it knows Polar's contract and nothing of Bridle.

Written from `FIELD_NOTES` §3 and §10 alone: submit, poll until `completed` or `failed`, read
`results[].trajectory.traces[]`, and a receiver at `/callbacks/session_result` that takes a
SessionResult or a TaskResult.
"""

import asyncio
import dataclasses
import time
from contextlib import AsyncExitStack

import aiohttp
from tests.node.house import AGENT, a_node
from tests.server.house import served, until, with_token
from tests.server.test_callbacks import Receiver

from bridle.aio import Nursery
from bridle.bridges import parquet
from bridle.server.app import serve_api
from bridle.server.callbacks import CallbackAddresses, CallbackSender
from bridle.server.service import Service
from bridle.server.storage import Database, TrajectoryFiles

TOKEN = "control-plane-token-of-theirs"


@dataclasses.dataclass
class PolarClient:
    """The client; `tool` is aiohttp as it comes."""

    url: str
    http: aiohttp.ClientSession

    async def submit(self, request):
        headers = {"x-polar-control-token": TOKEN}
        async with self.http.post(
            f"{self.url}/rollout/task/submit", json=request, headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.json()
        assert body["status"] == "running"
        return body["task_id"]

    async def poll(self, task_id, timeout_s=45):
        headers = {"x-polar-control-token": TOKEN}
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            async with self.http.get(
                f"{self.url}/rollout/task/{task_id}", headers=headers
            ) as answer:
                body = await answer.json()
            if body["status"] in ("completed", "failed"):
                return body
            await asyncio.sleep(0.05)
        raise TimeoutError(task_id)


def request(callback_url):
    return {
        "task_id": "swegym-0001",
        "instruction": "Write done to out.txt.",
        "num_samples": 2,
        "timeout_seconds": 60,
        "runtime": {"backend": "local", "prepare": [{"type": "exec", "command": "true"}]},
        "agent": {"harness": "shell", "custom_shell": AGENT, "model_name": "policy"},
        "builder": {"strategy": "prefix_merging", "config": {}},
        "evaluator": {"strategy": "command", "config": {"command": "grep -q done out.txt"}},
        "callback_url": callback_url,
        "metadata": {"dataset": "swegym", "agent_timeout": 30},
    }


def check_trace(trace):
    """Return what a trainer of theirs refuses to train on."""
    assert trace["prompt_ids"]
    assert trace["response_ids"]
    lengths = {len(trace[name]) for name in ("response_ids", "loss_mask", "response_logprobs")}
    assert len(lengths) == 1
    assert set(trace["loss_mask"]) <= {0, 1}
    assert sum(trace["loss_mask"]) > 0
    assert trace["prompt_messages"]
    assert trace["finish_reason"] == "stop"


async def test_an_unmodified_polar_client_submits_a_task_and_gets_its_results(tmp_path):
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        receiver = await enter(Receiver().up())
        node = await enter(a_node(tmp_path))
        database = await enter(await Database.open(tmp_path / "server.sqlite"))
        files = TrajectoryFiles(tmp_path / "trajectories", parquet)
        workers = node
        service = await enter(Service(database=database, files=files, workers=workers))
        nursery = await enter(Nursery(service.failed))
        deliverer = CallbackSender(service, CallbackAddresses(["127.0.0.0/8"]), b"k")
        nursery.start(deliverer.run(), name="deliverer")
        url = await enter(serve_api(served(service), host="127.0.0.1", port=0))
        client = PolarClient(with_token(url), await enter(aiohttp.ClientSession()))

        task_id = await client.submit(request(receiver.url))
        task = await client.poll(task_id)

        assert (task["status"], task["total_sessions"], task["completed_sessions"]) == (
            *("completed", 2, 2),
        )
        for result in task["results"]:
            assert (result["status"], result["task_id"]) == ("COMPLETED", task_id)
            assert result["trajectory"]["status"] == "COMPLETED"
            stats = result["trajectory"]["metadata"]["reconstruction_stats"]
            assert stats["completions_merged"] == stats["completions_total"] == 2
            for trace in result["trajectory"]["traces"]:
                check_trace(trace)
                assert trace["reward"] == 1.0
        await until(lambda: len(receiver.got) == 3)
        outcome = receiver.bodies()
        sessions = [one for one in outcome if "session_id" in one]
        (whole,) = [one for one in outcome if "session_id" not in one]
        assert {one["session_id"] for one in sessions} == {
            one["session_id"] for one in task["results"]
        }
        assert whole["results"] == task["results"]
