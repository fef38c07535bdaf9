import json

from tests.harnesses.made import context
from tests.harnesses.scripts.reads import SERVER, exit_codes, keys_read

from bridle.config import AgentSpec
from bridle.harnesses.sdk_agents import OpenaiAgents

SCRIPT = "openai_agents_agent.py"


def test_openai_agents_agent_reads_exactly_what_the_harness_writes():
    launch = OpenaiAgents(AgentSpec(harness="openai_agents")).launch(context())
    assert (
        keys_read(SCRIPT) - SERVER
        == set(json.loads(launch.files["/h/.agent/config.json"])) - SERVER
    )


def test_openai_agents_agent_has_an_exit_code_for_each_way_to_end():
    assert exit_codes(SCRIPT) >= {0, 3, 4}
