"""Versions of the user's choice, built from wheels on this disk."""

import json

import pytest
from tests.harnesses.made import context, wheel

from bridle.config import AgentSpec, McpServer, Settings
from bridle.errors import HarnessError
from bridle.harnesses.bundles import ensure
from bridle.harnesses.packaged import CHECKING, PackagedHarness, PyPI, node_recipe, python_recipe
from bridle.harnesses.sdk_agents import GoogleAdk, OpenaiAgents
from bridle.types import Cause, Dialect

# Virtual environments with pip: 5 s of CPU each.
pytestmark = pytest.mark.timeout(120)


class Tool(PackagedHarness[Settings]):
    name = "tool"
    pinned = "2.0"
    dialect = Dialect.OPENAI_CHAT
    settings_class = Settings
    package = PyPI(size_mb=1)


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """Locks that pin 2.0, and a folder of packages in which there is only 1.0."""
    (tmp_path / "tool.in").write_text("tool==2.0\n")
    (tmp_path / "tool.txt").write_text("tool==2.0 --hash=sha256:00\n")
    (tmp_path / "tool.package.json").write_text('{"dependencies": {"tool": "2.0"}}')
    (tmp_path / "tool.package-lock.json").write_text("{}")
    wheel(tmp_path, "tool", {"tool/__init__.py": ""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


async def test_a_version_other_than_the_pinned_is_installed_without_the_lock(locks):
    other = python_recipe("tool", "1.0", pinned="2.0", size_mb=1, locks=locks)
    folder = await ensure(other, locks / "bundles", print)
    assert list(folder.glob("lib/python3*/site-packages/tool-1.0.dist-info"))
    pinned = python_recipe("tool", "2.0", pinned="2.0", size_mb=1, locks=locks)
    with pytest.raises(HarnessError, match="No matching distribution"):
        await ensure(pinned, locks / "bundles", print)


def test_each_harness_version_has_its_own_bundle_folder(locks):
    recipes = [
        make("tool", version, pinned="2.0", size_mb=1, locks=locks)
        for make in (python_recipe, node_recipe)
        for version in ("1.0", "2.0")
    ]
    assert len({recipe.folder_name for recipe in recipes}) == 4
    assert recipes[2].inputs[:2] == ('{"dependencies": {"tool": "1.0"}}', "")
    assert recipes[3].inputs[:2] == ('{"dependencies": {"tool": "2.0"}}', "{}")


async def test_an_unlocked_version_whose_check_fails_is_not_installed(locks, monkeypatch):
    class Local(PyPI):
        async def recipe(self, name, version, pinned):
            return python_recipe(name, version, pinned=pinned, size_mb=1, locks=locks)

    class LocalTool(Tool):
        package = Local(size_mb=1)

    tool = LocalTool(AgentSpec(harness="tool", version="1.0"))
    said = []
    with pytest.raises(
        HarnessError, match=r"tool 1\.0 \(unlocked\): the check of this version failed: .*'tool'"
    ):
        await tool.install(locks / "bundles", said.append)
    assert "one scripted session" in said[-1]
    monkeypatch.setenv(CHECKING, "1")
    assert await tool.install(locks / "bundles", said.append) is not None


def test_a_script_harness_gets_its_configuration_as_a_file_and_the_instruction_on_stdin():
    server = McpServer(name="a", command="serve", args=("x",))
    agent = OpenaiAgents(AgentSpec(harness="openai_agents", mcp_servers=(server,)))
    launch = agent.launch(context(instruction="do it"))
    assert launch.command == (
        "/b/bin/python", "/h/.agent/openai_agents_agent.py", "/h/.agent/config.json",
    )  # fmt: skip
    assert launch.stdin == b"do it"
    config = json.loads(launch.files["/h/.agent/config.json"])
    assert (config["api"], config["stream"]) == ("openai_responses", False)
    (given,) = config["mcp_servers"]
    assert (given["name"], given["transport"], given["args"]) == ("a", "stdio", ["x"])
    assert launch.env["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    assert {"/h/.agent/openai_agents_agent.py", "/h/.agent/shell_agent.py"} < set(launch.files)


@pytest.mark.parametrize(
    ("exit_code", "signal", "cause"),
    [
        (0, None, None),
        (3, None, Cause.LIMIT),
        (4, None, Cause.HARNESS_MODEL_ERROR),
        (1, None, Cause.HARNESS_CRASH),
        (None, 9, Cause.HARNESS_CRASH),
    ],
)
def test_script_exit_codes_map_to_causes(exit_code, signal, cause):
    agent = GoogleAdk(AgentSpec(harness="google_adk"))
    assert agent.exit_cause(exit_code, signal, b"") is cause
