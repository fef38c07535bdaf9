"""Evaluators: session -> reward, after the harness is dead.

The contract is `base`; every other evaluator is one file. An evaluator's own failure is an
exception, never a reward of 0.
"""

from bridle.config import EvaluatorSpec
from bridle.evaluators.base import Evaluator, EvaluatorClass
from bridle.plugins import load

EVALUATORS = {
    "command": "bridle.evaluators.command:CommandEvaluator",
    "composite": "bridle.evaluators.composite:CompositeEvaluator",
    "function": "bridle.evaluators.function:FunctionEvaluator",
    "harbor": "bridle.evaluators.harbor:HarborEvaluator",
    "judge": "bridle.evaluators.judge:JudgeEvaluator",
    "session_completed": "bridle.evaluators.base:SessionCompleted",
    "swebench": "bridle.evaluators.swebench:SwebenchEvaluator",
    "test_on_output": "bridle.evaluators.test_on_output:TestOnOutput",
}
"""Short name -> `module:Class`; any other `package.module:Class` works too."""


def open_evaluator(spec: EvaluatorSpec) -> Evaluator:
    """Return the evaluator that a task names; `ConfigError` names what is unknown or wrong."""
    kind: EvaluatorClass = load(spec.strategy, EVALUATORS, what="evaluator")
    return kind.from_config(spec.config)
