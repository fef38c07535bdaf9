import asyncio
import threading
from dataclasses import replace
from typing import ClassVar

import msgspec
import pyarrow as pa
import pytest
from tests.server.house import FakeWorkers, an_app, body, ended, failure, submission, until

from bridle.bridges import parquet
from bridle.trajectory.result import from_packed, trajectory_json


async def submit(http, *bodies):
    return await http.post("/v1/tasks", json={"tasks": [*bodies]})


async def test_batch_is_accepted_as_a_whole_or_not_at_all(tmp_path):
    async with an_app(tmp_path) as http:
        response = await submit(http, body("a"), body("b"))
        assert response.json() == {
            "tasks": [{"task_id": "a", "new": True}, {"task_id": "b", "new": True}]
        }
        wrong = body("d", agent={"harness": "nope"})
        response = await submit(http, body("c"), wrong)
        assert response.status_code == 422
        error = response.json()["error"]
        assert (error["task_id"], error["index"]) == ("d", 1)
        assert error["message"] == response.json()["detail"]
        assert error["message"].startswith("task 'd': unknown harness 'nope'; known: ")
        assert (await submit(http, body("c"), body("c"))).status_code == 422
        assert (await http.get("/v1/tasks/c")).status_code == 404
        response = await submit(http, body("b"), body("c"))
        assert [one["new"] for one in response.json()["tasks"]] == [False, True]


async def test_a_wrong_query_parameter_is_refused_by_its_name(tmp_path):
    async with an_app(tmp_path) as http:
        response = await http.get("/v1/tasks?state=odd")
    assert (response.status_code, response.json()["error"]["param"]) == (422, "state")
    assert response.json()["detail"].startswith("the query: state: Input should be 'queued'")


async def test_default_builder_of_a_v1_task_is_prefix_merging(tmp_path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"))
        spec = (await http.service.queries.task("a"))["spec"]
        assert '"strategy":"prefix_merging"' in spec


async def test_tasks_are_listed_by_state_and_shown(tmp_path):
    async with an_app(tmp_path, FakeWorkers(answers={"b": failure("harness_crash")})) as http:
        await submit(http, body("a", dispatch_priority=3), body("b"))
        await ended(http.service, "a")
        await ended(http.service, "b")
        response = (await http.get("/v1/tasks?state=failed")).json()
        assert [one["task_id"] for one in response["tasks"]] == ["b"]
        assert (await http.get("/v1/tasks?state=lost")).status_code == 422
        response = (await http.get("/v1/tasks/a?wait_s=30")).json()
        assert (response["state"], response["priority"], response["usable_sessions"]) == (
            "completed",
            3,
            1,
        )


async def test_long_poll_of_a_task_returns_when_the_task_ends(tmp_path):
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        await submit(http, body("a"))
        await until(lambda: workers.living)
        assert (await http.get("/v1/tasks/a")).json()["state"] == "running"
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(http.get("/v1/tasks/a?wait_s=60"))
            await asyncio.sleep(0.02)
            workers.let("a.0")
        assert waiting.result().json()["state"] == "completed"


async def test_tasks_and_sessions_are_cancelled(tmp_path):
    workers = FakeWorkers(capacity=2, held=True)
    async with an_app(tmp_path, workers) as http:
        await submit(http, body("a", 2), body("b"), body("c"))
        await until(lambda: len(workers.living) == 2)
        response = await http.delete("/v1/sessions/a.0")
        assert response.status_code == 200
        assert (await http.delete("/v1/sessions/x")).status_code == 404
        response = await http.post("/v1/tasks/cancel", json={"task_ids": ["a", "nobody"]})
        assert response.json() == {"unknown": ["nobody"]}
        await ended(http.service, "a")
        assert (await http.delete("/v1/tasks/b")).status_code == 200
        assert (await http.delete("/v1/tasks/nobody")).status_code == 404
        assert (await http.get("/v1/tasks/b?wait_s=30")).json()["state"] == "cancelled"
        await until(lambda: "c.0" in workers.living)
        workers.let("c.0")
        await ended(http.service, "c")


async def test_sessions_of_all_tasks_are_listed_newest_first(tmp_path):
    workers = FakeWorkers(answers={"b.0": failure("evaluator", "it broke")})
    async with an_app(tmp_path, workers) as http:
        await submit(http, body("a", 2), body("b", max_attempts=1))
        await ended(http.service, "a")
        await ended(http.service, "b")
        found = (await http.get("/v1/sessions")).json()["sessions"]
        page = (await http.get("/v1/sessions?limit=1&offset=1")).json()["sessions"]
        failed = (await http.get("/v1/sessions?state=ERROR")).json()["sessions"]
        wrong = await http.get("/v1/sessions?state=odd")

    assert [one["session_id"] for one in found] == ["b.0", "a.1", "a.0"]
    assert [one["task_id"] for one in found] == ["b", "a", "a"]
    assert found[1]["harness"] == "command"
    assert found[1]["timing"] == {"run": 0.01}
    assert page == found[1:2]
    assert failed == found[:1]
    assert wrong.status_code == 422


async def test_trajectory_is_served_as_json_msgpack_or_arrow(tmp_path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"))
        await ended(http.service, "a")
        path = "/v1/sessions/a.0/trajectory"
        plain = (await http.get(path)).json()
        packed = await http.get(path, headers={"accept": "application/msgpack"})
        assert trajectory_json(from_packed(msgspec.msgpack.decode(packed.content))) == plain
        kind = "application/vnd.apache.arrow.stream"
        arrow = await http.get(path, headers={"accept": kind})
        assert arrow.headers["content-type"] == kind
        table = pa.ipc.open_stream(arrow.content).read_all()
        assert table.column("response_ids").to_pylist() == [plain["traces"][0]["response_ids"]]


class Watched(tuple):
    """Traces that note the threads in which they are turned into an answer."""

    __slots__ = ()
    threads: ClassVar[set[int]] = set()

    def __iter__(self):
        self.threads.add(threading.get_ident())
        return super().__iter__()


class WatchedTraces:
    """A codec whose trajectories have `Watched` traces."""

    pack = staticmethod(parquet.pack)
    arrow = staticmethod(parquet.arrow)

    @staticmethod
    def unpack(packed):
        found = parquet.unpack(packed)
        return replace(found, traces=Watched(found.traces))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/sessions/a.0/trajectory",
        "/v1/groups?include=trajectories",
        "/rollout/task/a?include=results",
    ],
)
async def test_trajectory_is_encoded_off_the_event_loop(tmp_path, path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"))
        await ended(http.service, "a")
        http.service.files.codec = WatchedTraces
        Watched.threads.clear()
        assert (await http.get(path)).status_code == 200
    assert Watched.threads
    assert threading.get_ident() not in Watched.threads


async def test_session_without_a_trajectory_gives_404(tmp_path):
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        await submit(http, body("a"))
        await until(lambda: workers.living)
        response = await http.get("/v1/sessions/a.0/trajectory")
        assert (response.status_code, "has not ended" in response.text) == (404, True)
        assert (await http.get("/v1/sessions/a.0")).json()["status"] == "RUNNING"
        assert (await http.get("/v1/sessions/none/trajectory")).status_code == 404
        workers.let("a.0")
        await ended(http.service, "a")


async def reward(http, session_id, value, **more):
    return await http.post(f"/v1/sessions/{session_id}/reward", json={"reward": value, **more})


async def test_rewards_of_a_session_are_limited_in_size_and_the_last_accepted_one_counts(tmp_path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"))
        await ended(http.service, "a")
        given, status = 0, 200
        while status == 200:
            given += 1
            response = await reward(http, "a.0", given, trace_rewards=[0.123456789] * 10_000)
            status = response.status_code
        assert (status, response.json()["error"]["code"]) == (409, "conflict")
        assert "take more than 1048576 bytes" in response.json()["error"]["message"]
        assert (await http.get("/v1/sessions/a.0")).json()["reward"] == given - 1 > 5


async def test_a_later_reward_is_delivered_with_an_unacknowledged_group(tmp_path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"))
        await ended(http.service, "a")
        assert (await reward(http, "a.0", 0.5, why="by hand", by="ann")).status_code == 200
        outcome = (await reward(http, "a.0", 0.25, trace_rewards=[0.75])).json()
        assert (outcome["reward"], outcome["taken_at"]) == (0.25, None)
        assert [(one["reward"], one["by"], one["why"]) for one in outcome["scores"]] == [
            (0.5, "ann", "by hand"),
            (0.25, "admin", ""),
        ]
        (group,) = (await http.get("/v1/groups?include=trajectories")).json()["groups"]
        (result,) = group["results"]
        assert (result["reward"], result["trajectory"]["reward"]) == (0.25, 0.25)
        assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [0.75]
        await http.post("/v1/groups/ack", json={"task_ids": ["a"]})
        assert (await reward(http, "a.0", 1)).json()["taken_at"] is not None


async def test_a_reward_completes_a_session_whose_evaluator_failed_and_its_task(tmp_path):
    broken = {**failure("evaluator", "no such scorer"), "traces": 1}
    async with an_app(tmp_path, FakeWorkers(answers={"a.0": broken})) as http:
        await submit(http, body("a", max_attempts=1))
        await ended(http.service, "a")
        assert (await http.get("/v1/tasks/a")).json()["state"] == "failed"
        result = (await reward(http, "a.0", 1.0)).json()
        assert (result["status"], result["cause"], result["usable"]) == ("COMPLETED", None, True)
        task = (await http.get("/v1/tasks/a")).json()
        assert (task["state"], task["usable_sessions"]) == ("completed", 1)
        trajectory = (await http.get("/v1/sessions/a.0/trajectory")).json()
        assert (trajectory["status"], trajectory["error"]) == ("COMPLETED", None)
        assert (await reward(http, "a.0", 2.0)).json()["usable"] is True
        assert (await http.get("/v1/tasks/a")).json()["usable_sessions"] == 1


async def test_reward_is_refused_for_a_running_or_unscorable_session(tmp_path):
    workers = FakeWorkers(held=True)
    async with an_app(tmp_path, workers) as http:
        await submit(http, body("a"))
        await until(lambda: workers.living)
        response = await reward(http, "a.0", 1)
        assert (response.status_code, "has not ended" in response.text) == (409, True)
        workers.let("a.0", **failure("harness_crash"))
        await ended(http.service, "a")
        response = await reward(http, "a.0", 1)
        assert (response.status_code, "harness_crash" in response.text) == (409, True)
        await submit(http, body("b"))
        await until(lambda: "b.0" in workers.living)
        workers.let("b.0", **{**failure("harness_crash"), "traces": 1})
        await ended(http.service, "b")
        response = (await reward(http, "b.0", -1)).json()
        assert (response["status"], response["reward"], response["usable"]) == ("ERROR", -1.0, True)
        assert (await reward(http, "none", 1)).status_code == 404
        for wrong in (None, "1", True):
            assert (await reward(http, "a.0", wrong)).status_code == 422


async def test_artifact_route_serves_files_as_sandboxed_attachments_and_404_otherwise(tmp_path):
    log = tmp_path / "stdout.log"
    log.write_text("hello")
    async with an_app(tmp_path, FakeWorkers(artifacts={("a.0", "stdout.log"): log})) as http:
        await submit(http, body("a"))
        await ended(http.service, "a")
        found = await http.get("/v1/sessions/a.0/artifacts/stdout.log")
        assert found.text == "hello"
        assert found.headers["content-disposition"] == "attachment"
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert (await http.get("/v1/sessions/a.0/artifacts/none")).status_code == 404


async def test_groups_are_listed_until_they_are_acknowledged(tmp_path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a", 2), body("b"))
        for name in "ab":
            await ended(http.service, name)
        first = (await http.get("/v1/groups?limit=1")).json()
        again = (await http.get("/v1/groups?limit=1")).json()
        assert first == again
        (group,) = first["groups"]
        assert len(group["sessions"]) == group["total_sessions"]
        assert "results" not in group
        response = await http.post("/v1/groups/ack", json={"cursor": first["cursor"]})
        assert response.json() == {"acked": 1, "unknown": []}
        rest = (await http.get("/v1/groups?include=trajectories")).json()
        assert [one["task_id"] for one in rest["groups"]] != [group["task_id"]]
        assert rest["groups"][0]["results"][0]["trajectory"]["traces"]
        response = (await http.get(f"/v1/groups?cursor={rest['cursor']}")).json()
        assert response == {"groups": [], "cursor": rest["cursor"]}


async def test_an_acknowledgement_names_the_ids_of_which_no_group_has_ended(tmp_path):
    async with an_app(tmp_path, FakeWorkers(capacity=1)) as http:
        await submit(http, body("ended"))
        await ended(http.service, "ended")
        await http.post("/v1/pause")
        await submit(http, body("waits"))
        for count in (1, 0):  # a repeated one is no mistake
            wanted = {"task_ids": ["waits", "ended", "a-typo"]}
            response = await http.post("/v1/groups/ack", json=wanted)
            assert response.json() == {"acked": count, "unknown": ["waits", "a-typo"]}


@pytest.mark.parametrize("left", [b"PAR1 and no more", None])
async def test_a_trajectory_that_cannot_be_read_is_named_and_its_group_can_be_passed(
    tmp_path, left
):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"), body("b"))
        for name in "ab":
            await ended(http.service, name)
        (path,) = tmp_path.rglob("a.0.parquet")
        path.unlink()
        if left is not None:
            path.write_bytes(left)
        response = await http.get("/v1/groups?include=trajectories")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "store_error")
        for said in ("session 'a.0'", str(path), "acknowledge task 'a'"):
            assert said in error["message"]
        await http.post("/v1/groups/ack", json={"task_ids": ["a"]})
        response = await http.get("/v1/groups?include=trajectories")
        assert [one["task_id"] for one in response.json()["groups"]] == ["b"]


async def test_by_priority_no_cursor_passes_over_or_acknowledges_a_group_not_listed_yet(tmp_path):
    async with an_app(tmp_path) as http:
        for name, priority in (("low", 1), ("high", 9)):
            await submit(http, body(name, dispatch_priority=priority))
            await ended(http.service, name)
        page = (await http.get("/v1/groups?order=priority&limit=1")).json()
        assert [one["task_id"] for one in page["groups"]] == ["high"]
        response = await http.post("/v1/groups/ack", json={"cursor": page["cursor"]})
        assert response.json()["acked"] == 0
        await http.post("/v1/groups/ack", json={"task_ids": ["high"]})
        page = (await http.get(f"/v1/groups?order=priority&cursor={page['cursor']}")).json()
        assert [one["task_id"] for one in page["groups"]] == ["low"]


async def test_long_poll_waits_for_the_next_group(tmp_path):
    async with an_app(tmp_path) as http:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(http.get("/v1/groups?wait_s=60"))
            await asyncio.sleep(0.02)
            await submit(http, body("a"))
        assert [one["task_id"] for one in waiting.result().json()["groups"]] == ["a"]


async def test_packed_groups_hold_whole_results(tmp_path):
    async with an_app(tmp_path) as http:
        await submit(http, body("a"))
        await ended(http.service, "a")
        response = await http.get(
            "/v1/groups?include=trajectories", headers={"accept": "application/msgpack"}
        )
        (group,) = msgspec.msgpack.decode(response.content)["groups"]
        assert from_packed(group["results"][0]["trajectory"]).reward == 1.0


async def test_dead_callbacks_are_listed_and_replayed(tmp_path):
    async with an_app(tmp_path) as http:
        task = submission("a", callback_url="http://127.0.0.1:9/x")
        await http.service.submit([task], owner="o")
        await ended(http.service, "a")
        (first, last) = (await http.get("/v1/callbacks")).json()["callbacks"]
        assert (await http.post(f"/v1/callbacks/{first['delivery_id']}/replay")).status_code == 404
        for one in (first, last):
            await http.service.store.record_attempt(
                one["delivery_id"], tries=1, fault="500", dead=True, now=1.0, next_at=1.0
            )
        dead = (await http.get("/v1/callbacks?state=dead")).json()["callbacks"]
        assert [one["error"] for one in dead] == ["500", "500"]
        response = await http.post(f"/v1/callbacks/{first['delivery_id']}/replay")
        assert response.json() == {"replayed": 1}
        assert (await http.post("/v1/callbacks/replay")).json() == {"replayed": 1}


async def test_pause_drain_resume_and_policy_routes_change_the_server_state(tmp_path):
    workers = FakeWorkers()
    async with an_app(tmp_path, workers) as http:
        assert (await http.post("/v1/pause")).json()["paused"] is True
        assert (await http.post("/v1/drain?timeout_s=1")).json()["running"] == 0
        assert (await http.post("/v1/resume")).json()["paused"] is False
        response = await http.post("/policy", json={"version": 7, "hold": "wait", "timeout_s": 3})
        assert response.json()["version"] == 7
        assert (workers.asked[-1].hold, workers.asked[-1].timeout_s) == ("wait", 3)
        assert (await http.get("/policy")).json()["version"] == 7
        assert (await http.get("/v1/status")).json()["policy"]["version"] == 7


async def test_an_engine_is_released_and_resumed(tmp_path):
    workers = FakeWorkers()
    async with an_app(tmp_path, workers) as http:
        body = {"state": "released", "mode": "cut", "by": "t"}
        assert (await http.post("/engines/h:1", json=body)).json() == {"engines": []}
        asked = workers.asked[-1]
        assert (asked.released, asked.cut, asked.by, asked.replicas) == (True, True, "t", ("h:1",))
        resumed = {"state": "resumed", "version": 3, "by": "t"}
        assert (await http.post("/engines/http://h:1", json=resumed)).status_code == 200
        asked = workers.asked[-1]
        assert (asked.released, asked.version, asked.replicas) == (False, 3, ("http://h:1",))
        assert (await http.post("/engines/all", json={"state": "released"})).status_code == 200
        assert workers.asked[-1].replicas is None
        for wrong in ({}, {"state": "asleep"}, {"state": "released", "version": 3}):
            assert (await http.post("/engines/all", json=wrong)).status_code == 422
        assert len(workers.asked) == 3


@pytest.mark.parametrize(
    "wrong", [{"version": "x"}, {"hold": "maybe"}, {"weights": "/w"}, {"a": 1}]
)
async def test_invalid_policy_update_is_refused(tmp_path, wrong):
    workers = FakeWorkers()
    async with an_app(tmp_path, workers) as http:
        assert (await http.post("/policy", json=wrong)).status_code == 422
        assert workers.asked == []


REPLICA = "http://127.0.0.1:9"


async def test_nodes_are_shown_and_drained_by_name(tmp_path):
    async with an_app(tmp_path, FakeWorkers()) as http:
        assert (await http.get("/v1/nodes")).json() == {
            "nodes": [{"name": "fake", "state": "live", "slots": 4, "free": 4}]
        }
        drained = await http.post("/v1/nodes/fake/drain")
        assert drained.json()["nodes"][0]["state"] == "draining"
        refused = await http.post("/v1/nodes/other/drain")
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "name")


async def test_replica_routes_add_and_remove_an_engine(tmp_path):
    workers = FakeWorkers()
    async with an_app(tmp_path, workers) as http:
        assert (await http.post("/v1/replicas", json={"engine": REPLICA})).status_code == 200
        assert workers.replicas == [REPLICA]
        assert (await http.post("/v1/replicas", json={"engine": "scripted:x"})).status_code == 422
        gone = await http.delete("/v1/replicas", params={"name": REPLICA, "drain_s": "3"})
        assert (gone.status_code, workers.replicas) == (200, [])
        assert (await http.delete("/v1/replicas", params={"name": REPLICA})).status_code == 404
        assert (await http.delete("/v1/replicas")).status_code == 422
