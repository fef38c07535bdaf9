"""`bridle doctor`: checks of the machine, engines and runtimes."""

from __future__ import annotations

import json
import socket

import pytest
from tests.embedded.models import save_model
from tests.engines.sglang_server import SglangServer

from bridle.cli import doctor
from bridle.cli.doctor import compare
from bridle.config import builtin_tokenizer_dir
from bridle.engines.sglang import SglangEngine
from bridle.engines.vllm import VllmEngine
from bridle.scripted.server import EngineServer
from bridle.testing import scripted_engine


def test_every_failed_doctor_finding_gives_advice(say, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    said = say("doctor", "--json")

    by_name = {finding["what"]: finding for finding in said.json}
    assert said.code == 1
    assert not by_name["npm"]["ok"]
    assert "install node" in by_name["npm"]["advice"]
    assert by_name["python"]["ok"]
    assert all(finding["advice"] for finding in said.json if not finding["ok"])


def test_doctor_checks_python_git_npm_and_cache_and_exits_with_1_if_any_is_missing(say):
    said = say("doctor")

    assert {finding.what for finding in doctor.machine()} >= {"python", "git", "npm", "cache"}
    assert "MISSING" not in said.out or said.code == 1


def test_doctor_lists_request_fields_unknown_to_the_gateway(say, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "broken").mkdir()
    lines = [{"unknown": {"frobnicate": 2}}, {"unknown": {}}, {"unknown": {"frobnicate": 1}}]
    (tmp_path / "one" / "summary.json").write_text(json.dumps({"sessions": lines}))
    (tmp_path / "broken" / "summary.json").write_text("{")

    (finding,) = doctor.requests(tmp_path)

    assert finding.found == "3 frobnicate"
    assert doctor.requests(tmp_path / "none") == []
    assert finding.what in say("doctor", "--runs", tmp_path).out


def test_doctor_probes_an_engine_and_fails_if_it_is_unreachable(say, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"conversations": [{"turns": [{"content": "x"}]}]}))

    good = say("doctor", "--engine", f"scripted:{tmp_path / 's.json'}", "--json")
    gone = say("doctor", "--engine", "http://127.0.0.1:9", "--json")

    assert good.code == 0
    assert {"context length"} <= {finding["what"] for finding in good.json}
    assert gone.code == 1
    assert "127.0.0.1:9" in json.dumps(gone.json)


def test_doctor_ends_at_an_engine_that_takes_connections_and_never_answers(say, monkeypatch):
    monkeypatch.setattr(doctor, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = say("doctor", "--engine", url, "--tokenizer", "builtin", "--json")

    assert said.code == 1
    found = {one["what"]: one["found"] for one in said.json}
    assert found["engine"] == f"{url} did not answer within 0.5 s; does it hang?"


def test_doctor_of_tasks_and_an_engine_checks_both(say, tmp_path):
    named = "task_id = 't'\ninstruction = 'x'\nagent = {harness = 'command', command = 'true'}\n"
    (tmp_path / "t.toml").write_text(named + "runtime = {backend = 'local'}\n")

    said = say("doctor", tmp_path / "t.toml", "--engine", "http://127.0.0.1:9", "--json")

    assert [(finding["what"], finding["ok"]) for finding in said.json] == [
        ("agent of t", False),
        ("engine", False),
    ]


def test_doctor_probes_each_replica_and_fails_if_models_differ_or_a_replica_is_down(say, tmp_path):
    for name, model in (("a", "m"), ("b", "m"), ("c", "n")):
        turns = {"conversations": [{"turns": [{"content": "x"}]}], "model": model}
        (tmp_path / name).write_text(json.dumps(turns))
    a, b, c = (("--engine", f"scripted:{tmp_path / name}") for name in "abc")
    gone = ("--engine", "http://127.0.0.1:9")

    alike, unlike = say("doctor", *a, *b, "--json"), say("doctor", *a, *c, "--json")
    fewer = say("doctor", *a, *gone, "--json")

    assert alike.json[-1]["what"] == "replicas"
    assert (alike.code, alike.json[-1]["ok"]) == (0, True)
    assert any(finding["what"].startswith(a[1]) for finding in alike.json)
    assert (unlike.code, unlike.json[-1]["ok"]) == (1, False)
    assert "one model" in unlike.json[-1]["advice"]
    assert fewer.code == 1
    assert fewer.json[-1]["found"] == "1 of 2 answer"


def test_local_runtime_passes_the_conformance_checks_of_doctor(say):
    said = say("doctor", "--runtime", "local", "--json")

    assert said.code == 0
    assert len(said.json) > 10


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"conversations": [{"turns": [{"content": "x " * 40}]}]}))
    return f"scripted:{path}"


def reported(said):
    return {finding["what"]: finding for finding in said.json}


def test_a_scripted_engine_renders_as_the_gateway_does(say, script):
    said = say("doctor", "--engine", script, "--json")
    assert said.code == 0
    assert reported(said)["rendering"]["found"] == "7 of 7 alike"


def test_doctor_cannot_recompute_logprobs_without_model_weights_on_this_machine(say, script):
    said = say("doctor", "--engine", script, "--logprobs", "--json")
    finding = reported(said)["recomputed logprobs"]
    assert (said.code, finding["ok"]) == (1, False)
    assert "on this machine" in finding["advice"]


@pytest.mark.timeout(180)  # torch is imported in this process
def test_the_embedded_engines_logprobs_are_those_of_a_plain_forward_pass(say, tmp_path):
    folder = save_model(tmp_path / "model", "qwen3")
    said = say("doctor", "--engine", f"embedded:{folder}", "--logprobs", "--json")
    finding = reported(said)["recomputed logprobs"]
    assert finding["ok"], finding
    assert "from a plain forward pass" in finding["found"]


async def test_doctor_compares_the_rendering_of_an_sglang_server_with_the_gateway():
    async with SglangServer(scripted_engine([{"content": "x"}])) as server:
        engine = SglangEngine(server.url)
        info = await engine.start()
        found = {one.what: one async for one in compare(engine, info, None, logprobs=False)}
        await engine.aclose()
    assert found["tokenizer"].found == "the engine's"
    assert "of 7 alike" in found["rendering"].found


async def test_doctor_reports_parsers_and_template_of_a_vllm_server():
    async with EngineServer(scripted_engine([{"content": "x"}])) as server:
        engine = VllmEngine(server.url)
        info = await engine.start()
        found = {one.what: one async for one in compare(engine, info, None, logprobs=False)}
        await engine.aclose()
    assert found["parsers"].found == "reasoning not seen, tools yes"
    assert found["engine's template"].found == "it reports prompts, the same as its chat route's"


async def test_doctor_without_a_tokenizer_asks_for_one_and_compares_nothing():
    from dataclasses import replace

    engine = scripted_engine([{"content": "x"}])
    info = replace(await engine.start(), tokenizer_dir=None)
    (finding,) = [one async for one in compare(engine, info, None, logprobs=True)]
    assert "give --tokenizer" in finding.found
    folder = str(builtin_tokenizer_dir() / "gone")
    (finding,) = [one async for one in compare(engine, info, folder, logprobs=True)]
    assert not finding.ok
