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
async def test_one_task_of_each_kind_is_worth_its_harness(script, tmp_path, harness, reward):
    found = await rewards(tmp_path, harness, "local", every=3)
    assert found == [("COMPLETED", reward)] * len(script.MAKERS)


@pytest.mark.sandbox
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("harness", "reward"), [("oracle", 1.0), ("empty", 0.0)])
async def test_every_task_is_worth_its_harness_in_a_sandbox(script, tmp_path, harness, reward):
    found = await rewards(tmp_path, harness, "bubblewrap")
    assert found == [("COMPLETED", reward)] * len(script.harbor_examples())


def test_the_set_is_large_and_the_same_for_the_same_seed(script):
    examples = script.harbor_examples()
    assert len({(example.kind, example.name) for example in examples}) == len(examples) >= 20
    assert examples == script.harbor_examples()
    assert examples != script.harbor_examples(seed=1)


def test_the_shipped_set_is_what_the_generator_makes(script, tmp_path):
    for example in script.harbor_examples():
        script.write_example(example, tmp_path)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    shipped = {p.relative_to(EXAMPLES): p.read_bytes() for p in EXAMPLES.rglob("*") if p.is_file()}
    shipped.pop(Path("README.md"))
    assert shipped == made
