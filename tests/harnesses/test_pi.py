import json

import pytest
from tests.harnesses.made import context, maker

from bridle.harnesses.pi import Pi
from bridle.types import Cause

pi = maker(Pi)


def test_the_launch_line_is_the_documented_one():
    launch = pi().launch(context())
    assert launch.command == (
        "/b/node_modules/.bin/node",
        "/b/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js",
        "-p", "--mode", "json", "--provider", "gw", "--model", "bridle-policy",
    )  # fmt: skip
    assert launch.env["PI_OFFLINE"] == "1"
    assert launch.env["PI_TELEMETRY"] == "0"


def test_the_instruction_goes_in_by_stdin_where_no_text_is_read_as_an_option():
    launch = pi().launch(context(instruction="@file --help"))
    assert launch.stdin == b"@file --help"


def test_the_provider_is_the_gateway_with_the_models_true_context():
    launch = pi().launch(context(context_length=4096))
    models = json.loads(launch.files["/h/.pi/agent/models.json"])
    provider = models["providers"]["gw"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://gw/s/x/v1", "key-1")
    assert provider["models"][0]["contextWindow"] == 4096
    assert provider["models"][0]["maxTokens"] == 2048


@pytest.mark.parametrize(
    ("api", "result", "url"),
    [
        ("openai_chat", "openai-completions", "http://gw/s/x/v1"),
        ("openai_responses", "openai-responses", "http://gw/s/x/v1"),
        ("anthropic", "anthropic-messages", "http://gw/s/x"),
        ("google", "google-generative-ai", "http://gw/s/x/v1beta"),
    ],
)
def test_pi_speaks_every_wire_format(api, result, url):
    harness = pi(api=api)
    assert harness.dialect == api
    models = json.loads(harness.launch(context()).files["/h/.pi/agent/models.json"])
    provider = models["providers"]["gw"]
    assert (provider["api"], provider["baseUrl"]) == (result, url)


def test_settings_become_flags():
    line = pi(thinking="off", tools=["bash", "read"]).launch(context()).command
    assert line[9:] == ("--thinking", "off", "--tools", "bash,read")


def test_skills_lie_in_its_home(tmp_path):
    (tmp_path / "SKILL.md").write_text("x")
    launch = pi(skills_path=str(tmp_path)).launch(context())
    assert launch.folders == {f"/h/.pi/agent/skills/{tmp_path.name}": tmp_path}


def event(reason, role="assistant"):
    return json.dumps(
        {"type": "message_end", "message": {"role": role, "stopReason": reason}},
        separators=(",", ":"),
    ).encode()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([event("toolUse"), event("stop")], None),
        ([event("error")], Cause.HARNESS_MODEL_ERROR),
        ([event("stop"), event("aborted")], Cause.HARNESS_MODEL_ERROR),
        ([event("error"), event("stop")], None),
        ([event("error"), event(None, "tool"), b"{}"], Cause.HARNESS_MODEL_ERROR),
        ([event("error"), b'{"type":"message_end","message":"cut'], Cause.HARNESS_MODEL_ERROR),
        ([event(7)], None),
        ([b'{"type":"message_end"', b"[]", b"no json"], None),
        ([], None),
    ],
)  # fmt: skip
def test_exit_code_0_counts_only_if_its_last_word_is_not_an_error(lines, cause):
    assert pi().exit_cause(0, None, b"\n".join(lines)) is cause


def test_another_exit_code_is_a_crash():
    assert pi().exit_cause(1, None, event("stop")) is Cause.HARNESS_CRASH
