import pytest
from pydantic import ValidationError
from tests.datasets.test_swe import GYM

from bridle.server.polar import PolarTask
from bridle.server.settings import SubmissionPolicy

FULL = {
    "task_id": "swe-1",
    "instruction": "Fix it.",
    "num_samples": 4,
    "dispatch_priority": 50,
    "early_stop_min_usable_sessions": 2,
    "timeout_seconds": 900,
    "runtime": {
        "backend": "docker",
        "image": "img",
        "prepare": [{"type": "exec", "command": "true", "max_attempts": 2}],
        "eval_prepare": None,
        "env": {"A": "1"},
        "network": "gateway_only",
        "workdir": "/w",
        "cpus": 2,
        "memory_mb": 100,
        "gpus": 0,
        "allow_internet": False,
        "internet_volumes": [],
        "kwargs": {},
    },
    "agent": {
        "harness": "openhands_sdk",
        "model_name": "m",
        "settings": {"args": []},
        "env": {"B": "2"},
        "mcp_servers": [{"name": "files", "transport": "stdio", "command": "srv"}],
    },
    "builder": {"strategy": "prefix_merging", "config": {"end_of_turn_token_id": 5}},
    "evaluator": {"strategy": "swebench_harness", "config": {"instance": GYM}},
    "callback_url": "http://trainer/callbacks/session_result",
    "metadata": {"agent_timeout": 300, "k": "v"},
}

SMALL = {"task_id": "t", "instruction": "x", "agent": {"harness": "codex"}}


def submission(**changes):
    return PolarTask.model_validate(SMALL | changes).submission()


def refused(**changes):
    return dict(PolarTask.model_validate(SMALL | changes).refused(SubmissionPolicy()))


def test_a_full_polar_request_is_translated_to_a_bridle_task():
    wanted = PolarTask.model_validate(FULL)
    assert list(wanted.refused(SubmissionPolicy())) == []
    ours = wanted.submission()
    assert (ours.agent.harness, ours.evaluator.strategy) == ("openhands", "swebench")
    assert (ours.runtime.image, ours.runtime.gpus, ours.runtime.cpus) == ("img", None, 2)
    assert ours.runtime.prepare[0].max_attempts == 2
    assert ours.builder.config == {"end_of_turn_token_id": 5}
    assert (ours.dispatch_priority, ours.early_stop_min_usable_sessions) == (50, 2)
    assert ours.metadata == {"agent_timeout": 300, "k": "v"}
    assert ours.budgets.agent_s == 300
    assert ours.num_samples == 4


def test_polar_defaults_are_per_request_and_600_seconds():
    ours = submission()
    assert (ours.builder.strategy, ours.budgets.agent_s) == ("per_request", 600)
    assert submission(timeout_seconds=5).budgets.agent_s == 5
    assert submission(budgets={"agent_s": 7}).budgets.agent_s == 7


def test_polar_shell_becomes_harness_command():
    ours = submission(agent={"harness": "shell", "custom_shell": "run me"})
    assert (ours.agent.harness, ours.agent.command) == ("command", "run me")


@pytest.mark.parametrize(
    ("runtime", "network"),
    [
        ({}, "gateway_only"),
        ({"allow_internet": True}, "open"),
        ({"allow_internet": True, "network": "none"}, "none"),
        ({"network": "host"}, "open"),
    ],
)
def test_network_of_a_polar_runtime_is_translated(runtime, network):
    assert submission(runtime=runtime).runtime.network == network


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("runtime.network", {"runtime": {"network": "host"}}),
        ("runtime.internet_volumes", {"runtime": {"internet_volumes": ["/data"]}}),
        ("runtime.direct_exec_init_command", {"runtime": {"direct_exec_init_command": ["a"]}}),
        ("agent.custom_shell", {"agent": {"harness": "codex", "custom_shell": "x"}}),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, changes):
    assert list(refused(**changes)) == [field]


def test_an_operator_can_permit_the_host_network():
    wanted = PolarTask.model_validate(SMALL | {"runtime": {"network": "host"}})
    assert list(wanted.refused(SubmissionPolicy(host_network=True))) == []


def test_runtime_import_path_becomes_the_backend():
    assert submission(runtime={"import_path": "a.b:C"}).runtime.backend == "a.b:C"


def test_wrong_value_is_named_by_its_path():
    with pytest.raises(ValidationError, match="timeout_seconds"):
        submission(timeout_seconds=-1)
    with pytest.raises(ValidationError, match="agent_s"):
        submission(metadata={"agent_timeout": "soon"})
    with pytest.raises(ValidationError, match=r"runtime\.network"):
        submission(runtime={"network": "wild"})
