"""The example set in Harbor's format is sound: the solution is worth 1, doing nothing 0."""

from pathlib import Path

import pytest
from tests.node.house import a_node

from bridle.datasets.jsonl import load_tasks

EXAMPLES = Path(__file__).parents[2] / "examples" / "harbor-tasks"


@pytest.fixture
def script(load_script):
    return load_script("make_harbor_tasks")


async def rewards(tmp_path, harness, backend, *, every=1):
    """Status and reward of each task in turn."""
    overrides = {"agent": {"harness": harness}, "runtime": {"backend": backend}}
    tasks = load_tasks(EXAMPLES, overrides=overrides)[::every]
    async with a_node(tmp_path) as node:
        results = [await node.run(task) for task in tasks]
    return [(str(result.status), result.reward) for result in results]


@pytest.mark.parametrize(("harness", "reward"), [("oracle", 1.0), ("empty", 0.0)])
async def test_a_harbor_task_of_each_kind_rewards_the_solution_1_and_no_work_0(
    script, tmp_path, harness, reward
):
    found = await rewards(tmp_path, harness, "local", every=3)
    assert found == [("COMPLETED", reward)] * len(script.MAKERS)


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("harness", "reward"), [("oracle", 1.0), ("empty", 0.0)])
async def test_every_harbor_task_rewards_the_solution_1_and_no_work_0_in_a_sandbox(
    script, tmp_path, harness, reward
):
    found = await rewards(tmp_path, harness, "bubblewrap")
    assert found == [("COMPLETED", reward)] * len(script.harbor_examples())


def test_generated_harbor_tasks_are_20_or_more_and_determined_by_the_seed(script):
    examples = script.harbor_examples()
    assert len({(example.kind, example.name) for example in examples}) == len(examples) >= 20
    assert examples == script.harbor_examples()
    assert examples != script.harbor_examples(seed=1)


def test_the_shipped_harbor_tasks_equal_the_generated_ones(script, tmp_path):
    for example in script.harbor_examples():
        script.write_example(example, tmp_path)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    shipped = {p.relative_to(EXAMPLES): p.read_bytes() for p in EXAMPLES.rglob("*") if p.is_file()}
    shipped.pop(Path("README.md"))
    assert shipped == made
