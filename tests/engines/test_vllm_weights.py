"""A vLLM is checked before its weights are replaced, and gets the right calls."""

import json

import pytest

from bridle.engines.base import WeightsLostError
from bridle.engines.http import EngineClient
from bridle.engines.vllm import check_folder, load_weights, weights_finding
from bridle.errors import EngineError

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "num_hidden_layers": 2}
GOOD = {"collective_rpc": {"results": [None]}, "reset_prefix_cache": b"",
        "update_weight_version": b"{}"}  # fmt: skip


def model(folder, *, weights="model.safetensors", **changes):
    """A folder that looks like a model's; returns it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if weights:
        (folder / weights).touch()
    return folder


async def requests_sent(stub, source, **replies):
    """Make a server load a folder as version 7; return the bodies that it got."""
    server = await stub(**{**GOOD, **replies})
    client = EngineClient(server.url, api_key=None, timeout_s=30)
    try:
        await load_weights(client, source, 7)
    finally:
        await client.aclose()
    return server.bodies


async def test_loading_weights_calls_reload_cache_reset_and_version_routes_in_order(stub, tmp_path):
    folder = model(tmp_path / "a")
    command = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert await requests_sent(stub, folder) == [command, None, {"new_version": "7"}]


async def test_a_folder_that_only_the_server_sees_is_passed_on(stub):
    (command, *_) = await requests_sent(stub, "/nowhere/here")
    assert command["kwargs"] == {"weights_path": "/nowhere/here"}


async def test_a_server_without_weight_routes_is_an_error_that_names_dev_mode(stub, tmp_path):
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1") as caught:
        await requests_sent(stub, model(tmp_path / "a"), collective_rpc=404)
    assert not isinstance(caught.value, WeightsLostError)


async def test_a_reload_that_failed_on_the_server_raises_weights_lost_error(stub, tmp_path):
    with pytest.raises(WeightsLostError, match="start it anew"):
        await requests_sent(stub, model(tmp_path / "a"), collective_rpc=500)


async def test_an_unreachable_server_is_a_retryable_error_and_not_weights_lost(tmp_path):
    client = EngineClient("http://127.0.0.1:9", api_key=None, timeout_s=1)
    try:
        with pytest.raises(EngineError) as caught:
            await load_weights(client, model(tmp_path / "a"), 7)
    finally:
        await client.aclose()
    assert not isinstance(caught.value, WeightsLostError)
    assert caught.value.retryable


def test_a_folder_without_weights_or_of_another_model_shape_is_refused(tmp_path):
    served = model(tmp_path / "served")
    check_folder(model(tmp_path / "good"), served)
    check_folder(model(tmp_path / "old", weights="pytorch_model.bin"), served)
    with pytest.raises(EngineError, match="has no weights"):
        check_folder(model(tmp_path / "empty", weights=None), None)
    with pytest.raises(EngineError, match="the folder of weights does not exist"):
        check_folder(tmp_path / "none", served)
    check_folder(tmp_path / "none", None)
    with pytest.raises(EngineError, match="hidden_size 16 instead of 8, num_hidden_layers 3"):
        check_folder(model(tmp_path / "big", hidden_size=16, num_hidden_layers=3), served)
    (served / "config.json").write_text("[")
    check_folder(tmp_path / "big", served)


def test_the_probe_reports_whether_weights_can_be_loaded_and_the_flag_to_enable_it(tmp_path):
    assert "VLLM_SERVER_DEV_MODE=1" in weights_finding(served=None, routes=False).fix
    assert not weights_finding(served=None, routes=False).needed
    assert weights_finding(served=None, routes=True).ok
    assert weights_finding(served=model(tmp_path / "a", tie_word_embeddings=False), routes=True).ok
    tied = weights_finding(served=model(tmp_path / "b", tie_word_embeddings=True), routes=True)
    assert (tied.ok, tied.needed) == (False, False)
    assert "tied" in tied.found
