import json

import pytest
from tests.harnesses.made import context, maker, set_up

from bridle.harnesses.claude_code import ClaudeCode
from bridle.types import Cause

PROGRAM = "/b/node_modules/@anthropic-ai/claude-code/bin/claude.exe"


claude = maker(ClaudeCode)


def test_claude_code_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = claude().launch(context(instruction="--help me"))
    assert launch.command == (
        PROGRAM, "-p", "--model", "bridle-policy", "--dangerously-skip-permissions",
        "--output-format", "stream-json", "--verbose",
    )  # fmt: skip
    assert launch.stdin == b"--help me"


def test_claude_code_environment_sets_endpoint_limits_and_reproducible_defaults():
    env = claude().launch(context(context_length=40_000)).env
    assert env["ANTHROPIC_BASE_URL"] == "http://gw/s/x"
    assert env["ANTHROPIC_API_KEY"] == "key-1"
    assert env["IS_SANDBOX"] == "1"
    assert env["ENABLE_TOOL_SEARCH"] == "false"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "40000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"
    assert env["CLAUDE_CONFIG_DIR"] == "/h/.claude"


def test_claude_code_settings_become_flags_and_a_settings_file():
    settings = {"permissions": {"deny": ["WebFetch"]}}
    launch = claude(bare=True, max_turns=3, args=["--effort", "low"], config=settings).launch(
        context()
    )
    assert launch.command[8:] == ("--bare", "--max-turns", "3", "--effort", "low")
    assert json.loads(launch.files["/h/.claude/settings.json"]) == settings


def test_mcp_servers_are_written_in_the_format_of_claude_code():
    launch = claude(
        [
            {"name": "a", "command": "serve"},
            {"name": "b", "transport": "streamable-http", "url": "http://m", "headers": {"x": "y"}},
            {"name": "c", "transport": "sse", "url": "http://m"},
        ]
    ).launch(context())
    assert launch.command[8:] == ("--mcp-config", "/h/.claude/mcp.json", "--strict-mcp-config")
    servers = json.loads(launch.files["/h/.claude/mcp.json"])["mcpServers"]
    assert servers == {
        "a": {"command": "serve", "args": [], "env": {}},
        "b": {"type": "http", "url": "http://m", "headers": {"x": "y"}},
        "c": {"type": "sse", "url": "http://m", "headers": {}},
    }


def test_skills_are_copied_to_the_claude_code_config_folder(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = claude(skills_path=str(tmp_path)).launch(context())
    assert launch.folders == {f"/h/.claude/skills/{tmp_path.name}": tmp_path}


def result(subtype, is_error):
    return json.dumps({"type": "result", "subtype": subtype, "is_error": is_error}).encode()


@pytest.mark.parametrize(
    ("code", "stdout", "cause"),
    [
        (0, result("success", False), None),
        (1, result("success", True), Cause.HARNESS_MODEL_ERROR),
        (0, result("success", True), Cause.HARNESS_MODEL_ERROR),
        (1, result("error_max_turns", True), Cause.LIMIT),
        (1, result("error_during_execution", True), Cause.HARNESS_CRASH),
        (1, b'{"type":"user","message":"a result"}', Cause.HARNESS_CRASH),
        (0, b"", None),
    ],
)
def test_claude_code_result_event_decides_the_cause_over_the_exit_code(code, stdout, cause):
    assert claude().exit_cause(code, None, stdout) is cause


def test_claude_code_killed_by_a_signal_is_a_crash():
    assert claude().exit_cause(None, 9, result("success", True)) is Cause.HARNESS_CRASH


async def test_claude_code_bundle_setup_runs_the_install_script_of_the_package(tmp_path):
    ran = await set_up(ClaudeCode, tmp_path)
    assert f"{tmp_path}/node_modules/@anthropic-ai/claude-code/install.cjs" in ran
