"""`bridle doctor`: the machine, an engine, a runtime."""

import json

from bridle.cli import doctor


def test_every_finding_that_is_not_ok_says_what_to_do(say, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    said = say("doctor", "--json")

    by_name = {finding["what"]: finding for finding in said.json}
    assert said.code == 1
    assert not by_name["npm"]["ok"]
    assert "install node" in by_name["npm"]["advice"]
    assert by_name["python"]["ok"]
    assert all(finding["advice"] for finding in said.json if not finding["ok"])


def test_a_machine_with_all_of_it_is_well(say):
    said = say("doctor")

    assert {finding.what for finding in doctor.machine()} >= {"python", "git", "npm", "cache"}
    assert "MISSING" not in said.out or said.code == 1


def test_what_requests_held_that_the_gateway_does_not_know_is_named(say, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "broken").mkdir()
    lines = [{"unknown": {"frobnicate": 2}}, {"unknown": {}}, {"unknown": {"frobnicate": 1}}]
    (tmp_path / "one" / "summary.json").write_text(json.dumps({"sessions": lines}))
    (tmp_path / "broken" / "summary.json").write_text("{")

    (finding,) = doctor.requests(tmp_path)

    assert finding.found == "3 frobnicate"
    assert doctor.requests(tmp_path / "none") == []
    assert finding.what in say("doctor", "--runs", tmp_path).out


def test_an_engine_is_probed(say, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"conversations": [{"turns": [{"content": "x"}]}]}))

    good = say("doctor", "--engine", f"scripted:{tmp_path / 's.json'}", "--json")
    gone = say("doctor", "--engine", "http://127.0.0.1:9", "--json")

    assert good.code == 0
    assert {"context length"} <= {finding["what"] for finding in good.json}
    assert gone.code == 1
    assert "127.0.0.1:9" in json.dumps(gone.json)


def test_replicas_are_probed_one_by_one_and_held_against_each_other(say, tmp_path):
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


def test_the_local_runtime_conforms(say):
    said = say("doctor", "--runtime", "local", "--json")

    assert said.code == 0
    assert len(said.json) > 10
