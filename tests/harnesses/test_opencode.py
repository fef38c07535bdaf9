import json

import pytest
from tests.harnesses.made import SERVERS, context, maker, set_up

from bridle.harnesses.opencode import Opencode
from bridle.types import Cause, Dialect

opencode = maker(Opencode)


def config(harness, **changes):
    launch = harness.launch(context(**changes))
    return json.loads(launch.files["/h/.config/opencode/opencode.json"])


def test_opencode_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = opencode(args=["--thinking"]).launch(context(instruction="do it"))
    assert launch.command == (
        "/b/node_modules/opencode-ai/bin/opencode.exe",
        "run", "--format", "json", "--model", "gw/bridle-policy", "--thinking",
    )  # fmt: skip
    assert launch.stdin == b"do it"
    assert launch.env["OPENCODE_DISABLE_MODELS_FETCH"] == "1"
    assert launch.env["XDG_CONFIG_HOME"] == "/h/.config"


@pytest.mark.parametrize(
    ("api", "adapter", "url"),
    [
        ("openai_chat", "@ai-sdk/openai-compatible", "http://gw/s/x/v1"),
        ("openai_responses", "@ai-sdk/openai", "http://gw/s/x/v1"),
        ("anthropic", "@ai-sdk/anthropic", "http://gw/s/x/v1"),
        ("google", "@ai-sdk/google", "http://gw/s/x/v1beta"),
    ],
)
def test_opencode_speaks_all_four_wire_formats(api, adapter, url):
    harness = opencode(api=api)
    provider = config(harness)["provider"]["gw"]
    assert harness.dialect is Dialect(api)
    assert provider["npm"] == adapter
    assert (provider["options"]["baseURL"], provider["options"]["apiKey"]) == (url, "key-1")


def test_opencode_gets_the_limits_of_the_model_without_title_calls_and_updates():
    made = config(opencode(), context_length=8000)
    model = made["provider"]["gw"]["models"]["bridle-policy"]
    assert model == {
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": 8000, "output": 2000},
    }
    assert made["agent"]["title"]["disable"] is True
    assert made["autoupdate"] is False
    assert made["permission"] == {"*": "allow"}


def test_task_configuration_overrides_opencode_defaults_but_not_the_provider():
    made = config(opencode(config={"permission": {"webfetch": "deny"}, "share": "auto"}))
    assert made["permission"] == {"*": "allow", "webfetch": "deny"}
    assert made["share"] == "auto"
    assert (
        config(opencode(config={"provider": {"gw": {"npm": "x"}}}))["provider"]["gw"]["npm"] != "x"
    )


def test_mcp_servers_and_skills_are_written_in_the_format_of_opencode(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    harness = opencode(SERVERS[:2], str(tmp_path))
    assert config(harness)["mcp"] == {
        "a": {"type": "local", "command": ["serve", "-x"], "environment": {}, "enabled": True},
        "b": {"type": "remote", "url": "http://m", "headers": {}, "enabled": True},
    }
    folders = harness.launch(context()).folders
    assert folders == {f"/h/.config/opencode/skills/{tmp_path.name}": tmp_path}


@pytest.mark.parametrize(
    ("code", "stdout", "cause"),
    [
        (0, b'{"type":"text"}', None),
        (0, b'{"type":"text"}\n{"type":"error"}', Cause.HARNESS_MODEL_ERROR),
        (0, b'{"type":"error"}\n{"type":"text"}', None),
        (1, b'{"type":"error"}', Cause.HARNESS_MODEL_ERROR),
        (1, b"", Cause.HARNESS_CRASH),
    ],
)
def test_opencode_error_as_the_last_event_is_a_model_error(code, stdout, cause):
    assert opencode().exit_cause(code, None, stdout) is cause


async def test_opencode_bundle_setup_runs_the_postinstall_script_of_the_package(tmp_path):
    ran = await set_up(Opencode, tmp_path)
    assert f"{tmp_path}/node_modules/opencode-ai/postinstall.mjs" in ran
