import json

import pytest
from tests.harnesses.made import SERVERS, context, maker

from bridle.harnesses.sdk_agents import Openhands
from bridle.types import Cause, Dialect

openhands = maker(Openhands)


def config(harness, **changes):
    return json.loads(harness.launch(context(**changes)).files["/h/.agent/config.json"])


@pytest.mark.parametrize(
    ("api", "model", "url"),
    [
        ("openai_chat", "openai/bridle-policy", "http://gw/s/x/v1"),
        ("anthropic", "anthropic/bridle-policy", "http://gw/s/x"),
    ],
)
def test_openhands_speaks_two_wire_formats(api, model, url):
    harness = openhands(api=api)
    assert harness.dialect is Dialect(api)
    made = config(harness, context_length=8000)
    assert (made["model"], made["base_url"]) == (model, url)
    assert (made["max_input_tokens"], made["max_output_tokens"]) == (8000, 2000)
    assert harness.launch(context()).env["LLM_API_KEY"] == "key-1"


def test_openhands_settings_are_written_to_the_script_config():
    made = config(
        openhands(native_tool_calling=False, max_turns=7, llm={"reasoning_effort": "low"})
    )
    assert made["native_tool_calling"] is False
    assert made["max_turns"] == 7
    assert made["llm"] == {"reasoning_effort": "low"}


def test_mcp_servers_and_skills_are_written_in_the_format_of_openhands(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    harness = openhands(SERVERS, str(tmp_path))
    assert config(harness)["mcp_servers"] == {
        "a": {"command": "serve", "args": ["-x"], "env": {}},
        "b": {"url": "http://m", "transport": "http", "headers": {}},
        "c": {"url": "http://m", "transport": "sse", "headers": {}},
    }
    folders = harness.launch(context()).folders
    assert folders == {f"/h/.openhands/skills/{tmp_path.name}": tmp_path}


def test_openhands_exit_code_3_is_a_limit():
    assert openhands().exit_cause(3, None, b"") is Cause.LIMIT
