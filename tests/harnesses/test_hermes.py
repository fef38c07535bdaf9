import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.errors import ConfigError
from bridle.harnesses.hermes import START, Hermes
from bridle.types import Cause, Dialect

ROOMY = context(context_length=131_072)


hermes = maker(Hermes)


def config(harness, where=ROOMY):
    return json.loads(harness.launch(where).files["/h/.hermes/config.yaml"])


def test_hermes_launch_command_reads_the_instruction_from_stdin():
    launch = hermes().launch(context(context_length=131_072, instruction="--help @x"))
    assert launch.command == (
        "/b/bin/python", "-c", START,
        "--toolsets", "terminal,file,skills,todo,delegation", "--usage-file", "/dev/stdout",
    )  # fmt: skip
    assert launch.stdin == b"--help @x"
    assert launch.env["HERMES_HOME"] == "/h/.hermes"


def test_hermes_has_no_model_timeouts_and_no_skill_creation():
    env = hermes().launch(ROOMY).env
    assert env["HERMES_CODEX_TTFB_TIMEOUT_SECONDS"] == "0"
    assert env["HERMES_CODEX_EVENT_STALE_TIMEOUT_SECONDS"] == "0"
    assert config(hermes())["skills"] == {"creation_nudge_interval": 0}


@pytest.mark.parametrize(
    ("api", "mode", "url"),
    [
        (Dialect.OPENAI_CHAT, "chat_completions", "http://gw/s/x/v1"),
        (Dialect.OPENAI_RESPONSES, "codex_responses", "http://gw/s/x/v1"),
        (Dialect.ANTHROPIC, "anthropic_messages", "http://gw/s/x"),
    ],
)
def test_hermes_provider_is_the_gateway_in_the_chosen_wire_format(api, mode, url):
    harness = hermes(api=str(api))
    made = config(harness)
    provider = made["providers"]["gw"]
    assert harness.dialect is api
    assert (provider["api_mode"], provider["base_url"]) == (mode, url)
    assert provider["api_key"] == "key-1"
    assert made["model"]["provider"] == "gw"
    assert made["model"]["context_length"] == 131_072


def test_task_configuration_overrides_hermes_defaults_but_not_the_provider():
    mine = {"agent": {"max_turns": 7}, "providers": {"gw": {"base_url": "http://elsewhere"}}}
    made = config(hermes(config=mine, toolsets=["file"]))
    assert made["agent"] == {"environment_probe": False, "max_turns": 7}
    assert made["providers"]["gw"]["base_url"] == "http://gw/s/x/v1"
    assert "file" in hermes(toolsets=["file"]).launch(ROOMY).command


def test_hermes_mcp_servers_become_toolsets_and_skills_are_copied_to_its_config_folder(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = hermes(SERVERS[:2], str(tmp_path)).launch(ROOMY)
    made = json.loads(launch.files["/h/.hermes/config.yaml"])["mcp_servers"]
    assert made["a"] == {"command": "serve", "args": ["-x"], "env": {}}
    assert made["b"] == {"url": "http://m", "headers": {}}
    assert "terminal,file,skills,todo,delegation,a,b" in launch.command
    assert launch.folders == {f"/h/.hermes/skills/{tmp_path.name}": tmp_path}


def test_hermes_refuses_a_model_with_less_than_64000_tokens_of_context():
    with pytest.raises(ConfigError, match="at least 64000 tokens, and this one takes 32768"):
        hermes().launch(context())


def report(**facts):
    return json.dumps({"completed": True, **facts}, indent=2).encode() + b"\nDone."


@pytest.mark.parametrize(
    ("exit_code", "stdout", "cause"),
    [
        (0, report(failed=False), None),
        (0, report(failed=True), Cause.HARNESS_MODEL_ERROR),
        (2, report(failed=True), Cause.HARNESS_CRASH),
        (0, b"Done.", None),
        (0, b"[1]", None),
    ],
)
def test_hermes_exit_code_0_with_a_failed_report_is_a_model_error(exit_code, stdout, cause):
    assert hermes().exit_cause(exit_code, None, stdout) is cause
