"""The bodies that Polar's own examples and ClawBench send, restated from the repositories named."""

import json
from pathlib import Path

import pytest
from tests.datasets.test_swe import GYM, SMITH
from tests.server.house import an_app

from bridle.evaluators import open_evaluator
from bridle.runtimes.docker import DockerRuntime
from bridle.server.polar import PolarTask
from bridle.server.settings import SubmissionPolicy

WORK = "/polar/session/workspace"
CONFIG = ("evaluator", "config")
CACHES = ["node_modules/**", "**/node_modules/**", ".cache/**", "**/.cache/**"]
TESTED = "python3 test_calculator.py && echo 'PASSED test_calculator'"
MODELS = {
    "claude_code": "claude-opus-4-5",
    "codex": "openai/gpt-5.5",
    "gemini_cli": "gemini-2.5-flash-lite",
    "opencode": "openai/gpt-5.4",
    "pi": "openai/gpt-5.4",
    "qwen_code": "qwen3-coder-plus",
    "openhands_sdk": "openai/gpt-5.4",
    "openclaw": "openai/gpt-5.4",
    "hermes": "openai/gpt-5.4",
}


def calculator(harness, assets):
    """NVIDIA-NeMo/ProRL-Agent-Server@e62ae515, examples/calculator/run.py."""
    agent = {"harness": harness, "model_name": MODELS[harness]}
    if harness == "codex":
        agent["settings"] = {"version": "0.125.0", "reasoning_effort": "xhigh"}
    own = [f".{harness}/**", f"**/.{harness}/**"]
    return {
        "task_id": f"calculator-{harness}-20261123T000000Z",
        "instruction": "`calculator.py` has a `Calculator` class...",
        "num_samples": 4,
        "timeout_seconds": 1200.0,
        "runtime": {
            "backend": "docker",
            "image": "polar-localhost-calculator:latest",
            "prepare": [
                {"type": "exec", "command": f"npm install -g x && mkdir -p {WORK} && git init -q"},
                {
                    "type": "upload_file",
                    "source": f"{assets}/test_calculator.py",
                    "target": f"{WORK}/test_calculator.py",
                },
                {
                    "type": "upload_file",
                    "source": f"{assets}/calculator.py",
                    "target": f"{WORK}/calculator.py",
                },
                {
                    "type": "exec",
                    "command": f"cd {WORK} && git add -A && git commit -qm 'initial'",
                },
            ],
            "network": "host",
            "workdir": WORK,
        },
        "agent": agent,
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {
            "strategy": "test_on_output",
            "config": {
                "repo_dir": WORK,
                "patch_command": f"cd {WORK} && git add -A && git diff --cached --binary",
                "test_command": f"cd {WORK} && {TESTED}",
                "test_timeout": 60.0,
                "expected_output_json": {"test_calculator": "PASSED"},
                "exclude_patterns": [*CACHES, *own],
            },
            "refresh_runtime": True,
        },
    }  # fmt: skip


def swe_gym(folder):
    """NVIDIA-NeMo/ProRL-Agent-Server@45347507, examples/swegym_slime_grpo/polar_config.yaml, filled
    with a row of SkyRL-v0-293.
    """
    return {
        "task_id": "polar-swegym-grpo-0-0",
        "instruction": GYM["problem_statement"],
        "num_samples": 16,
        "timeout_seconds": 3600,
        "runtime": {
            "backend": "apptainer",
            "image": f"{folder}/getmoto__moto-7365.sif",
            "network": "host",
            "workdir": WORK,
            "env": {"HOME": "/polar/session/home", "PATH": "/opt/node/bin:/usr/bin:/bin"},
            "kwargs": {"volumes": [f"{folder}/cli:/opt/node:ro"]},
            "prepare": [{"type": "exec", "command": f"cp -a /testbed/. {WORK}/"}],
            "eval_prepare": [{"type": "exec", "command": "mkdir -p /polar/session/logs/agent"}],
        },
        "agent": {"harness": "codex", "model_name": "gpt-5.4", "settings": {"version": ""}},
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {
            "strategy": "swebench_harness",
            "refresh_runtime": True,
            "config": {
                "repo_dir": "/testbed",
                "patch_command": f'bash -lc \'cd {WORK} && set -- git add -A -- . && "$@" && '
                "git diff --cached --binary --ignore-submodules=all'",
                "instance": GYM,
                "exclude_patterns": ["trajectories/**", *CACHES, ".codex/**", "$HOME/**"],
            },
        },
    }


def clawbench(staged):
    """The request of `clawbench.prorl.submit`, package clawbench-eval 0.11.0."""
    return {
        "task_id": "v2-001",
        "instruction": "Order a pizza.",
        "runtime": {
            "backend": "docker",
            "image": "clawbench-harbor:latest",
            "workdir": "/app",
            "network": "host",
            "allow_internet": True,
            "gpus": 0,
            "prepare": [
                {"type": "upload_dir", "source": f"{staged}/workdir", "target": "/app"},
                {"type": "upload_dir", "source": f"{staged}/harbor", "target": "/app/src/harbor"},
                {
                    "type": "upload_file",
                    "source": f"{staged}/instruction.md",
                    "target": "/app/instruction.md",
                },
                {"type": "exec", "command": "bash /app/setup.sh", "cwd": "/app"},
            ],
            "eval_prepare": [],
        },
        "agent": {
            "harness": "shell",
            "custom_shell": {"command": "bash /app/run-prorl.sh", "cwd": "/app"},
            "model_name": "clawbench-policy",
            "env": {"POLAR_MODEL_NAME": "clawbench-policy"},
        },
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {
            "strategy": "harbor",
            "config": {
                "tests_dir": f"{staged}/tests",
                "tests_target": "/tests",
                "verifier_dir": "/logs/verifier",
                "test_command": "bash /tests/test.sh",
                "verifier_timeout": 180,
            },
            "refresh_runtime": False,
            "env": {"CLAWBENCH_JUDGE_MODEL": "grader"},
        },
        "num_samples": 8,
        "timeout_seconds": 900,
        "metadata": {"clawbench_task": "v2-001", "dataset": "clawbench-v2"},
    }


def skill2env(folder):
    """NVIDIA-NeMo/ProRL-Agent-Server@8b1c27d3, examples/skill2env_slime_grpo/polar_config.yaml."""
    return {
        "task_id": "polar-skill2env-grpo-0-0",
        "instruction": "Do it.",
        "runtime": {"backend": "apptainer", "image": f"{folder}/x.sif", "network": "host"},
        "agent": {
            "harness": "mini_swe_agent",
            "settings": {
                "version": "",
                "step_limit": 50,
                "cost_limit": 0,
                "model_kwargs": {"temperature": 1.0, "max_tokens": 4096},
            },
        },
        "builder": {"strategy": "per_request"},
        "evaluator": {
            "strategy": "harbor_rubric",
            "refresh_runtime": False,
            "config": {
                "tests_dir": f"{folder}/tests",
                "judge_base_url": "http://judge/v1",
                "judge_model": "grader",
                "rubric_coefficient": 0.2,
            },
        },
    }


def permitting(folder):
    return SubmissionPolicy(host_network=True, host_paths=(Path(folder),))


def taken(body, folder):
    """The task of a body, which an operator's two settings permit."""
    wanted = PolarTask.model_validate(body)
    assert list(wanted.refused(permitting(folder))) == []
    task, _ = wanted.submission().split()
    assert list(permitting(folder).refused(task)) == []
    open_evaluator(task.evaluator)
    return task


def refused(body, permits):
    wanted = PolarTask.model_validate(body)
    found = dict(wanted.refused(permits))
    return found or dict(permits.refused(wanted.submission().split()[0]))


@pytest.mark.parametrize("harness", MODELS)
def test_polar_calculator_task_is_accepted_for_every_harness(tmp_path, harness):
    task = taken(calculator(harness, tmp_path), tmp_path)
    config = task.evaluator.config
    assert (config["repo"], config["timeout_s"]) == (".", 60.0)
    assert config["expected"] == {"test_calculator": "PASSED"}
    assert f".{harness}/**" in config["exclude"]
    assert (task.runtime.network, task.runtime.workdir) == ("open", WORK)
    DockerRuntime.check(task.runtime)
    if harness == "codex":
        assert task.agent.version == "0.125.0"
        assert task.agent.settings == {"config": {"model_reasoning_effort": "xhigh"}}


def test_polars_swe_gym_config_is_graded_by_swe_gyms_own_tests(tmp_path):
    task = taken(swe_gym(tmp_path), tmp_path)
    config = task.evaluator.config
    assert (task.evaluator.strategy, config["repo"], config["tested"]) == (
        *("swebench", ".", "/testbed"),
    )
    assert "pytest -n0 -rA tests/test_dynamodb/" in config["instance"]["eval_script"]
    assert task.runtime.kwargs == {"binds": [f"{tmp_path}/cli:/opt/node"]}
    assert (task.agent.version, task.agent.settings) == (None, {})


def test_clawbench_task_is_accepted(tmp_path):
    task = taken(clawbench(tmp_path), tmp_path)
    assert (task.agent.harness, task.agent.command) == (
        *("command", "cd /app && bash /app/run-prorl.sh"),
    )
    assert task.evaluator.config == {"tests": f"{tmp_path}/tests", "timeout_s": 180}


@pytest.mark.parametrize(
    "body", [calculator("pi", "/srv/x"), swe_gym("/srv/x"), clawbench("/srv/x")]
)
def test_missing_permission_names_the_operators_setting(body):
    (why,) = refused(body, SubmissionPolicy()).values()
    assert "permits.host_network = true" in why
    assert all(
        "permits.host_paths" in why
        for why in refused(body, SubmissionPolicy(host_network=True)).values()
    )


def test_rubric_with_the_tasks_own_judge_is_refused(tmp_path):
    found = refused(skill2env(tmp_path), permitting(tmp_path))
    assert list(found) == ["evaluator.strategy"]
    assert (
        '[models."grader"] engines = ["openai:http://judge/v1#grader"]'
        in found["evaluator.strategy"]
    )
    body = skill2env(tmp_path) | {"evaluator": {"strategy": "session_completed"}}
    settings = taken(body, tmp_path).agent.settings
    assert settings["config"]["agent"] == {"step_limit": 50, "cost_limit": 0}
    assert settings["config"]["model"]["model_kwargs"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("body", "place", "value", "field"),
    [
        (swe_gym, ("runtime", "kwargs", "volumes"), ["/a:/b"], "runtime.kwargs.volumes"),
        (swe_gym, ("runtime", "kwargs", "volumes"), 7, "runtime.kwargs.volumes"),
        (swe_gym, ("runtime", "workdir"), "/other", "evaluator.config.repo_dir"),
        (swe_gym, (*CONFIG, "patch_command"), "cat p", "evaluator.config.patch_command"),
        (swe_gym, (*CONFIG, "instance"), GYM | {"version": "9"}, "evaluator.config.instance"),
        (swe_gym, (*CONFIG, "instance"), SMITH, "evaluator.config.instance"),
        (clawbench, (*CONFIG, "tests_target"), "/t", "evaluator.config.tests_target"),
        (clawbench, ("agent", "harness"), "codex", "agent.custom_shell"),
    ],
)  # fmt: skip
def test_untranslatable_polar_field_is_refused_by_name(tmp_path, body, place, value, field):
    changed = json.loads(json.dumps(body(tmp_path)))
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    assert field in refused(changed, permitting(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expected_output_json", "no json"),
        ("expected_output_json", [1]),
        ("exclude_patterns", 7),
        ("test_command", None),
        ("repo_dir", ["x"]),
        ("patch_command", 7),
    ],
)
async def test_a_wrong_value_is_answered_with_422_over_http(tmp_path, name, value):
    body = calculator("pi", tmp_path)
    body["evaluator"]["config"][name] = value
    permits = SubmissionPolicy(host_network=True, host_paths=(tmp_path,))
    async with an_app(tmp_path, permits=permits) as http:
        answer = await http.post("/rollout/task/submit", json=body)
    assert answer.status_code == 422, answer.text


async def test_polar_bodies_are_accepted_over_http(tmp_path):
    (tmp_path / "tests").mkdir()
    async with an_app(tmp_path, permits=permitting(tmp_path)) as http:
        for body in (calculator("codex", tmp_path), swe_gym(tmp_path), clawbench(tmp_path)):
            answer = await http.post("/rollout/task/submit", json=body)
            assert (answer.status_code, answer.json()["status"]) == (200, "running"), answer.text
