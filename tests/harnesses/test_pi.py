import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harnesses.pi import Pi
from bridle.types import Cause

pi = maker(Pi)


def test_pi_launch_command_is_headless_and_offline_with_json_output():
    launch = pi().launch(context())
    assert launch.command == (
        "/b/node_modules/.bin/node",
        "/b/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js",
        "-p", "--mode", "json", "--provider", "gw", "--model", "bridle-policy",
    )  # fmt: skip
    assert launch.env["PI_OFFLINE"] == "1"
    assert launch.env["PI_TELEMETRY"] == "0"


def test_pi_gets_the_instruction_on_stdin():
    launch = pi().launch(context(instruction="@file --help"))
    assert launch.stdin == b"@file --help"


def test_pi_provider_is_the_gateway_with_the_limits_of_the_model():
    launch = pi().launch(context(context_length=4096))
    models = json.loads(launch.files["/h/.pi/agent/models.json"])
    provider = models["providers"]["gw"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://gw/s/x/v1", "key-1")
    assert provider["models"][0]["contextWindow"] == 4096
    assert provider["models"][0]["maxTokens"] == 2048


@pytest.mark.parametrize(
    ("api", "result", "url"),
    [
        ("openai_chat", "openai-completions", "http://gw/s/x/v1"),
        ("openai_responses", "openai-responses", "http://gw/s/x/v1"),
        ("anthropic", "anthropic-messages", "http://gw/s/x"),
        ("google", "google-generative-ai", "http://gw/s/x/v1beta"),
    ],
)
def test_pi_speaks_every_wire_format(api, result, url):
    harness = pi(api=api)
    assert harness.dialect == api
    models = json.loads(harness.launch(context()).files["/h/.pi/agent/models.json"])
    provider = models["providers"]["gw"]
    assert (provider["api"], provider["baseUrl"]) == (result, url)


def test_pi_settings_become_flags():
    line = pi(thinking="off", tools=["bash", "read"]).launch(context()).command
    assert line[9:] == ("--thinking", "off", "--tools", "bash,read")


def test_pi_shows_the_tools_of_mcp_servers_to_the_model():
    launch = pi(mcp_servers=SERVERS[:2]).launch(context())
    near = {"command": "serve", "args": ["-x"], "env": {}, "exposure": "direct"}
    far = {"url": "http://m", "headers": {}, "exposure": "direct"}
    servers = {"mcpServers": {"a": near, "b": far}}
    assert json.loads(launch.files["/h/.pi/agent/mcp.json"]) == servers
    assert "/h/.pi/agent/mcp.json" not in pi().launch(context()).files


def test_pi_of_a_version_that_ignores_mcp_servers_refuses_them():
    task = AgentSpec.model_validate({"harness": "pi", "mcp_servers": SERVERS[:1]})
    with pytest.raises(ConfigError, match=r"pi 0\.87\.1 ignores MCP servers; give version 0\.99"):
        Pi(task.model_copy(update={"version": "0.87.1"}))
    Pi(task.model_copy(update={"version": "0.99.1"}))


def test_skills_are_copied_to_the_pi_config_folder(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = pi(skills_path=str(tmp_path)).launch(context())
    assert launch.folders == {f"/h/.pi/agent/skills/{tmp_path.name}": tmp_path}


def event(reason, role="assistant"):
    return json.dumps(
        {"type": "message_end", "message": {"role": role, "stopReason": reason}},
        separators=(",", ":"),
    ).encode()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([event("toolUse"), event("stop")], None),
        ([event("error")], Cause.HARNESS_MODEL_ERROR),
        ([event("stop"), event("aborted")], Cause.HARNESS_MODEL_ERROR),
        ([event("error"), event("stop")], None),
        ([event("error"), event(None, "tool"), b"{}"], Cause.HARNESS_MODEL_ERROR),
        ([event("error"), b'{"type":"message_end","message":"cut'], Cause.HARNESS_MODEL_ERROR),
        ([event(7)], None),
        ([b'{"type":"message_end"', b"[]", b"no json"], None),
        ([], None),
    ],
)  # fmt: skip
def test_pi_exit_code_0_with_an_error_as_the_last_message_is_a_model_error(lines, cause):
    assert pi().exit_cause(0, None, b"\n".join(lines)) is cause


def test_pi_exit_code_1_is_a_crash():
    assert pi().exit_cause(1, None, event("stop")) is Cause.HARNESS_CRASH
