import json
from dataclasses import replace

import pytest
from tests.evaluators.made import evaluation

from bridle.config import AgentSpec, Task
from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import Unscorable
from bridle.evaluators.function import FunctionEvaluator

SCORING = "tests.evaluators.scoring:"
AGENT = AgentSpec(harness="command", command="true")


def evaluator(name, **config):
    return FunctionEvaluator.from_config({"function": SCORING + name, **config})


async def test_a_function_scores_files_copied_out_of_the_runtime(tmp_path):
    async with evaluation(tmp_path) as context:
        await context.places.agents.write("answer.txt", b"0.25")
        found = await evaluator("of_file", files=["answer.txt", "gone"]).evaluate(context)
    assert found.reward == 0.25
    assert (tmp_path / "logs" / "evaluator.log").read_text() == "looking at t-1\n"


WRITES = {
    # With the `0.0` that the scorer returns it is the number 1.
    "when the scorer has ended": """
import os, time
scorer = os.getppid()
if os.fork() == 0:
    os.setsid()
    stat = f"/proc/{scorer}/stat"
    while os.path.exists(stat) and b") Z " not in open(stat, "rb").read():
        time.sleep(0.001)
    os.write(1, b"1e2")
""",
    "before": "print(1.0, flush=True)",
    "wherever it can": """
import os
for number in os.listdir("/proc/self/fd"):
    try:
        os.write(int(number), b"1")
    except OSError:
        pass
""",
}


@pytest.mark.parametrize("when", WRITES)
async def test_output_of_an_agent_s_program_cannot_forge_the_reward_of_a_function(tmp_path, when):
    async with evaluation(tmp_path) as context:
        await context.places.agents.write("answer.py", WRITES[when].encode())
        found = await evaluator("runs_it", files=["answer.py"]).evaluate(context)
    assert found.reward == 0.0


async def test_an_async_function_may_return_trace_rewards_and_metadata(tmp_path):
    async with evaluation(tmp_path) as context:
        found = await evaluator("of_everything").evaluate(context)
    assert (found.reward, found.trace_rewards) == (0.5, (1.0, 0.0))
    assert found.metadata["given"] == [
        "exit_code", "folder", "instruction", "metadata", "session_id", "stderr", "stdout",
        "task_id", "traces",
    ]  # fmt: skip


async def test_a_function_gets_exit_code_and_stdout_of_the_harness(tmp_path):
    async with evaluation(tmp_path) as context:
        harness = replace(context.harness, exit_code=3, stdout=b"four")
        found = await evaluator("of_harness").evaluate(replace(context, harness=harness))
    assert found.reward == 7.0


@pytest.mark.sandbox
async def test_a_sandboxed_function_scores_and_agent_code_cannot_write_host_files(tmp_path):
    marker = tmp_path / "marker"
    evil = f"""
def of_file(session):
    open({str(marker)!r}, "w").close()
"""
    async with evaluation(tmp_path) as context:
        await context.places.agents.write("answer.txt", b"0.25")
        await context.places.agents.write("tests/evaluators/scoring.py", evil.encode())
        for package in ("tests", "tests/evaluators"):
            await context.places.agents.write(f"{package}/__init__.py", b"")
        found = await evaluator("of_file", files=["answer.txt"], sandbox=True).evaluate(context)
        assert found.reward == 0.25
        spec = context.task.evaluator.model_copy(update={"env": {"PYTHONPATH": "."}})
        task = context.task.model_copy(update={"evaluator": spec})
        attacked = replace(context, task=task)
        with pytest.raises(EvaluatorError, match="marker"):
            await evaluator("of_file", files=["tests"], sandbox=True).evaluate(attacked)
        assert not marker.exists()
        with pytest.raises(EvaluatorError):
            await evaluator("of_file", files=["tests"]).evaluate(attacked)
        assert marker.exists(), "outside, the task's own code ran"


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("broken", {}, r"broken failed \(ValueError\): .*ValueError: do it"),
        ("ends", {}, "ends failed"),
        ("ends_well", {}, "not nothing: it ended its process"),
        ("gone", {}, "has no function 'gone'"),
        ("slow", {"timeout_s": 0.3}, r"slow did not end within 0\.3 s"),
    ],
)
async def test_a_function_that_raises_is_missing_or_times_out_is_an_evaluator_error(
    tmp_path, name, config, why
):
    async with evaluation(tmp_path) as context:
        with pytest.raises(EvaluatorError, match=f"(?s){why}"):
            await evaluator(name, **config).evaluate(context)


@pytest.mark.parametrize(
    "returned", [None, "good", [1], {"score": 1}, {"reward": 1, "trace_rewards": [None]}]
)
async def test_a_return_value_without_a_finite_number_is_an_evaluator_error(tmp_path, returned):
    async with evaluation(tmp_path) as context:
        metadata = {"returns": json.dumps(returned)}
        task = context.task.model_copy(update={"metadata": metadata})
        with pytest.raises(EvaluatorError, match="must return a finite number"):
            await evaluator("no_number").evaluate(replace(context, task=task))


@pytest.mark.parametrize(("returned", "reward"), [(True, 1.0), ({"reward": False}, 0.0), (2, 2.0)])
async def test_booleans_and_integers_returned_by_a_function_become_float_rewards(
    tmp_path, returned, reward
):
    async with evaluation(tmp_path) as context:
        metadata = {"returns": json.dumps(returned)}
        task = context.task.model_copy(update={"metadata": metadata})
        found = await evaluator("no_number").evaluate(replace(context, task=task))
    assert (type(found.reward), found.reward) == (float, reward)


@pytest.mark.parametrize("target", ["/etc/hostname", "answer.txt"])
async def test_a_symbolic_link_in_place_of_a_scored_file_makes_the_session_unscorable(
    tmp_path, target
):
    async with evaluation(tmp_path) as context:
        await context.places.agents.exec(f"ln -s {target} answer.txt")
        with pytest.raises(Unscorable, match=r"answer\.txt cannot be copied for the evaluator"):
            await evaluator("of_file", files=["answer.txt"]).evaluate(context)


WRONG = """
import os

def two(attempt, more):
    return 1

def well(attempt, scale=1.0):
    return float(os.environ.get("SCALE", scale))
"""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("mine.py:two", r"mine\.py: two\(attempt, more\) must take one argument, the attempt"),
        ("mine.py:wel", r"mine\.py has no function 'wel'; did you mean 'well'\?"),
        ("gone.py:score", r"there is no file .*gone\.py"),
        ("broken.py:score", r"broken\.py cannot be imported: SyntaxError"),
        ("no_such_module:score", "no_such_module cannot be imported: ModuleNotFoundError"),
        (SCORING + "gone", "scoring.py has no function 'gone'"),
    ],
)
def test_an_invalid_scorer_function_is_refused_with_its_file_before_the_run(
    tmp_path, function, why
):
    (tmp_path / "mine.py").write_text(WRONG)
    (tmp_path / "broken.py").write_text("def score(attempt)")
    task = Task(task_id="t", instruction="do", agent=AGENT, task_dir=str(tmp_path))
    made = FunctionEvaluator.from_config({"function": function})
    with pytest.raises(ConfigError, match=f"(?s)evaluator.config.function: .*{why}"):
        made.check(task)


async def test_a_function_of_a_file_beside_the_task_scores(tmp_path):
    (tmp_path / "mine.py").write_text(WRONG)
    async with evaluation(tmp_path, env={"SCALE": "0.25"}) as context:
        made = FunctionEvaluator.from_config({"function": "mine.py:well"})
        made.check(context.task.model_copy(update={"task_dir": str(tmp_path)}))
        assert (await made.evaluate(context)).reward == 0.25


@pytest.mark.parametrize(
    "config",
    [
        {"function": "/tmp/score:score"},
        {"function": "score"},
        {"function": "a:b", "files": ["../x"]},
        {"function": "a:b", "files": ["/etc/passwd"]},
    ],
)
def test_function_config_refuses_absolute_or_parent_file_paths_and_module_paths(config):
    with pytest.raises(ConfigError, match=r"evaluator\.config of 'function'"):
        FunctionEvaluator.from_config(config)
