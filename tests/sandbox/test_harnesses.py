"""Real programs, from npm and from PyPI, in an image that has a shell and little else."""

import asyncio

import pytest
from tests.harnesses.made import write_pi
from tests.harnesses.test_real_runs import turns
from tests.node.house import a_node, checked, task
from tests.sandbox.images import bare_spec_of, import_image
from tests.sandbox.rootfs import make_rootfs

from bridle.cli.harness import check_harness
from bridle.config import AgentSpec, RuntimeSpec
from bridle.harnesses import default_agent

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

BARE = "! type -P python3 node && ! ls /usr/lib/*/libstdc++* /lib/*/libstdc++* 2>/dev/null"
"""That nothing in the image could run them."""


@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
async def test_a_harness_runs_with_its_own_interpreter_in_an_image_without_one(
    name, backend, tmp_path
):
    spec = RuntimeSpec(**await asyncio.to_thread(bare_spec_of, backend, tmp_path))
    made = task(
        budgets={"init_s": 60, "agent_s": 300},
        runtime=spec,
        evaluator=checked(f'test "$(cat out.txt)" = done && {BARE}'),
    )
    made = made.model_copy(update={"agent": AgentSpec(harness=name)})
    async with a_node(tmp_path, *turns(name, "echo done > out.txt", "cat out.txt")) as node:
        result = await node.run(made)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    assert result.metadata["limits"] in {"kernel", "watched"}
    assert result.trajectory.metadata["stats"]["exchanges"] == 3


def test_check_harness_runs_the_harness_version_installed_in_the_image(
    backend, tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_RUNTIME", "bubblewrap")
    root = make_rootfs(tmp_path / "rootfs", large=True)
    write_pi(root / "usr/local/bin")
    image = str(root) if backend == "bubblewrap" else import_image(root, "bridle-test:pi")

    report = check_harness("pi", "image", image=image)

    assert report["works"], report
    assert report["version"] == "9.9.9 image (unlocked)"
    assert report["unknown to the gateway"] == {"pi_says": 3}


async def test_a_function_agent_runs_in_a_sandbox_with_bridle_s_python(tmp_path):
    made = task(runtime=RuntimeSpec(backend="bubblewrap"), evaluator=checked())
    made = made.model_copy(update={"agent": default_agent("function")})
    async with a_node(tmp_path) as node:
        result = await node.run(made)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
