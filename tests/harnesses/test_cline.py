import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.errors import ConfigError
from bridle.harnesses.cline import Cline
from bridle.types import Cause, Dialect

FOLDER = "/h/.cline/data/settings"


cline = maker(Cline)


def test_cline_launch_command_is_headless_with_the_instruction_as_last_argument():
    launch = cline(args=["--compaction", "off"]).launch(context(instruction="-do it"))
    assert launch.command == (
        "/b/node_modules/.bin/cline", "--json", "--auto-approve", "true",
        "-P", "openai-compatible", "-m", "bridle-policy", "--compaction", "off", "--", "-do it",
    )  # fmt: skip


def test_cline_runs_without_a_daemon_telemetry_and_updates():
    launch = cline().launch(context())
    assert launch.env["CLINE_SESSION_BACKEND_MODE"] == "local"
    settings = json.loads(launch.files[f"{FOLDER}/global-settings.json"])
    assert settings == {"telemetryOptOut": True, "autoUpdateEnabled": False}


@pytest.mark.parametrize(
    ("api", "provider", "url", "model"),
    [
        ("openai_chat", "openai-compatible", "http://gw/s/x/v1", "bridle-policy"),
        ("openai_responses", "openai-native", "http://gw/s/x/v1", "bridle-policy"),
        ("anthropic", "anthropic", "http://gw/s/x/v1", "bridle-policy"),
        ("google", "gemini", "http://gw/s/x", "gemini-3-bridle"),
    ],
)
def test_cline_speaks_all_four_wire_formats(api, provider, url, model):
    harness = cline(api=api)
    launch = harness.launch(context(model_name=model, context_length=8000))
    saved = json.loads(launch.files[f"{FOLDER}/providers.json"])
    settings = saved["providers"][provider]["settings"]
    assert harness.dialect is Dialect(api)
    assert (settings["baseUrl"], settings["apiKey"], settings["model"]) == (url, "key-1", model)
    assert (settings["contextWindow"], settings["maxTokens"]) == (8000, 2000)


def test_cline_with_the_google_api_requires_a_model_name_that_begins_with_gemini_3():
    with pytest.raises(ConfigError, match=r"agent\.model_name: .* begins with 'gemini-3'"):
        cline(api="google").launch(context())


@pytest.mark.parametrize("instruction", ["x" * 120_001, "a\0b"])
def test_cline_refuses_an_instruction_that_cannot_be_a_command_line_argument(instruction):
    with pytest.raises(ConfigError, match="takes its instruction as an argument"):
        cline().launch(context(instruction=instruction))


def test_mcp_servers_and_skills_are_written_in_the_format_of_cline(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = cline(SERVERS, str(tmp_path)).launch(context())
    assert json.loads(launch.files[f"{FOLDER}/cline_mcp_settings.json"])["mcpServers"] == {
        "a": {"type": "stdio", "command": "serve", "args": ["-x"], "env": {}},
        "b": {"type": "streamableHttp", "url": "http://m", "headers": {}},
        "c": {"type": "sse", "url": "http://m", "headers": {}},
    }
    assert launch.folders == {f"/h/.cline/skills/{tmp_path.name}": tmp_path}


@pytest.mark.parametrize(
    ("code", "stdout", "cause"),
    [
        (0, b'{"type":"run_result","finishReason":"completed"}', None),
        (0, b'{"type":"run_result","finishReason":"error"}', Cause.HARNESS_MODEL_ERROR),
        (1, b'{"type":"run_result","finishReason":"error"}', Cause.HARNESS_MODEL_ERROR),
        (1, b"", Cause.HARNESS_CRASH),
    ],
)
def test_cline_finish_reason_error_is_a_model_error(code, stdout, cause):
    assert cline().exit_cause(code, None, stdout) is cause
