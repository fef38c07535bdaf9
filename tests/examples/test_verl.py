"""verl's example: what its script writes and starts, and that verl knows its settings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "verl" / "run.sh"
TRAINER = """
import json, os, sys
from pathlib import Path
Path(os.environ["SAID"]).write_text(json.dumps(sys.argv[1:]))
"""
"""Stands in for verl's `main_ppo`: writes down what it was given."""


@pytest.fixture
def settings(tmp_path):
    """Run the script; the settings that it gives to verl."""
    package = tmp_path / "packages" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package / "main_ppo.py").write_text(TRAINER)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    tasks = [json.dumps({"task_id": name, "instruction": "go"}) for name in "ab"]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "engines.yml").write_text("127.0.0.1:9")  # of a run that ended
    # The environment of the trainers sees our own, but has no `bridle`.
    programs = (str(Path(sys.executable).parent), str(ROOT / ".venv" / "bin"), os.environ["PATH"])
    said = tmp_path / "said.json"
    environment = {
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": str(package.parents[1]),
        "SAID": str(said),
    }
    arguments = ["builtin", "tasks.jsonl", "out", "trainer.nnodes=2"]
    subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, **environment, "PORT": str(free_port())}, cwd=tmp_path, check=True,
    )  # fmt: skip
    return json.loads(said.read_text())


@pytest.mark.timeout(120)
def test_the_verl_example_writes_the_data_set_and_starts_verl_with_the_agent_loop(
    settings, tmp_path
):
    rows = pq.read_table(tmp_path / "out" / "prompts.parquet").to_pylist()
    assert [row["extra_info"]["task_id"] for row in rows] == ["a", "b"]
    assert settings[-1] == "trainer.nnodes=2"
    assert not (tmp_path / "out" / "engines.yml").exists()
    assert f"++actor_rollout_ref.rollout.custom.bridle_tasks={tmp_path / 'tasks.jsonl'}" in settings


@pytest.mark.train
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_verl_accepts_the_settings_of_its_example(settings):
    import hydra

    from bridle.bridges.remote import open_server

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=settings)
    rollout = config.actor_rollout_ref.rollout
    assert config.trainer.use_v1
    (loop,) = json.loads(Path(rollout.agent.agent_loop_config_path).read_text())
    assert loop["name"] == rollout.agent.default_agent_loop
    made = hydra.utils.instantiate(loop, trainer_config=SimpleNamespace(config=config))
    assert [task.task_id for task in made._tasks] == ["a", "b"]
    made._sessions.__exit__()
    open_server.cache_clear()
