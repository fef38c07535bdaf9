import tomllib

import pytest
from tests.harnesses.made import context, maker

from bridle.errors import ConfigError
from bridle.harnesses.codex import Codex
from bridle.types import Cause

codex = maker(Codex)


def config(harness, **changes):
    return tomllib.loads(harness.launch(context(**changes)).files["/h/.codex/config.toml"].decode())


def test_codex_launch_command_is_headless_with_the_instruction_on_stdin():
    launch = codex(args=["--color", "never"]).launch(context(instruction="do it"))
    assert launch.command == (
        "/b/node_modules/.bin/node", "/b/node_modules/@openai/codex/bin/codex.js",
        "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
        "--color", "never", "-",
    )  # fmt: skip
    assert launch.stdin == b"do it"
    assert launch.env == {"CODEX_HOME": "/h/.codex", "GATEWAY_KEY": "key-1"}


def test_codex_provider_is_the_gateway_over_http_without_websockets():
    provider = config(codex())["model_providers"]["gw"]
    assert provider["base_url"] == "http://gw/s/x/v1"
    assert provider["env_key"] == "GATEWAY_KEY"
    assert provider["wire_api"] == "responses"
    assert provider["supports_websockets"] is False


def test_codex_gets_the_context_length_of_the_model_without_web_search_or_update_checks():
    made = config(codex(), context_length=50_000)
    assert made["model_context_window"] == 50_000
    assert made["model_auto_compact_token_limit"] == 40_000
    assert made["web_search"] == "disabled"
    assert made["check_for_update_on_startup"] is False
    assert made["features"] == {"multi_agent": False, "goals": False}


def test_task_configuration_overrides_codex_defaults_but_not_the_model():
    made = config(
        codex(
            multi_agent=True,
            config={"model_reasoning_effort": "low", "model": "x", "features": {"goals": True}},
        )
    )
    assert made["model_reasoning_effort"] == "low"
    assert made["features"] == {"multi_agent": True, "goals": True}
    assert made["model"] == "bridle-policy"


def test_mcp_servers_are_written_in_the_format_of_codex():
    remote = {"name": "b", "transport": "streamable-http", "url": "http://m", "headers": {"x": "y"}}
    servers = config(codex([{"name": "a", "command": "serve"}, remote]))["mcp_servers"]
    assert servers == {
        "a": {"command": "serve", "args": [], "env": {}},
        "b": {"url": "http://m", "http_headers": {"x": "y"}},
    }


def test_codex_refuses_mcp_servers_over_sse():
    with pytest.raises(ConfigError, match="cannot use 'c' over sse"):
        codex([{"name": "c", "transport": "sse", "url": "http://m"}])


def test_skills_are_copied_to_the_codex_config_folder(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = codex(skills_path=str(tmp_path)).launch(context())
    assert launch.folders == {f"/h/.codex/skills/{tmp_path.name}": tmp_path}


@pytest.mark.parametrize(
    ("code", "stdout", "cause"),
    [
        (0, b'{"type":"turn.completed"}', None),
        (1, b'{"type":"turn.failed"}', Cause.HARNESS_MODEL_ERROR),
        (0, b'{"type":"turn.failed"}\n{"type":"turn.completed"}', None),
        (1, b"", Cause.HARNESS_CRASH),
    ],
)
def test_codex_turn_failed_as_the_last_turn_event_is_a_model_error(code, stdout, cause):
    assert codex().exit_cause(code, None, stdout) is cause
