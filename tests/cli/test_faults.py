"""Every verb x the mistakes that users make: the documented exit code, one message, no trace."""

import pytest
from tests.cli.test_app import VERBS

DEAD = "http://127.0.0.1:9"

FAULTS = {
    "cancel": (("a", "--server", DEAD), 3),
    "dashboard": (("gone",), 2),
    "demo": (("--tasks", "0"), 2),
    "doctor": (("gone",), 2),
    "engine": (("scripted:gone.json",), 2),
    "export": (("gone", "--format", "sft", "--out", "x.jsonl"), 2),
    "fork": (("gone", "--run", "gone", "--at", "1"), 2),
    "gateway": (("--config", "gone.toml"), 2),
    "generate": (("gone", "--engine", "scripted:gone.json", "--out", "x"), 2),
    "init": (("mine", "--agent", "gone.py"), 2),
    "rebuild": (("gone",), 2),
    "run": (("gone", "--engine", "scripted:gone.json"), 2),
    "score": (("gone", "--reward", "1"), 2),
    "serve": (("--config", "gone.toml"), 2),
    "show": (("gone",), 2),
    "status": (("--server", DEAD), 3),
    "submit": (("gone.jsonl", "--server", DEAD), 2),
    "teach": (("gone", "--teacher", "embedded:gone"), 2),
    "train": (("gone.toml",), 2),
    "watch": (("--server", DEAD), 3),
}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_what_is_not_there_is_named_with_the_documented_code(say, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    arguments, code = FAULTS[verb]
    said = say(verb, *arguments)
    assert said.code == code, said.err
    assert said.err.strip()
    assert "Traceback" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_an_unknown_flag_is_code_2(say, verb):
    said = say(verb, "--no-such-flag")
    assert said.code == 2
    assert "no-such-flag" in said.err
