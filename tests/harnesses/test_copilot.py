import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.harnesses.bundles import Builder
from bridle.harnesses.copilot import Copilot, _unpack, program
from bridle.types import Cause, Dialect

copilot = maker(Copilot)


def test_copilot_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = copilot(args=["--reasoning-effort", "low"]).launch(context(instruction="do it"))
    assert launch.command == (
        f"/b/{program()}", "--allow-all-tools", "--allow-all-paths", "--disable-builtin-mcps",
        "--output-format", "json", "--log-dir", "/h/.copilot/logs", "--no-color",
        "--reasoning-effort", "low",
    )  # fmt: skip
    assert launch.stdin == b"do it"


def test_copilot_is_offline_and_runs_from_the_unpacked_bundle():
    env = copilot().launch(context(context_length=8000)).env
    assert env["COPILOT_OFFLINE"] == "true"
    assert env["COPILOT_AUTO_UPDATE"] == "false"
    assert env["COPILOT_PKG_CACHE_HOME"] == "/b/unpacked"
    assert env["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] == "6000"
    assert env["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] == "2000"


@pytest.mark.parametrize(
    ("api", "kind", "wire", "url"),
    [
        ("openai_chat", "openai", "completions", "http://gw/s/x/v1"),
        ("openai_responses", "openai", "responses", "http://gw/s/x/v1"),
        ("anthropic", "anthropic", "completions", "http://gw/s/x"),
    ],
)
def test_copilot_speaks_three_wire_formats(api, kind, wire, url):
    harness = copilot(api=api)
    env = harness.launch(context()).env
    assert harness.dialect is Dialect(api)
    assert env["COPILOT_PROVIDER_TYPE"] == kind
    assert env["COPILOT_PROVIDER_WIRE_API"] == wire
    assert env["COPILOT_PROVIDER_BASE_URL"] == url
    assert env["COPILOT_PROVIDER_API_KEY"] == "key-1"


def test_copilot_configuration_mcp_servers_and_skills_are_written_to_its_config_folder(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = copilot(SERVERS, str(tmp_path), config={"banner": "never"}).launch(context())
    assert json.loads(launch.files["/h/.copilot/config.json"]) == {"banner": "never"}
    assert json.loads(launch.files["/h/.copilot/mcp-config.json"])["mcpServers"] == {
        "a": {"type": "local", "tools": ["*"], "command": "serve", "args": ["-x"], "env": {}},
        "b": {"type": "http", "tools": ["*"], "url": "http://m", "headers": {}},
        "c": {"type": "sse", "tools": ["*"], "url": "http://m", "headers": {}},
    }
    assert launch.folders == {f"/h/.copilot/skills/{tmp_path.name}": tmp_path}


def test_copilot_exit_code_0_is_success_and_1_is_a_crash():
    assert copilot().exit_cause(0, None, b"") is None
    assert copilot().exit_cause(1, None, b"") is Cause.HARNESS_CRASH


async def test_copilot_bundle_setup_unpacks_the_program_into_the_bundle(tmp_path):
    binary = tmp_path / program()
    binary.parent.mkdir(parents=True)
    binary.write_text('#!/bin/sh\nenv > ran.txt; echo "$@" >> ran.txt\n')
    binary.chmod(0o755)
    await _unpack(Builder(tmp_path, print, "copilot"))
    ran = (tmp_path / "ran.txt").read_text()
    assert "COPILOT_SEA_EXTRACT_ONLY=1" in ran
    assert f"COPILOT_PKG_CACHE_HOME={tmp_path}/unpacked" in ran
