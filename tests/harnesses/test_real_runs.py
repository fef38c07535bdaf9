"""The real programs, installed from their registries, through the real gateway: `-m harnesses`."""

import asyncio
import json
import os

import pytest
from tests.node.house import a_node, checked, nothing_lives, task
from tests.real_clients.alone import BACKEND

from bridle.config import AgentSpec, Limits, RuntimeSpec
from bridle.harnesses import open_harness
from bridle.harnesses.bundles import Builder, ensure
from bridle.harnesses.packaged import CHECK_FILE, NODE, node_recipe
from bridle.harnesses.pi import CLI
from bridle.node.local import LocalExecutor
from bridle.node.results import result_from
from bridle.testing import scripted_engine
from bridle.trajectory.result import trajectory_bytes
from bridle.types import Cause

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]

NAMES = ("mini_swe_agent", "pi")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def turns(name, *commands):
    """One shell command a turn, then the program's own way of ending."""
    steps = [{"reasoning": f"Step {i}.", "shell": [line]} for i, line in enumerate(commands)]
    if name == "mini_swe_agent":
        return [*steps, {"content": "Done.", "shell": [SUBMIT]}]
    return [*steps, {"content": "It is done."}]


def real(name, **changes):
    settings = changes.pop("settings", {})
    alone = RuntimeSpec(backend=BACKEND)
    made = task(budgets={"agent_s": 120}, runtime=alone, **changes)
    return made.model_copy(update={"agent": AgentSpec(harness=name, settings=settings)})


def texts(value):
    """All strings in a JSON value, one after another."""
    if isinstance(value, str):
        return value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return " ".join(texts(item) for item in inside)


WORK = ("echo do > out.txt", "cat out.txt && echo ne >> out.txt", "tr -d '\\n' < out.txt > end.txt")


@pytest.mark.parametrize("name", NAMES)
async def test_real_harness_session_is_captured_completely(name, tmp_path):
    spec = checked('test "$(cat end.txt)" = done')
    async with a_node(tmp_path, *turns(name, *WORK)) as node:
        result = await node.run(real(name, evaluator=spec))
        again = result_from(node.store.read(result.session_id))
        assert nothing_lives(result.session_id)
        assert list(node.scratch.folder.glob("*/*")) == []
    assert (result.status, result.error, result.exit_code) == ("COMPLETED", None, 0)
    assert result.reward == 1.0
    stats = result.trajectory.metadata["stats"]
    assert (stats["exchanges"], stats["traces"], stats["merge_ratio"]) == (4, 1, 1.0)
    assert stats["tokens_captured"] == stats["tokens_trained"] > 0
    assert (stats["tokens_excluded"], stats["breaks"]) == ({}, [])
    assert trajectory_bytes(again.trajectory) == trajectory_bytes(result.trajectory)
    assert (tmp_path / "run" / result.logs["stdout"]).stat().st_size > 0


@pytest.mark.parametrize("name", NAMES)
async def test_an_instruction_with_quotes_braces_and_long_text_reaches_the_model_unchanged(
    name, tmp_path
):
    text = (
        "@file --help -- 'quotes' \"$HOME\" `id` {{braces}} {% raw %} \\n ünïcode\nline two"
        + " x" * 90_000
    )
    made = real(name).model_copy(update={"instruction": text})
    engine = scripted_engine(turns(name, "true"), context_length=1_000_000)
    async with a_node(tmp_path, engine=engine) as node:
        result = await node.run(made)
        bodies = node.store.bodies(result.session_id).values()
    assert result.status == "COMPLETED", result.error
    assert any(text in texts(json.loads(body)) for body in bodies)


@pytest.mark.parametrize("name", NAMES)
async def test_a_session_on_a_failing_engine_ends_with_an_infrastructure_error(name, tmp_path):
    settings = {"model_attempts": 1} if name == "mini_swe_agent" else {}
    async with a_node(tmp_path, {"shell": ["true"]}, {"fault": 501}) as node:
        result = await node.run(real(name, settings=settings))
    assert (result.status, result.cause) == ("ERROR", Cause.INFRASTRUCTURE), result.error
    assert result.trajectory.metadata["stats"]["exchanges"] == 1


async def test_pi_that_exits_0_after_an_api_error_is_a_model_error(tmp_path):
    engine = scripted_engine(turns("pi", "seq 30000"), context_length=6000)
    async with a_node(tmp_path, engine=engine) as node:
        result = await node.run(real("pi"))
    assert result.status == "ERROR"
    assert (result.cause, result.exit_code) == (Cause.HARNESS_MODEL_ERROR, 0)


@pytest.mark.parametrize("name", NAMES)
async def test_max_turns_ends_a_real_harness_session_with_cause_limit(name, tmp_path):
    async with a_node(tmp_path, {"shell": ["true"]}) as node:
        result = await node.run(real(name, limits=Limits(max_turns=2)))
    assert (result.status, result.cause) == ("TIMEOUT", Cause.LIMIT)


@pytest.mark.parametrize("name", NAMES)
async def test_a_real_harness_beyond_its_time_budget_is_killed_and_its_turns_train(name, tmp_path):
    made = real(name)
    made = made.model_copy(update={"budgets": made.budgets.model_copy(update={"agent_s": 30})})
    async with a_node(tmp_path, *turns(name, "sleep 100")) as node:
        result = await node.run(made)
        assert nothing_lives(result.session_id)
    assert (result.status, result.cause) == ("TIMEOUT", Cause.TIMEOUT)
    assert result.trajectory.metadata["stats"]["tokens_trained"] > 0


async def test_pi_and_mini_swe_agent_sessions_run_concurrently(tmp_path):
    spec = checked("test -e made")
    tasks = [real(name, evaluator=spec, task_id=name, num_samples=2) for name in NAMES]
    conversations = [
        {"when": {"tools_include": "edit"}, "turns": turns("pi", "touch made")},
        {"turns": turns("mini_swe_agent", "touch made")},
    ]
    engine = scripted_engine(conversations=conversations)
    async with (
        a_node(tmp_path, engine=engine) as node,
        LocalExecutor(node).run(tasks) as results,
    ):
        ended = [result async for result in results]
    assert [(result.status, result.reward) for result in ended] == [("COMPLETED", 1.0)] * 4


async def test_concurrent_installs_of_pi_give_one_bundle(tmp_path):
    said = []
    async with asyncio.TaskGroup() as group:
        installs = [
            group.create_task(open_harness("pi").install(tmp_path, said.append)) for _ in range(2)
        ]
    assert installs[0].result() == installs[1].result()
    assert any("waiting" in line for line in said)


async def test_an_unlocked_harness_version_is_checked_once_at_install(tmp_path):
    harness, said = open_harness(AgentSpec(harness="openai_agents", version="0.23.1")), []
    folder = await harness.install(tmp_path, said.append)
    assert folder is not None
    assert said[-1].startswith("openai_agents 0.23.1 (unlocked): works; fields that the gateway")
    assert json.loads((folder / CHECK_FILE).read_text())["version"] == "0.23.1 (unlocked)"
    said.clear()
    assert await harness.install(tmp_path, said.append) == folder
    assert not said


async def test_pi_is_installed_without_npm_on_the_machine(tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "env"):
        (tools / name).symlink_to(f"/bin/{name}" if name != "env" else "/usr/bin/env")
    monkeypatch.setenv("PATH", str(tools))
    folder = await ensure(node_recipe("pi", "1.6.0", size_mb=350), tmp_path / "bundles", print)
    monkeypatch.setenv("PATH", os.defpath)
    said = await Builder(folder, print, "").run(
        (str(folder / NODE), str(folder / CLI), "--version")
    )
    assert said.strip() == b"1.6.0"
