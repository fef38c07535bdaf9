"""Evaluators: session -> reward, after the harness is dead.

The contract is `base`. `command` runs a command or a Harbor task's tests, `patch` tests what the
agent changed, `function` calls a Python function, `judge` asks a model, and `composite` puts others
together. An evaluator's own failure is an exception, never a reward of 0.

Programs that run elsewhere and know nothing of Bridle: `function_runner`, `swebench_runner`,
`run_pytest`, and `summary`, which reads what pytest printed.
"""

from bridle.config import EvaluatorSpec
from bridle.evaluators.base import Evaluator, EvaluatorClass
from bridle.plugins import load

EVALUATORS = {
    "command": "bridle.evaluators.command:CommandEvaluator",
    "composite": "bridle.evaluators.composite:CompositeEvaluator",
    "function": "bridle.evaluators.function:FunctionEvaluator",
    "harbor": "bridle.evaluators.command:HarborEvaluator",
    "judge": "bridle.evaluators.judge:JudgeEvaluator",
    "session_completed": "bridle.evaluators.base:SessionCompleted",
    "swebench": "bridle.evaluators.patch:SwebenchEvaluator",
    "test_on_output": "bridle.evaluators.patch:TestOnOutput",
}
"""Short name -> `module:Class`; any other `package.module:Class` works too."""


def open_evaluator(spec: EvaluatorSpec) -> Evaluator:
    """Return the evaluator that a task names; `ConfigError` names what is unknown or wrong."""
    kind: EvaluatorClass = load(spec.strategy, EVALUATORS, what="evaluator")
    return kind.from_config(spec.config)
