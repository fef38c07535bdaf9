"""Tests of the findings of `bridle doctor --engine` about text and logprobs."""

import json

import pytest
from tests.embedded.models import save_model
from tests.engines.sglang_server import SglangServer

from bridle.cli.doctor import compare
from bridle.config import builtin_tokenizer_dir
from bridle.engines.sglang import SglangEngine
from bridle.engines.vllm import VllmEngine
from bridle.scripted.server import EngineServer
from bridle.testing import scripted_engine


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"conversations": [{"turns": [{"content": "x " * 40}]}]}))
    return f"scripted:{path}"


def told(said):
    return {finding["what"]: finding for finding in said.json}


def test_an_engine_that_renders_nothing_is_well_all_the_same(say, script):
    said = say("doctor", "--engine", script, "--json")
    assert said.code == 0
    assert "nothing for us to compare" in told(said)["rendering"]["found"]


def test_a_folder_without_a_model_cannot_judge_logprobs(say, script):
    said = say("doctor", "--engine", script, "--logprobs", "--json")
    finding = told(said)["recomputed logprobs"]
    assert (said.code, finding["ok"]) == (1, False)
    assert "on this machine" in finding["advice"]


@pytest.mark.timeout(180)  # torch is imported in this process
def test_the_embedded_engines_logprobs_are_those_of_a_plain_forward_pass(say, tmp_path):
    folder = save_model(tmp_path / "model", "qwen3")
    said = say("doctor", "--engine", f"embedded:{folder}", "--logprobs", "--json")
    finding = told(said)["recomputed logprobs"]
    assert finding["ok"], finding
    assert "from a plain forward pass" in finding["found"]


async def test_a_served_engine_is_held_against_our_renderer():
    async with SglangServer(scripted_engine([{"content": "x"}])) as server:
        engine = SglangEngine(server.url)
        info = await engine.start()
        found = {one.what: one async for one in compare(engine, info, None, logprobs=False)}
        await engine.aclose()
    assert found["tokenizer"].found == "the engine's"
    assert "of 7 alike" in found["rendering"].found


async def test_a_served_vllm_is_asked_for_its_parsers_and_its_template():
    async with EngineServer(scripted_engine([{"content": "x"}])) as server:
        engine = VllmEngine(server.url)
        info = await engine.start()
        found = {one.what: one async for one in compare(engine, info, None, logprobs=False)}
        await engine.aclose()
    assert found["parsers"].found == "reasoning not seen, tools yes"
    assert found["engine's template"].found == "it reports prompts, the same as its chat route's"


async def test_without_a_tokenizer_there_is_nothing_to_compare():
    from dataclasses import replace

    engine = scripted_engine([{"content": "x"}])
    info = replace(await engine.start(), tokenizer_dir=None)
    (finding,) = [one async for one in compare(engine, info, None, logprobs=True)]
    assert "give --tokenizer" in finding.found
    folder = str(builtin_tokenizer_dir() / "gone")
    (finding,) = [one async for one in compare(engine, info, folder, logprobs=True)]
    assert not finding.ok
