"""The paper's run: a dry run checks everything but GPUs, images and weights."""

import importlib.util
import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridle.datasets.jsonl import load_tasks

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "swe-grpo"
PATCH = "diff --git a/t/a.py b/t/a.py\n--- a/t/a.py\n+++ b/t/a.py\n@@ -1 +1 @@\n-x\n+y\n"
ROW = {
    "repo": "org/repo",
    "version": "1.0",
    "base_commit": "abc",
    "problem_statement": "It breaks.",
    "test_patch": PATCH,
    "FAIL_TO_PASS": ["t/a.py::new"],
    "PASS_TO_PASS": [],
    "image": "org/image:1",
    "eval_script": "pytest -rA",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("swe_grpo", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path):
    rows = [{**ROW, "instance_id": f"org__repo-{n}"} for n in range(2)]
    (tmp_path / "swe.json").write_text(json.dumps(rows))
    (tmp_path / "held-out.json").write_text(json.dumps([{**ROW, "instance_id": "org__repo-9"}]))
    sets = ["--tasks", str(tmp_path / "swe.json"), "--held-out", str(tmp_path / "held-out.json")]
    return [*sets, "--out", str(tmp_path / "out"), "--dry-run"]


@pytest.mark.parametrize("trainer", ["slime", "verl"])
@pytest.mark.parametrize("harness", ["codex", "claude_code", "qwen_code", "pi"])
def test_a_swe_grpo_dry_run_writes_tasks_commands_and_valid_scripts(
    run, arguments, tmp_path, harness, trainer
):
    chosen = ["--harness", harness, "--trainer", trainer, "--count", "2"]
    assert run.main([*arguments, *chosen]) == 0
    folder = tmp_path / "out" / f"{harness}-{trainer}"
    tasks = load_tasks(folder / "tasks.jsonl")
    assert [task.agent.harness for task in tasks] == [harness] * 2
    assert {task.budgets.agent_s for task in tasks} == {2400}
    assert not any(task.evaluator.trusted for task in tasks)
    assert {task.evaluator.strategy for task in tasks} == {"swebench"}
    (held,) = load_tasks(folder / "held-out.jsonl")
    assert held.task_id == "org__repo-9"
    command = shlex.split((folder / "command.sh").read_text())
    assert any(str(folder / "held-out-prompts") in word for word in command)
    assert "docker pull --quiet org/image:1\n" in (folder / "prepare.sh").read_text()
    for script in ("prepare", "export"):
        subprocess.run(["bash", "-n", folder / f"{script}.sh"], check=True)
    assert str(folder / "exported") in (folder / "export.sh").read_text()
    assert any("bridle.bridges" in word or "bridle_server=" in word for word in command)


def test_the_paper_s_hyperparameters_are_in_the_trainer_commands(run, arguments, tmp_path):
    for trainer in ("slime", "verl"):
        assert run.main([*arguments, "--harness", "pi", "--trainer", trainer, "--count", "2"]) == 0
    slime, verl = (
        (tmp_path / "out" / f"pi-{trainer}" / "command.sh").read_text()
        for trainer in ("slime", "verl")
    )
    for words in ("--rollout-batch-size 4", "--n-samples-per-prompt 16", "--use-tis",
                  "--actor-num-gpus-per-node 8", "--global-batch-size 64",
                  "--eval-interval 20"):  # fmt: skip
        assert words in slime
    for word in ("data.train_batch_size=4", "rollout.n=16", "rollout_is=token",
                 "trainer.n_gpus_per_node=8", "rollout_is_threshold=2.0",
                 "trainer.test_freq=20"):  # fmt: skip
        assert word in verl


def test_a_training_task_among_the_held_out_ones_is_refused(run, arguments, tmp_path, capsys):
    (tmp_path / "held-out.json").write_text((tmp_path / "swe.json").read_text())
    assert run.main([*arguments, "--harness", "pi", "--trainer", "slime", "--count", "2"]) == 1
    assert "org__repo-0: it is held out, and trains" in capsys.readouterr().err


def test_wrong_swe_grpo_arguments_are_reported_with_exit_code_1(run, arguments, capsys):
    assert run.main([*arguments, "--harness", "pi", "--trainer", "slime"]) == 1
    assert "2 tasks, not 293" in capsys.readouterr().err
    wrong = [*arguments[2:], "--tasks", "nowhere.json", "--harness", "pi", "--trainer", "verl"]
    assert run.main(wrong) == 1
    assert "no such file" in capsys.readouterr().err


def test_swe_grpo_without_a_dry_run_fails_when_model_weights_are_missing(run, arguments, capsys):
    chosen = [*arguments[:-1], "--count", "2", "--harness", "pi", "--trainer", "slime"]
    assert run.main(chosen) == 1
    assert "no model in models/Qwen3.5-4B" in capsys.readouterr().err


@pytest.mark.train
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_verl_accepts_the_swe_grpo_settings_and_starts_the_agent_loop(run, arguments, tmp_path):
    import hydra

    from bridle.bridges.remote import open_server

    assert run.main([*arguments, "--harness", "pi", "--trainer", "verl", "--count", "2"]) == 0
    command = shlex.split((tmp_path / "out" / "pi-verl" / "command.sh").read_text())
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=command[3:])
    rollout = config.actor_rollout_ref.rollout
    assert config.trainer.use_v1
    (loop,) = json.loads(Path(rollout.agent.agent_loop_config_path).read_text())
    assert loop["name"] == rollout.agent.default_agent_loop
    made = hydra.utils.instantiate(loop, trainer_config=SimpleNamespace(config=config))
    assert [task.task_id for task in made._tasks] == ["org__repo-0", "org__repo-1", "org__repo-9"]
    made._sessions.__exit__()
    open_server.cache_clear()
