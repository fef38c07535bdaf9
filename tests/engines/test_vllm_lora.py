"""A policy as an adapter: calls name the newest, keep it, and no name comes twice."""

import asyncio
import json

import pytest
from tests.engines.shapes import collect, request
from tests.engines.stub import honest

from bridle.engines.base import ADAPTER, is_adapter
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica
from bridle.errors import ConfigError, EngineError
from bridle.gateway.weights import Policy, SetPolicy, set_policy
from bridle.types import VersionSpan

CHAT = "v1/chat/completions"
LOAD, UNLOAD = "v1/load_lora_adapter", "v1/unload_lora_adapter"


class Taker:
    """The routes of a vLLM that takes adapters, and the calls that they got."""

    def __init__(self):
        self.reported = []

    def load(self, body):
        read = json.loads(body)
        self.reported.append(("load", read["lora_name"], read["lora_path"]))
        return b"Success"

    def unload(self, body):
        self.reported.append(("unload", json.loads(body)["lora_name"]))
        return b"Success"

    @property
    def names(self):
        return [one[1] for one in self.reported if one[0] == "load"]


@pytest.fixture
async def taking(stub, connected):
    taker = Taker()
    routes = {CHAT: honest(), LOAD: taker.load, UNLOAD: taker.unload, "health": b"{}"}
    server = await stub(**routes)
    engine = await connected(server.url)
    return taker, server, engine


def asked(server):
    """The models of the sampled calls."""
    return [one["model"] for one in server.bodies if one and "request_id" in one]


@pytest.mark.parametrize("outside", [False, True])
async def test_a_call_names_the_newest_adapter_and_has_its_version(taking, outside):
    _, server, engine = taking
    taker = taking[0]
    (before,) = await collect(engine, request())
    await engine.load_adapter("/a", 1)
    await engine.load_adapter("/b", 2)
    made = request()
    if outside:
        assert engine.begin(made) is not None
        await engine.load_adapter("/c", 3)
        async with asyncio.timeout(10):
            while (chunk := engine.arrived(made)) is None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.002)
        engine.end(made)
    else:
        (chunk,) = await collect(engine, made)
    assert (before.versions, chunk.versions) == ((VersionSpan(0, 0, 2),), (VersionSpan(2, 0, 2),))
    assert asked(server)[-2:] == ["stub", taker.names[1]]
    assert [name.partition("-")[0] for name in taker.names[:2]] == ["stub@1", "stub@2"]


async def test_adapters_before_the_last_two_are_unloaded_and_all_at_the_end(taking):
    taker, _, engine = taking
    for version, folder in enumerate(("/a", "/a", "/b"), start=1):
        await engine.load_adapter(folder, version)
    first, second, third = taker.names
    assert len({first, second, third}) == 3
    assert taker.reported[2:] == [("unload", first), ("load", third, "/b")]
    await engine.aclose()
    assert taker.reported[4:] == [("unload", third), ("unload", second)]


async def test_a_pool_that_ends_unloads_no_adapter_from_a_released_server(taking, tmp_path):
    taker, _, engine = taking
    (tmp_path / ADAPTER).touch()
    pool = EnginePool([Replica("a", engine)])
    await pool.start()
    await pool.update_weights(tmp_path, 1)
    await pool.give_up()
    await pool.aclose()
    assert [one[0] for one in taker.reported] == ["load"]


async def test_a_version_alone_is_refused_while_calls_use_an_adapter(taking, tmp_path):
    """They would go on with the adapter of version 1 and carry version 2."""
    taker, _, engine = taking
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / ADAPTER).touch()
    pool, policy = EnginePool([Replica("a", engine)]), Policy(1)
    await pool.start()
    await pool.update_weights(folders[0], 1)
    refused = r"a samples with the LoRA adapter of version 1.*version 2 as `weights`"
    for wanted in (SetPolicy(version=2), SetPolicy(version=2, hold="abort")):
        with pytest.raises(ConfigError, match=refused):
            await set_policy(wanted, policy, pool)
    assert (pool.held, policy.version) == (None, 1)
    await set_policy(SetPolicy(version=1), policy, pool)

    await set_policy(SetPolicy(released=True), policy, pool)
    with pytest.raises(ConfigError, match=refused):
        await set_policy(SetPolicy(released=False, version=2), policy, pool)
    assert pool.replicas()[0]["state"] == "released"
    await set_policy(SetPolicy(released=False, version=2, weights=str(folders[1])), policy, pool)
    (chunk,) = await collect(pool, request())
    assert chunk.versions == (VersionSpan(2, 0, 2),)
    assert len(taker.names) == 2
    await pool.aclose()


async def test_a_version_alone_is_taken_once_the_models_own_weights_sample(taking, tmp_path):
    _, _, engine = taking
    (tmp_path / ADAPTER).touch()
    pool = EnginePool([Replica("a", engine)])
    await pool.start()
    await pool.update_weights(tmp_path, 1)
    engine.forget_adapters()
    await pool.set_version(2)
    (chunk,) = await collect(pool, request())
    assert chunk.versions == (VersionSpan(2, 0, 2),)
    await pool.aclose()


async def test_the_old_adapter_stays_where_the_new_one_is_refused(taking):
    taker, server, engine = taking
    await engine.load_adapter("/a", 1)
    server.replies[f"/{LOAD}"] = 500
    with pytest.raises(EngineError, match="--max-lora-rank"):
        await engine.load_adapter("/b", 2)
    server.replies[f"/{LOAD}"] = 404
    with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        await engine.load_adapter("/b", 2)
    (chunk,) = await collect(engine, request())
    assert chunk.versions == (VersionSpan(1, 0, 2),)
    assert asked(server)[-1] == taker.names[0]


def test_a_lora_adapter_is_recognised_by_the_config_file_in_its_folder(tmp_path):
    assert not is_adapter(tmp_path)
    assert not is_adapter({"weight": 1})
    assert not is_adapter("/nowhere")
    (tmp_path / ADAPTER).touch()
    assert is_adapter(tmp_path)
    assert is_adapter(str(tmp_path))
