import json

import pytest
from tests.harnesses.made import context, maker

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harnesses.aider import Aider
from bridle.types import Cause

aider = maker(Aider)


def config(harness):
    return json.loads(harness.launch(context()).files["/h/.aider.bridle.yml"])


def test_aider_launch_command_reads_its_config_and_the_instruction_from_files():
    launch = aider(files=["a b.py"]).launch(context(instruction="-do it"))
    assert launch.command.endswith(
        "exec /b/bin/python -m aider --config /h/.aider.bridle.yml "
        "--message-file /h/instruction.txt 'a b.py' $no_git"
    )
    assert launch.files["/h/instruction.txt"] == b"-do it"
    assert launch.env["OPENAI_API_BASE"] == "http://gw/s/x/v1"
    assert launch.env["OPENAI_API_KEY"] == "key-1"


def test_aider_uses_the_policy_for_both_models_without_updates_analytics_or_commits():
    made = config(aider(config={"model": "other", "map-tokens": 0}, edit_format="diff"))
    assert made["model"] == made["weak-model"] == "openai/bridle-policy"
    assert made["analytics"] is made["check-update"] is made["detect-urls"] is False
    assert made["auto-commits"] is made["dirty-commits"] is False
    assert (made["map-tokens"], made["edit-format"]) == (0, "diff")


def test_aider_gets_the_context_and_output_limits_of_the_model():
    launch = aider().launch(context(context_length=8000))
    limits = json.loads(launch.files["/h/.aider.model.metadata.json"])["openai/bridle-policy"]
    assert (limits["max_input_tokens"], limits["max_output_tokens"]) == (8000, 2000)


def test_aider_refuses_mcp_servers_and_skills():
    with pytest.raises(ConfigError, match="no MCP server at all"):
        aider([{"name": "a", "command": "serve"}])
    with pytest.raises(ConfigError, match="takes no skills"):
        Aider(AgentSpec(harness="aider", skills_path="x"))


def test_aider_exit_code_0_is_success_and_1_is_a_crash():
    assert aider().exit_cause(0, None, b"") is None
    assert aider().exit_cause(1, None, b"") is Cause.HARNESS_CRASH
