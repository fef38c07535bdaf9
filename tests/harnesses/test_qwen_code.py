import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.harnesses.gemini_cli import QwenCode
from bridle.types import Cause, Dialect

qwen = maker(QwenCode)


def settings_file(harness, **changes):
    return json.loads(harness.launch(context(**changes)).files["/h/.qwen/settings.json"])


def test_qwen_code_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = qwen(args=["--debug"]).launch(context(instruction="do it"))
    assert launch.command == (
        "/b/node_modules/.bin/node", "/b/node_modules/@qwen-code/qwen-code/cli-entry.js",
        "--auth-type", "openai", "--model", "bridle-policy",
        "--yolo", "--output-format", "stream-json", "--debug",
    )  # fmt: skip
    assert launch.stdin == b"do it"


@pytest.mark.parametrize(
    ("api", "auth", "env"),
    [
        ("openai_chat", "openai", ("OPENAI_BASE_URL", "http://gw/s/x/v1", "OPENAI_API_KEY")),
        ("anthropic", "anthropic", ("ANTHROPIC_BASE_URL", "http://gw/s/x", "ANTHROPIC_API_KEY")),
        ("google", "gemini", ("GOOGLE_GEMINI_BASE_URL", "http://gw/s/x", "GEMINI_API_KEY")),
    ],
)
def test_qwen_code_speaks_three_wire_formats(api, auth, env):
    harness = qwen(api=api)
    launch = harness.launch(context())
    url, value, key = env
    assert harness.dialect is Dialect(api)
    assert launch.command[3] == auth
    assert (launch.env[url], launch.env[key]) == (value, "key-1")
    assert settings_file(harness)["security"]["auth"]["selectedType"] == auth


def test_qwen_code_telemetry_updates_and_managed_memory_are_off():
    made = settings_file(qwen(), context_length=9000)
    assert made["privacy"]["usageStatisticsEnabled"] is False
    assert made["general"]["enableAutoUpdate"] is False
    assert made["memory"] == {"enableManagedAutoMemory": False, "enableManagedAutoDream": False}
    assert made["tools"]["useRipgrep"] is False
    assert made["model"]["generationConfig"]["contextWindowSize"] == 9000


def test_task_settings_are_merged_over_qwen_code_defaults():
    made = settings_file(qwen(config={"tools": {"exclude": ["web_fetch"]}}))
    search = {"toolSearch": {"enabled": False}}
    assert made["tools"] == {"useRipgrep": False, **search, "exclude": ["web_fetch"]}


def test_mcp_servers_and_skills_are_written_in_the_format_of_qwen_code(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    harness = qwen(SERVERS, str(tmp_path))
    assert settings_file(harness)["mcpServers"] == {
        "a": {"command": "serve", "args": ["-x"], "env": {}, "trust": True},
        "b": {"httpUrl": "http://m", "headers": {}, "trust": True},
        "c": {"url": "http://m", "headers": {}, "trust": True},
    }
    assert harness.launch(context()).folders == {f"/h/.qwen/skills/{tmp_path.name}": tmp_path}


def test_qwen_code_error_result_is_a_model_error_despite_exit_code_0():
    stdout = b'{"type":"result","subtype":"success","is_error":true}'
    assert qwen().exit_cause(0, None, stdout) is Cause.HARNESS_MODEL_ERROR
    assert qwen().exit_cause(0, None, b"") is None
