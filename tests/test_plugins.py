"""Names to classes."""

import inspect

import pytest

from bridle.config import AgentSpec, EvaluatorSpec, Task
from bridle.engines import ENGINES, open_engine
from bridle.engines.base import Engine
from bridle.errors import ConfigError
from bridle.evaluators import EVALUATORS, open_evaluator
from bridle.evaluators.base import Evaluator
from bridle.harnesses import CHECKS, HARNESSES, open_harness
from bridle.harnesses.base import Harness
from bridle.plugins import load
from bridle.runtimes import RUNTIMES
from bridle.runtimes.base import Runtime
from bridle.server.settings import SubmissionPolicy

TABLE = {"path": "pathlib:Path"}


def test_a_plugin_is_loaded_by_short_name_or_import_path():
    from pathlib import Path, PurePath

    assert load("path", TABLE, what="thing") is Path
    assert load("pathlib:PurePath", TABLE, what="thing") is PurePath


@pytest.mark.parametrize("name", ["nope", "no.such.module:X", "pathlib:NoSuchClass"])
def test_a_plugin_that_cannot_be_found_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name.split(":")[0]) as caught:
        load(name, TABLE, what="thing")

    assert "thing" in str(caught.value)


CONTRACTS = (
    (Engine, ENGINES),
    (Evaluator, EVALUATORS),
    (Harness, HARNESSES | CHECKS),
    (Runtime, RUNTIMES),
)


def unlike_contract(kind, contract):
    """The methods of a class that cannot be called as its contract's are, each with the reason."""
    found = []
    for name, method in inspect.getmembers(contract, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted, ours = inspect.signature(method), getattr(kind, name, None)
        each = wanted.parameters.values()
        positional = [one for one in each if one.kind is one.POSITIONAL_OR_KEYWORD]
        keywords = {one.name: one for one in each if one.kind is one.KEYWORD_ONLY}
        if ours is None:
            found.append(f"{name} is missing")
            continue
        given = inspect.signature(ours)
        try:
            given.bind(*positional, **keywords)
        except TypeError as error:
            found.append(f"{name}{given}: {error}; its contract is {name}{wanted}")
        if inspect.iscoroutinefunction(ours) != inspect.iscoroutinefunction(method):
            found.append(f"{name}: one of it and its contract is async, the other is not")
    return found


@pytest.mark.parametrize(
    ("contract", "path"),
    [(contract, path) for contract, table in CONTRACTS for path in sorted({*table.values()})],
)
def test_every_class_of_a_table_can_be_called_as_its_contract_says(contract, path):
    assert unlike_contract(load(path, {}, what="class"), contract) == []


def test_a_class_that_breaks_its_contract_is_named_with_the_method_and_the_reason():
    class Wrong:
        async def evaluate(self, session, context): ...

    class Blocking:
        def evaluate(self, context): ...

    [found] = unlike_contract(Wrong, Evaluator)
    assert found.startswith("evaluate(self, session, context): missing a required argument")
    assert unlike_contract(Blocking, Evaluator)[0].startswith("evaluate: one of it and its")
    assert unlike_contract(object, Evaluator) == ["evaluate is missing"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that adds a name of each kind."""
    facts = tmp_path / "my_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[bridle.evaluators]\nmine = my_plugin_module:Mine\n"
        "command = my_plugin_module:Mine\n"
        "[bridle.harnesses]\nmine = my_plugin_module:Mine\n"
        "[bridle.engines]\nmine = my_plugin_module:Mine\n"
    )
    (tmp_path / "my_plugin_module.py").write_text(
        "class Mine:\n"
        "    def __init__(self, given): self.given = given\n"
        "    @classmethod\n"
        "    def from_config(cls, config): return cls(config)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_an_installed_plugin_package_adds_names_and_replaces_no_built_in():
    assert type(open_evaluator(EvaluatorSpec(strategy="mine"))).__name__ == "Mine"
    assert type(open_harness(AgentSpec(harness="mine"))).__name__ == "Mine"
    assert type(open_engine("mine:somewhere")).__name__ == "Mine"
    ours = open_evaluator(EvaluatorSpec(strategy="command", config={"command": "true"}))
    assert type(ours).__name__ == "CommandEvaluator"
    with pytest.raises(ConfigError, match=r"known: .*mine.*"):
        open_evaluator(EvaluatorSpec(strategy="yours"))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("field", ["evaluator.strategy", "agent.harness"])
def test_a_server_refuses_an_installed_plugin_that_its_operator_does_not_trust(field):
    agent = {"harness": "command", "command": "true"}
    task = {"task_id": "t", "instruction": "do", "agent": agent}
    task |= {"agent": {"harness": "mine"}} if field.startswith("agent") else {}
    task |= {"evaluator": {"strategy": "mine"}} if field.startswith("evaluator") else {}
    made = Task.model_validate(task)
    assert field in dict(SubmissionPolicy().refused(made))
    assert field not in dict(SubmissionPolicy(trusted=("mine",)).refused(made))
