import json

from tests.harnesses.made import context
from tests.harnesses.scripts.reads import SERVER, exit_codes, keys_read

from bridle.config import AgentSpec
from bridle.harnesses.sdk_agents import ClaudeAgentSdk

SCRIPT = "claude_agent_sdk_agent.py"


def test_claude_agent_sdk_agent_reads_exactly_the_config_keys_that_the_harness_writes():
    launch = ClaudeAgentSdk(AgentSpec(harness="claude_agent_sdk")).launch(context())
    assert (
        keys_read(SCRIPT) - SERVER
        == set(json.loads(launch.files["/h/.agent/config.json"])) - SERVER
    )


def test_claude_agent_sdk_agent_uses_exit_codes_0_3_and_4():
    assert exit_codes(SCRIPT) >= {0, 3, 4}
