import json

import pytest
from tests.harnesses.made import context

from bridle.config import AgentSpec, McpServer
from bridle.harnesses.google_adk import GoogleAdk
from bridle.harnesses.packaged import plain_servers, script_launch
from bridle.types import Cause


def test_a_script_gets_its_configuration_as_a_file_and_the_task_on_stdin():
    launch = script_launch(
        context(instruction="do it"), "openai_agents_agent.py", {"model": "m"}, {"K": "v"}
    )
    assert launch.command == (
        "/b/bin/python", "/h/.agent/openai_agents_agent.py", "/h/.agent/config.json",
    )  # fmt: skip
    assert launch.stdin == b"do it"
    assert json.loads(launch.files["/h/.agent/config.json"]) == {"model": "m"}
    assert launch.env["K"] == "v"
    assert {"/h/.agent/openai_agents_agent.py", "/h/.agent/bash_tool.py"} < set(launch.files)


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
def test_a_scripts_exit_codes_tell_all(exit_code, signal, cause):
    agent = GoogleAdk(AgentSpec(harness="google_adk"))
    assert agent.exit_cause(exit_code, signal, b"") is cause


def test_servers_reach_a_script_as_plain_json():
    agent = AgentSpec(mcp_servers=(McpServer(name="a", command="serve", args=("x",)),))
    (server,) = plain_servers(agent)
    assert (server["name"], server["transport"], server["args"]) == ("a", "stdio", ["x"])
    json.dumps(server)
