from typing import Any

import pytest

from bridle.engines import ENGINES, open_engine
from bridle.engines.vllm import VllmEngine
from bridle.errors import ConfigError
from bridle.plugins import load
from bridle.scripted.engine import ScriptedEngine


class OwnEngine:
    """A user's engine: made by calling it with the target."""

    def __init__(self, target):
        self.target = target


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.json"
    path.write_text('{"conversations": [{"turns": [{}]}]}')
    return path


def test_short_forms_make_engines(script):
    assert isinstance(open_engine(f"scripted:{script}"), ScriptedEngine)
    assert isinstance(open_engine(f"scripted:{script}", tokenizer="builtin"), ScriptedEngine)
    assert isinstance(open_engine("http://127.0.0.1:8000/v1"), VllmEngine)
    assert isinstance(open_engine("https://engine.example"), VllmEngine)


def test_every_registered_engine_can_be_loaded():
    for name in ENGINES:
        assert callable(load(name, ENGINES, what="engine"))


def test_an_engine_of_your_own_is_made_from_its_dotted_path():
    made: Any = open_engine("tests.engines.test_init:OwnEngine:some:target")
    assert made.target == "some:target"


@pytest.mark.parametrize("spec", ["", "scripted", "vllm:x", "gpt-4", "some.module:x.py"])
def test_an_unknown_engine_spec_is_an_error_that_names_the_known_forms(spec):
    with pytest.raises(ConfigError, match=r"scripted:FILE, embedded:DIR|cannot be loaded"):
        open_engine(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "http://127.0.0.1:99999",
        "http://",
        "http://[::1",
        "sglang:127.0.0.1:30000",
        "openai:api.example/v1",
        "openai:http://127.0.0.1:99999#model",
    ],
)
def test_an_engine_whose_url_is_not_one_of_a_server_is_refused(spec):
    with pytest.raises(ConfigError, match="give http://HOST:PORT or https://HOST"):
        open_engine(spec)


def test_the_password_in_a_wrong_url_of_an_engine_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        open_engine("http://name:secret@127.0.0.1:99999")
    assert "secret" not in str(caught.value)


def test_an_engine_without_its_script_is_refused():
    with pytest.raises(ConfigError, match="engine 'scripted:' names no file or folder"):
        open_engine("scripted:")


def test_a_missing_script_or_tokenizer_is_named(script, tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        open_engine(f"scripted:{tmp_path / 'gone.json'}")
    with pytest.raises(ConfigError, match="no such folder"):
        open_engine(f"scripted:{script}", tokenizer=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone does not exist"):
        open_engine(f"embedded:{tmp_path / 'gone'}")
