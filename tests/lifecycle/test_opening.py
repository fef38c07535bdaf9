import os
import re

import pytest
from tests.lifecycle.house import AGENT, a_node, checked, statuses, task

from bridle.config import Action, RuntimeSpec
from bridle.types import Cause


async def test_the_harness_gets_its_own_session_and_nothing_else_of_ours(tmp_path):
    os.environ["BRIDLE_CONTROL_TOKEN"] = "control"
    try:
        async with a_node(tmp_path) as node:
            command = f"env > env.txt; cp env.txt $HOME/..; {AGENT}"
            evaluator = checked("cat env.txt")
            spec = {"env": {"MINE": "1"}}
            result = await node.run(task(command, evaluator=evaluator, agent=spec))
    finally:
        del os.environ["BRIDLE_CONTROL_TOKEN"]
    seen = result.metadata["evaluation"]["output"]
    assert f"/s/{result.session_id}/v1" in seen
    assert "MINE=1" in seen
    assert "control" not in seen


@pytest.mark.parametrize(
    ("prepare", "budget_s", "cause", "said"),
    [
        (
            "echo why >&2; exit 4",
            30,
            Cause.INFRASTRUCTURE,
            r"prepare step 0 \(exec\): .*code 4: why",
        ),
        ("sleep 60", 0.3, Cause.TIMEOUT, "init: its budget of 0.3 s ran out"),
    ],
)
async def test_a_runtime_that_cannot_be_made_ready_is_infrastructure(
    tmp_path, prepare, budget_s, cause, said
):
    runtime = RuntimeSpec(prepare=(Action(type="exec", command=prepare),))
    async with a_node(tmp_path) as node:
        result = await node.run(task(runtime=runtime, budgets={"init_s": budget_s}))
        assert statuses(node) == ["REGISTERED", "INITIALIZING", "ERROR"]
    assert (result.status, result.cause) == ("ERROR", cause)
    assert re.search(said, result.error)
    assert result.trajectory.metadata["stats"]["exchanges"] == 0
