import json

import pytest
from tests.harnesses.made import context, maker

from bridle.harnesses.mini_swe_agent import MiniSweAgent
from bridle.types import Cause

mini = maker(MiniSweAgent)


def test_mini_swe_agent_launch_command_is_headless_with_two_config_files():
    launch = mini().launch(context())
    assert launch.command == (
        "/b/bin/python", "-m", "minisweagent.run.mini",
        "-c", "/b/mini.yaml", "-c", "/h/.config/mini-swe-agent/bridle.yaml",
        "--yolo", "--exit-immediately", "--cost-limit", "0", "-o", "/h/trajectory.traj.json",
    )  # fmt: skip
    assert launch.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert launch.env["MSWEA_COST_TRACKING"] == "ignore_errors"
    assert launch.logs == ("/h/trajectory.traj.json",)


def test_mini_swe_agent_command_line_contains_neither_instruction_nor_key():
    launch = mini().launch(context(instruction="secret plan"))
    assert "secret plan" not in " ".join(launch.command)
    (config,) = launch.files.values()
    assert json.loads(config) == {
        "run": {"task": "secret plan"},
        "model": {"model_name": "openai/bridle-policy"},
    }
    assert launch.env["OPENAI_API_KEY"] == "key-1"


def test_task_configuration_is_merged_into_mini_swe_agent_s_but_not_over_the_model_name():
    settings = {"agent": {"step_limit": 5}, "model": {"model_name": "x", "model_kwargs": {"n": 1}}}
    launch = mini(config=settings, model_attempts=2).launch(context())
    (config,) = launch.files.values()
    assert json.loads(config) == {
        "agent": {"step_limit": 5},
        "model": {"model_name": "openai/bridle-policy", "model_kwargs": {"n": 1}},
        "run": {"task": "do it"},
    }
    assert launch.env["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] == "2"


@pytest.mark.parametrize(
    ("api", "model", "variables"),
    [
        ("openai_chat", {"model_name": "openai/bridle-policy"}, ("OPENAI", "http://gw/s/x/v1")),
        (
            "openai_responses",
            {"model_name": "openai/bridle-policy", "model_class": "litellm_response"},
            ("OPENAI", "http://gw/s/x/v1"),
        ),
        ("anthropic", {"model_name": "anthropic/bridle-policy"}, ("ANTHROPIC", "http://gw/s/x")),
        ("google", {"model_name": "gemini/bridle-policy"}, ("GEMINI", "http://gw/s/x/v1beta")),
    ],
)
def test_mini_swe_agent_speaks_every_wire_format(api, model, variables):
    harness = mini(api=api)
    assert harness.dialect == api
    launch = harness.launch(context())
    (config,) = launch.files.values()
    assert json.loads(config)["model"] == model
    name, url = variables
    assert (launch.env[f"{name}_API_BASE"], launch.env[f"{name}_API_KEY"]) == (url, "key-1")


def test_mini_swe_agent_exit_code_1_is_a_crash():
    assert mini().exit_cause(1, None, b"") is Cause.HARNESS_CRASH
    assert mini().exit_cause(0, None, b"") is None
