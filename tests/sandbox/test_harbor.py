"""Harbor's task folders as they are, with a real daemon: each Dockerfile is built and scored in."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from tests.node.house import a_node
from tests.sandbox.images import put_image

from bridle.datasets.jsonl import load_tasks
from bridle.node.local import LocalExecutor
from bridle.runtimes.docker import docker

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "harbor-tasks"


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The example set on the suite's image, because no registry is asked."""
    folder = tmp_path_factory.mktemp("harbor") / "tasks"
    shutil.copytree(EXAMPLES, folder)
    for dockerfile in folder.glob("*/environment/Dockerfile"):
        text = re.sub(r"(?m)^FROM .*$", f"FROM {put_image()}", dockerfile.read_text())
        dockerfile.write_text(text)
    return folder


async def ran(tmp_path, tasks):
    async with a_node(tmp_path) as node, LocalExecutor(node).run(tasks) as results:
        return [result async for result in results]


@pytest.mark.parametrize(("harness", "reward"), [("oracle", 1.0), ("empty", 0.0)])
async def test_every_harbor_task_is_built_and_rewards_the_solution_1_and_no_work_0(
    examples, tmp_path, harness, reward
):
    overrides = {"agent": {"harness": harness}, "runtime": {"backend": "docker"}}
    tasks = await asyncio.to_thread(load_tasks, examples, overrides=overrides)
    results = await ran(tmp_path, tasks)
    wrong = [(each.task_id, each.error) for each in results if each.reward != reward]
    assert (len(results), wrong) == (24, [])


async def test_a_dockerfile_that_cannot_be_built_gives_cause_infrastructure(examples, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(next(examples.glob("count-*")), folder)
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(f"FROM {put_image()}\nRUN exit 9\n")
    overrides = {"agent": {"harness": "oracle"}, "runtime": {"backend": "docker"}}
    tasks = await asyncio.to_thread(load_tasks, folder, overrides=overrides)
    (result,) = await ran(tmp_path, tasks)
    assert (result.status, result.cause, result.reward) == ("ERROR", "infrastructure", None)
    assert "exit 9" in (result.error or "")
    assert "exit 9" not in await docker(["ps", "--all", "--format", "{{.Command}}"])
