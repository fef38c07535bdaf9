"""From the words of a command line to engine and renderer."""

import pytest

from bridle.cli.parts import default_tokenizer, open_parts
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
