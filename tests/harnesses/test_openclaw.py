import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.harnesses.pi import Openclaw
from bridle.types import Cause, Dialect

openclaw = maker(Openclaw)


def config(harness):
    return json.loads(harness.launch(context()).files["/h/.openclaw/openclaw.json"])


def test_openclaw_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = openclaw(thinking="low", args=["--local-model-lean"]).launch(context())
    assert launch.command == (
        "/b/node_modules/.bin/node", "/b/node_modules/openclaw/openclaw.mjs",
        "agent", "exec", "--config", "/h/.openclaw/openclaw.json", "--cwd", "/w",
        "--model", "gw/bridle-policy", "--timeout", "86400", "--json", "--message-file", "-",
        "--thinking", "low", "--local-model-lean",
    )  # fmt: skip
    assert launch.stdin == b"do it"
    assert launch.env["OPENCLAW_STATE_DIR"] == "/h/.openclaw"


@pytest.mark.parametrize(
    ("api", "name", "url"),
    [
        (Dialect.OPENAI_CHAT, "openai-completions", "http://gw/s/x/v1"),
        (Dialect.OPENAI_RESPONSES, "openai-responses", "http://gw/s/x/v1"),
        (Dialect.ANTHROPIC, "anthropic-messages", "http://gw/s/x"),
        (Dialect.GOOGLE, "google-generative-ai", "http://gw/s/x/v1beta"),
    ],
)
def test_openclaw_s_only_provider_is_the_gateway_in_the_chosen_wire_format(api, name, url):
    harness = openclaw(api=str(api))
    models = config(harness)["models"]
    assert harness.dialect is api
    assert (models["mode"], list(models["providers"])) == ("replace", ["gw"])
    provider = models["providers"]["gw"]
    assert (provider["api"], provider["baseUrl"], provider["apiKey"]) == (name, url, "key-1")
    assert provider["models"][0]["contextWindow"] == 32768


def test_task_configuration_overrides_openclaw_defaults_but_not_the_provider():
    mine = {"tools": {"toolSearch": True}, "models": {"mode": "merge"}}
    made = config(openclaw(config=mine))
    assert made["tools"] == {"toolSearch": True, "deny": ["process", "sessions_spawn"]}
    assert made["models"]["mode"] == "replace"


def test_openclaw_live_state_tools_are_off_by_default():
    assert config(openclaw())["tools"]["deny"] == ["process", "sessions_spawn"]
    assert config(openclaw(live_state=True))["tools"]["deny"] == []


def test_mcp_servers_and_skills_are_written_in_the_format_of_openclaw(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = openclaw(SERVERS[:2], str(tmp_path)).launch(context())
    made = json.loads(launch.files["/h/.openclaw/openclaw.json"])["mcp"]["servers"]
    assert made["a"] == {"command": "serve", "args": ["-x"], "env": {}}
    assert made["b"] == {"url": "http://m", "transport": "streamable-http", "headers": {}}
    assert launch.folders == {f"/h/.openclaw/skills/{tmp_path.name}": tmp_path}


@pytest.mark.parametrize(
    ("exit_code", "cause"), [(0, None), (1, Cause.HARNESS_CRASH), (2, Cause.HARNESS_CRASH)]
)
def test_openclaw_exit_code_0_is_success_and_others_are_crashes(exit_code, cause):
    assert openclaw().exit_cause(exit_code, None, b"") is cause
