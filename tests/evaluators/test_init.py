import pytest

from bridle.config import EvaluatorSpec
from bridle.errors import ConfigError
from bridle.evaluators import EVALUATORS, open_evaluator
from bridle.evaluators.base import SessionCompleted
from bridle.types import JSON

CONFIGS: dict[str, JSON] = {
    "command": {"command": "true"},
    "composite": {"parts": [{"strategy": "session_completed"}]},
    "function": {"function": "package.module:score"},
    "harbor": {},
    "judge": {"rubric": "good?", "model": "grader", "on_failure": "error"},
    "session_completed": {},
    "swebench": {"instance": {}},
    "test_on_output": {"command": "true", "fail_to_pass": ["t"]},
}


@pytest.mark.parametrize("name", sorted(EVALUATORS))
def test_every_evaluator_name_in_the_table_opens(name):
    spec = EvaluatorSpec(strategy=name, config=CONFIGS[name])
    assert callable(open_evaluator(spec).evaluate)


def test_a_custom_evaluator_is_found_by_its_dotted_path():
    spec = EvaluatorSpec(strategy="bridle.evaluators.base:SessionCompleted")
    assert isinstance(open_evaluator(spec), SessionCompleted)


def test_an_unknown_evaluator_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"unknown evaluator 'comand'; known: command, "):
        open_evaluator(EvaluatorSpec(strategy="comand"))


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("command", {}, r"evaluator\.config of 'command': command: Field required"),
        ("command", {"command": "true", "timeout_s": 0}, "timeout_s"),
        ("session_completed", {"rewrad": 1}, "rewrad"),
    ],
)
def test_an_invalid_evaluator_config_is_refused_with_the_field(name, config, named):
    with pytest.raises(ConfigError, match=named):
        open_evaluator(EvaluatorSpec(strategy=name, config=config))
