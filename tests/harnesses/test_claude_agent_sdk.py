import json

from tests.harnesses.made import context, maker

from bridle.harnesses.sdk_agents import ClaudeAgentSdk
from bridle.types import Cause

sdk = maker(ClaudeAgentSdk)


def test_claude_agent_sdk_environment_has_the_variables_of_claude_code():
    env = sdk().launch(context(context_length=40_000)).env
    assert env["ANTHROPIC_BASE_URL"] == "http://gw/s/x"
    assert env["ANTHROPIC_API_KEY"] == "key-1"
    assert env["ENABLE_TOOL_SEARCH"] == "false"
    assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "40000"
    assert env["CLAUDE_CONFIG_DIR"] == "/h/.claude"


def test_claude_agent_sdk_settings_mcp_servers_and_skills_are_written_to_its_files(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    server = {"name": "b", "transport": "streamable-http", "url": "http://m"}
    launch = sdk([server], str(tmp_path), max_turns=7, config={"a": 1}).launch(context())
    made = json.loads(launch.files["/h/.agent/config.json"])
    assert (made["model"], made["max_turns"], made["instructions"]) == ("bridle-policy", 7, None)
    assert made["mcp_servers"] == {"b": {"type": "http", "url": "http://m", "headers": {}}}
    assert json.loads(launch.files["/h/.claude/settings.json"]) == {"a": 1}
    assert launch.folders == {f"/h/.claude/skills/{tmp_path.name}": tmp_path}
    assert launch.stdin == b"do it"


def test_claude_agent_sdk_exit_code_4_is_a_model_error():
    assert sdk().exit_cause(0, None, b"") is None
    assert sdk().exit_cause(4, None, b"") is Cause.HARNESS_MODEL_ERROR
