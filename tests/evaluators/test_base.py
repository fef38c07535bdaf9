import pytest

from bridle.config import Settings
from bridle.errors import ConfigError
from bridle.evaluators.base import Evaluation, parse_config


class Own(Settings):
    depth: int


def test_a_config_becomes_the_evaluators_own_settings():
    assert parse_config({"depth": 3}, Own, "own").depth == 3


def test_the_wrong_field_is_named_with_what_was_given():
    with pytest.raises(ConfigError, match=r"evaluator\.config of 'own': depth: .*'deep'"):
        parse_config({"depth": "deep"}, Own, "own")


def test_an_evaluation_is_a_reward_and_nothing_more_by_default():
    assert Evaluation(0.5) == Evaluation(0.5, None, {})
