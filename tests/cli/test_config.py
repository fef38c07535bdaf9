"""The config file, and the engines and renderers that it or flags name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridle.cli.config import (
    default_tokenizer,
    load_config,
    open_replicas,
    open_setup,
)
from bridle.engines.pool_replica import RoutingSettings
from bridle.errors import ConfigError

FILE = """
engines = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
tokenizer = "builtin"

[gateway]
port = 9000
retry_grace_s = 3

[routing]
load_factor = 2.0
patience_s = 5

[models.judge]
engines = ["http://10.0.0.3:8000"]
match = ["gpt-4o*"]

[models."claude-haiku-*"]
kinds = ["side"]
sampling = {temperature = {mode = "override", value = 0}}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "bridle.toml"
    file.write_text(FILE)
    return file


def test_config_file_sets_engines_gateway_routing_and_models(path):
    config = load_config(path)
    assert config.engines == ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
    assert (config.gateway.port, config.gateway.retry_grace_s) == (9000, 3)
    assert (config.routing.load_factor, config.routing.patience_s) == (2.0, 5)
    assert list(config.models) == ["judge", "claude-haiku-*"]
    assert config.models["judge"].match == ("gpt-4o*",)


def test_environment_variables_override_the_file_and_flags_override_variables(path, monkeypatch):
    monkeypatch.setenv("BRIDLE_GATEWAY__PORT", "9001")
    monkeypatch.setenv("BRIDLE_GATEWAY__HOST", "10.0.0.9")
    monkeypatch.setenv("BRIDLE_EXECUTOR__RAY__ADDRESS", "head:6379")
    monkeypatch.setenv("BRIDLE_ENGINES", '["http://10.0.0.7:8000"]')
    monkeypatch.setenv("BRIDLE_TOKENIZER", "Qwen/Qwen3-4B")
    monkeypatch.setenv("BRIDLE_SERVER", "http://127.0.0.1:8080")  # of the client, not a table

    config = load_config(path, gateway={"port": 9002})

    assert (config.gateway.port, config.gateway.host) == (9002, "10.0.0.9")
    assert config.gateway.retry_grace_s == 3, "the file's"
    assert config.executor.ray.address == "head:6379"
    assert config.engines == ("http://10.0.0.7:8000",)
    assert config.tokenizer == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("GATEWAY__RETRY_GRACE", r"gateway\.retry_grace: .*did you mean 'retry_grace_s'"),
        ("GATWAY__PORT", r"gatway: .*did you mean 'gateway'"),
        ("TOKENIZER__DIR", r"tokenizer: Input should be a valid string"),
    ],
)
def test_an_environment_variable_of_an_unknown_key_is_refused_with_a_suggestion(
    path, monkeypatch, variable, said
):
    monkeypatch.setenv(f"BRIDLE_{variable}", "1")

    with pytest.raises(ConfigError, match=f"variables .*{said}"):
        load_config(path)


def test_the_error_for_a_misspelt_token_does_not_show_it(path, monkeypatch):
    monkeypatch.setenv("BRIDLE_GATEWAY__CONTROL_TOKN", "hush")

    with pytest.raises(ConfigError, match="did you mean 'control_token'") as raised:
        load_config(path)
    assert "hush" not in str(raised.value)


def test_flags_override_the_config_file_and_absent_flags_do_not(path):
    config = load_config(
        path, engines=["scripted:x"], tokenizer="dir", gateway={"port": 1, "host": None}
    )
    assert (config.engines, config.tokenizer) == (("scripted:x",), "dir")
    assert (config.gateway.port, config.gateway.retry_grace_s) == (1, 3)
    assert config.gateway.host == "127.0.0.1"


def test_flags_alone_make_a_config_without_a_file():
    config = load_config(None, engines=["scripted:x"], gateway={"stream": "live"})
    assert (config.gateway.stream, config.models) == ("live", {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no engine"),
        ('engines = ["x"]\n[routing]\nstick = true', "routing.stick"),
        ('engines = ["x"]\n[models.a]\nkinds = ["agents"]', "models.a.kinds"),
        ('engines = ["x"]\ngateway = 3', "gateway"),
        ("engines = [", "bridle.toml"),
    ],
)
def test_an_invalid_config_file_is_refused_with_the_fault(tmp_path, text, named):
    file = tmp_path / "bridle.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_config(file)


def test_config_file_of_the_routing_guide_loads(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "routing.md"
    (text,) = re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL)
    file = tmp_path / "bridle.toml"
    file.write_text(text)
    config = load_config(file)
    assert len(config.engines) == 2
    assert list(config.models) == ["judge", "claude-haiku-*", "quiet"]


def test_routing_guide_documents_every_routing_key():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "routing.md"
    assert not [key for key in RoutingSettings.model_fields if f"`{key}`" not in guide.read_text()]


def test_default_tokenizer_depends_on_the_kind_of_engine():
    assert default_tokenizer("scripted:x.json") == "builtin"
    assert default_tokenizer("embedded:/models/m") == "/models/m"
    assert default_tokenizer("http://127.0.0.1:8000") is None


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"conversations": [{"turns": [{"content": "x"}]}]}))
    return f"scripted:{path}"


def names(pool):
    return [one["name"] for one in pool.replicas()]


def test_an_in_process_engine_may_be_listed_twice_but_an_engine_url_only_once(script):
    assert names(open_replicas([script, script], "builtin")) == [script, f"{script}#2"]
    with pytest.raises(ConfigError, match="two replicas"):
        open_replicas(["http://127.0.0.1:9", "http://127.0.0.1:9"], None)
    with pytest.raises(ConfigError, match="two replicas"):
        open_replicas(["http://127.0.0.1:9", "http://127.0.0.1:9/"], None)


def test_setup_opens_replicas_and_models_of_the_config(script, tmp_path):
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
    parts = open_setup(load_config(file))
    assert names(parts.engine) == [script]
    assert parts.engine.settings.slack == 3
    judge, hosted, greedy = parts.models
    assert (judge.engine is not None, judge.renderer is not None) == (True, True)
    assert (hosted.engine is not None, hosted.renderer is None) == (True, True)
    assert greedy.engine is None


def test_a_template_family_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    path = tmp_path / "bridle.toml"
    path.write_text("engines = ['scripted:gone.json']\n[rendering]\nfamily = 'qwen9'\n")
    with pytest.raises(ConfigError, match=r"(?s)family 'qwen9'.*qwen3"):
        open_setup(load_config(path))


def test_a_models_entry_without_settings_is_refused(script, tmp_path):
    file = tmp_path / "bridle.toml"
    file.write_text(f'engines = ["{script}"]\n[models.idle]\n')
    with pytest.raises(ConfigError, match=r"models\.idle: give"):
        open_setup(load_config(file))


def test_an_unknown_engine_is_refused_by_name():
    with pytest.raises(ConfigError, match="unknown engine"):
        open_setup(load_config(None, engines=["magic:thing"]))


def test_a_missing_model_folder_is_reported_once():
    with pytest.raises(ConfigError, match=r"^model folder gone does not exist$"):
        open_setup(load_config(None, engines=["embedded:gone"]))


def test_a_served_engine_without_tokenizer_is_refused_with_the_flag_to_give():
    with pytest.raises(ConfigError, match="--tokenizer"):
        open_setup(load_config(None, engines=["http://127.0.0.1:9"]))
