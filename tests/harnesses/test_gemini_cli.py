import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.harnesses.gemini_cli import GeminiCli
from bridle.types import Cause

gemini = maker(GeminiCli)


def settings_file(harness):
    return json.loads(harness.launch(context()).files["/h/.gemini/settings.json"])


def test_gemini_cli_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = gemini(args=["--debug"]).launch(context(instruction="do it"))
    assert launch.command == (
        "/b/node_modules/.bin/node", "/b/node_modules/@google/gemini-cli/bundle/gemini.js",
        "--yolo", "--model", "bridle-policy", "--output-format", "stream-json", "--debug",
    )  # fmt: skip
    assert launch.stdin == b"do it"
    assert launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://gw/s/x"
    assert launch.env["GEMINI_API_KEY"] == "key-1"


def test_gemini_cli_settings_use_the_api_key_and_disable_statistics_and_updates():
    made = settings_file(gemini(config={"security": {"auth": {"selectedType": "oauth"}}}))
    assert made["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert made["privacy"]["usageStatisticsEnabled"] is False
    assert made["general"]["enableAutoUpdate"] is False
    assert made["model"]["maxSessionTurns"] == -1


def test_gemini_cli_compression_threshold_is_scaled_to_the_context_length_of_the_model():
    threshold = settings_file(gemini())["model"]["compressionThreshold"]
    assert threshold * 1_048_576 == pytest.approx(0.8 * context().context_length)
    made = settings_file(gemini(config={"model": {"compressionThreshold": 0.5}}))
    assert made["model"]["compressionThreshold"] == 0.5


def test_gemini_cli_settings_include_the_turn_limit_and_the_settings_of_the_task():
    made = settings_file(gemini(max_turns=4, config={"tools": {"exclude": ["web_fetch"]}}))
    assert made["model"]["maxSessionTurns"] == 4
    assert made["tools"] == {"useRipgrep": False, "exclude": ["web_fetch"]}


def test_mcp_servers_and_skills_are_written_in_the_format_of_gemini_cli(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    harness = gemini(SERVERS, str(tmp_path))
    assert settings_file(harness)["mcpServers"] == {
        "a": {"command": "serve", "args": ["-x"], "env": {}, "trust": True},
        "b": {"httpUrl": "http://m", "headers": {}, "trust": True},
        "c": {"url": "http://m", "headers": {}, "trust": True},
    }
    assert harness.launch(context()).folders == {f"/h/.gemini/skills/{tmp_path.name}": tmp_path}


@pytest.mark.parametrize(
    ("code", "stdout", "cause"),
    [
        (0, b'{"type":"result","status":"success"}', None),
        (0, b'{"type":"result","status":"error"}', Cause.HARNESS_MODEL_ERROR),
        (144, b"", Cause.HARNESS_MODEL_ERROR),  # 400
        (173, b"", Cause.HARNESS_MODEL_ERROR),  # 429
        (53, b"", Cause.LIMIT),
        (41, b"", Cause.HARNESS_CRASH),
        (0, b"", None),
    ],
)
def test_gemini_cli_exit_codes_and_result_events_map_to_causes(code, stdout, cause):
    assert gemini().exit_cause(code, None, stdout) is cause
