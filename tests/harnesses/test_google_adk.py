import json

from tests.harnesses.made import context, maker

from bridle.harnesses.sdk_agents import GoogleAdk
from bridle.types import Cause

adk = maker(GoogleAdk)


def config(harness):
    return json.loads(harness.launch(context()).files["/h/.agent/config.json"])


def test_google_adk_endpoint_and_key_are_those_of_the_session():
    env = adk().launch(context()).env
    assert env["GOOGLE_GEMINI_BASE_URL"] == "http://gw/s/x"
    assert env["GOOGLE_API_KEY"] == "key-1"
    assert env["GOOGLE_GENAI_USE_VERTEXAI"] == "false"


def test_google_adk_settings_are_written_to_the_script_config():
    made = config(adk(stream=True, max_turns=7, instructions="be brief"))
    assert (made["stream"], made["max_turns"], made["instructions"]) == (True, 7, "be brief")
    assert made["model"] == "bridle-policy"


def test_google_adk_mcp_servers_and_skills_are_written_to_the_script_config(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    harness = adk([{"name": "a", "command": "serve"}], str(tmp_path))
    target = f"/h/.agent/skills/{tmp_path.name}"
    assert config(harness)["mcp_servers"][0]["command"] == "serve"
    assert config(harness)["skills"] == [target]
    assert harness.launch(context()).folders == {target: tmp_path}


def test_google_adk_exit_code_4_is_a_model_error():
    assert adk().exit_cause(4, None, b"") is Cause.HARNESS_MODEL_ERROR
