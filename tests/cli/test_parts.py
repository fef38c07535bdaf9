"""From the words of a command line to engine and renderer."""

import json

import pytest

from bridle.cli.config import load_config
from bridle.cli.parts import default_tokenizer, open_all, open_parts, open_replicas
from bridle.errors import ConfigError


def test_each_engine_has_the_tokenizer_that_goes_with_it():
    assert default_tokenizer("scripted:x.json") == "builtin"
    assert default_tokenizer("embedded:/models/m") == "/models/m"
    assert default_tokenizer("http://127.0.0.1:8000") is None


def test_a_served_engine_without_tokenizer_is_refused_with_the_flag_to_give():
    with pytest.raises(ConfigError, match="--tokenizer"):
        open_parts("http://127.0.0.1:8000", None)


def test_an_unknown_engine_is_named_before_its_tokenizer_is_missed():
    with pytest.raises(ConfigError, match="unknown engine"):
        open_parts("magic:thing", None)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"conversations": [{"turns": [{"content": "x"}]}]}))
    return f"scripted:{path}"


def names(pool):
    return [one["name"] for one in pool.replicas()]


def test_one_engine_in_this_process_may_be_there_twice_but_a_server_only_once(script):
    assert names(open_replicas([script, script], "builtin")) == [script, f"{script}#2"]
    with pytest.raises(ConfigError, match="two replicas"):
        open_replicas(["http://127.0.0.1:9", "http://127.0.0.1:9"], None)


def test_a_config_becomes_replicas_a_renderer_and_other_models(script, tmp_path):
    file = tmp_path / "bridle.toml"
    file.write_text(
        f"""
engines = ["{script}"]
[routing]
slack = 3
[models.judge]
engines = ["{script}"]
[models.hosted]
engines = ["http://127.0.0.1:9"]
[models.greedy]
sampling = {{temperature = {{mode = "override", value = 0}}}}
"""
    )
    parts = open_all(load_config(file))
    assert names(parts.engine) == [script]
    assert parts.engine.settings.slack == 3
    judge, hosted, greedy = parts.models
    assert (judge.engine is not None, judge.renderer is not None) == (True, True)
    assert (hosted.engine is not None, hosted.renderer is None) == (True, True)
    assert greedy.engine is None


def test_a_model_that_changes_nothing_is_refused(script, tmp_path):
    file = tmp_path / "bridle.toml"
    file.write_text(f'engines = ["{script}"]\n[models.idle]\n')
    with pytest.raises(ConfigError, match=r"models\.idle: needs"):
        open_all(load_config(file))


def test_all_parts_need_a_tokenizer():
    with pytest.raises(ConfigError, match="--tokenizer"):
        open_all(load_config(None, engines=["http://127.0.0.1:9"]))
