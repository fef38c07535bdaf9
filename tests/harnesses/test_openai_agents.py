import json

import pytest
from tests.harnesses.made import context, maker

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harnesses.sdk_agents import OpenaiAgents
from bridle.types import Cause, Dialect

agents = maker(OpenaiAgents)


def config(harness):
    return json.loads(harness.launch(context()).files["/h/.agent/config.json"])


def test_openai_agents_endpoint_is_that_of_the_session_and_tracing_is_off():
    env = agents().launch(context()).env
    assert env["OPENAI_BASE_URL"] == "http://gw/s/x/v1"
    assert env["OPENAI_API_KEY"] == "key-1"
    assert env["OPENAI_AGENTS_DISABLE_TRACING"] == "1"


@pytest.mark.parametrize("api", ["openai_responses", "openai_chat"])
def test_openai_agents_speaks_the_responses_and_the_chat_format(api):
    harness = agents(api=api, stream=True, max_turns=7, instructions="be brief")
    assert harness.dialect is Dialect(api)
    made = config(harness)
    assert (made["api"], made["stream"], made["max_turns"]) == (api, True, 7)
    assert (made["model"], made["instructions"]) == ("bridle-policy", "be brief")


def test_openai_agents_mcp_servers_are_written_to_the_script_config_and_skills_refused():
    assert config(agents([{"name": "a", "command": "serve"}]))["mcp_servers"][0]["name"] == "a"
    with pytest.raises(ConfigError, match="takes no skills"):
        OpenaiAgents(AgentSpec(harness="openai_agents", skills_path="x"))


def test_openai_agents_exit_code_3_is_a_limit():
    assert agents().exit_cause(3, None, b"") is Cause.LIMIT
