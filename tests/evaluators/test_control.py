import asyncio
from dataclasses import replace

import pytest
from tests.evaluators.made import evaluation, trace

from bridle.config import EvaluatorSpec
from bridle.errors import EvaluatorError
from bridle.evaluators import open_evaluator
from bridle.evaluators.base import Evaluation, Unscorable, evaluate_with_control


async def scored(context, strategy, budget_s=30.0, **config):
    evaluator = open_evaluator(EvaluatorSpec(strategy=strategy, config=config))
    return await evaluate_with_control(evaluator, replace(context, budget_s=budget_s))


OF_FILE = "tests.evaluators.scoring:of_file"
BAD = "if [ -e bad ]; then {}; fi; true"


@pytest.mark.parametrize(
    ("strategy", "config", "why"),
    [
        ("command", {"command": BAD.format("exit 127")}, "exit code 127"),
        ("command", {"command": BAD.format("kill -9 $$")}, "signal 9"),
        ("command", {"command": BAD.format("sleep 60"), "timeout_s": 0.5}, "within 0.5 s"),
        (
            "command",
            {
                "command": "if [ -e bad ]; then echo NaN; else echo 0; fi > reward.txt",
                "reward_file": "reward.txt",
            },
            "finite number",
        ),
        ("function", {"function": OF_FILE, "files": ["answer.txt"]}, "ValueError"),
    ],
)
async def test_an_evaluator_failure_caused_by_the_agent_s_files_makes_the_session_unscorable(
    tmp_path, strategy, config, why
):
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec("touch bad; echo much > answer.txt")
        with pytest.raises(Unscorable, match=why):
            await scored(context, strategy, **config)


@pytest.mark.parametrize(
    ("strategy", "config", "why"),
    [
        ("command", {"command": "no-such-checker"}, "exit code 127"),
        ("command", {"command": "sleep 60", "timeout_s": 0.2}, "within 0.2 s"),
        ("command", {"command": "true", "reward_file": "reward.txt"}, "left no reward.txt"),
        ("function", {"function": "tests.evaluators.scoring:broken"}, "ValueError"),
    ],
)
async def test_a_failure_that_recurs_on_the_untouched_work_folder_is_an_evaluator_error(
    tmp_path, strategy, config, why
):
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec("touch bad")
        with pytest.raises(EvaluatorError, match=why) as caught:
            await scored(context, strategy, **config)
    assert not isinstance(caught.value, Unscorable)
    assert "untouched work folder" in str(caught.value)


class Failing:
    """An evaluator that fails as `errors` say, one after the other, and then gives 1.0."""

    def __init__(self, *errors, control="whole"):
        self.errors = list(errors)
        self.control = control
        self.traces = []

    async def evaluate(self, context):
        self.traces.append(len(context.trajectory.traces))
        if self.errors:
            raise self.errors.pop(0)
        return Evaluation(1.0)


async def test_an_evaluator_without_control_fails_at_once_and_the_agent_is_not_blamed(tmp_path):
    failing = Failing(EvaluatorError("the judge is down"), control="none")
    async with evaluation(tmp_path) as context:
        with pytest.raises(EvaluatorError, match=r"the judge is down$") as caught:
            await evaluate_with_control(failing, context)
    assert (type(caught.value), len(failing.traces)) == (EvaluatorError, 1)


async def test_an_unscorable_session_needs_no_control_run(tmp_path):
    failing = Failing(*[Unscorable("a link leads out")] * 2)
    async with evaluation(tmp_path) as context:
        with pytest.raises(Unscorable, match=r"a link leads out$"):
            await evaluate_with_control(failing, context)
    assert len(failing.traces) == 1


async def test_the_control_run_gets_no_traces_of_the_agent(tmp_path):
    failing = Failing(EvaluatorError("unreadable"))
    async with evaluation(tmp_path) as context:
        said = replace(context.trajectory, traces=(trace(("user", "do it"), ("assistant", "?")),))
        with pytest.raises(Unscorable, match="unreadable"):
            await evaluate_with_control(failing, replace(context, trajectory=said))
    assert failing.traces == [1, 0]


async def test_an_evaluation_timeout_caused_by_the_agent_s_files_makes_the_session_unscorable(
    tmp_path,
):
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec("touch bad")
        with pytest.raises(Unscorable, match=r"did not end within its budget of 6 s"):
            await scored(context, "command", 6.0, command=BAD.format("sleep 60"))


async def test_each_part_of_a_composite_is_repeated_alone_on_the_untouched_work_folder(tmp_path):
    gate = {"name": "gate", "strategy": "command", "config": {"command": "test -e bad"}}
    part = {"name": "part", "strategy": "command", "config": {"command": "no-such-checker"}}
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec("touch bad")
        with pytest.raises(EvaluatorError, match=r"part 'part'.*untouched") as caught:
            await scored(context, "composite", parts=[{**gate, "gate": 1.0}, part])
        assert not isinstance(caught.value, Unscorable)


async def test_a_machine_failure_during_the_control_run_is_raised(tmp_path):
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec("touch bad")

        async def gone(_stack):
            raise OSError("the disk is gone")

        places = replace(context.places, make=gone, trusted=True)
        with pytest.raises(OSError, match="the disk is gone"):
            await scored(replace(context, places=places), "command", command=BAD.format("exit 127"))


async def test_eval_prepare_steps_broken_by_the_agent_s_files_make_the_session_unscorable(tmp_path):
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec("touch bad")

        async def prepare(runtime):
            from bridle.errors import RuntimeFailure

            if (await runtime.exec("test -e bad")).ok:
                raise RuntimeFailure("eval_prepare step 0 (exec): exit code 1")

        places = replace(context.places, prepare=prepare)
        with pytest.raises(Unscorable, match="eval_prepare step 0"):
            await scored(replace(context, places=places), "command", command="true")


class Stuck:
    """An evaluator whose own work does not end."""

    async def evaluate(self, context):
        await asyncio.Event().wait()


async def test_an_evaluator_beyond_its_time_budget_is_an_evaluator_error(tmp_path):
    async with evaluation(tmp_path) as context:
        with pytest.raises(EvaluatorError, match="within its budget of") as caught:
            await evaluate_with_control(Stuck(), replace(context, budget_s=0.1))
    assert not isinstance(caught.value, Unscorable)
