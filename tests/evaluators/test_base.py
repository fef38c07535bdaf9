import pytest

from bridle.config import Settings
from bridle.errors import ConfigError
from bridle.evaluators.base import Evaluation, parse_config


class Own(Settings):
    depth: int


def test_parse_config_returns_the_settings_type_of_the_evaluator():
    assert parse_config({"depth": 3}, Own, "own").depth == 3


def test_config_error_names_the_field_and_the_given_value():
    with pytest.raises(ConfigError, match=r"evaluator\.config of 'own': depth: .*'deep'"):
        parse_config({"depth": "deep"}, Own, "own")


def test_evaluation_defaults_have_no_trace_rewards_and_empty_metadata():
    assert Evaluation(0.5) == Evaluation(0.5, None, {})
