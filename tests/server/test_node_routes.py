from tests.server.house import FakeWorkers, an_app

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


async def test_replicas_join_and_leave_all_nodes(tmp_path):
    workers = FakeWorkers()
    async with an_app(tmp_path, workers) as http:
        assert (await http.post("/v1/replicas", json={"engine": REPLICA})).status_code == 200
        assert workers.replicas == [REPLICA]
        assert (await http.post("/v1/replicas", json={"engine": "scripted:x"})).status_code == 422
        gone = await http.delete("/v1/replicas", params={"name": REPLICA, "drain_s": "3"})
        assert (gone.status_code, workers.replicas) == (200, [])
        assert (await http.delete("/v1/replicas", params={"name": REPLICA})).status_code == 404
        assert (await http.delete("/v1/replicas")).status_code == 422
