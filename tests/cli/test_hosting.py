import json
import pickle
import sys

import pytest
from tests.node.house import AGENT

from bridle.cli.config import load_config
from bridle.cli.server import OpensNode, workers_of
from bridle.config import AgentSpec, Task
from bridle.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "Well."}]}]}))
    file = tmp_path / "bridle.toml"
    file.write_text(f'engines = ["scripted:{script}"]\n[executor.node]\npost_slots = 3\n')
    return load_config(file)


async def test_a_node_is_opened_from_a_config_that_travelled(tmp_path, config):
    opens = pickle.loads(pickle.dumps(OpensNode(config)))  # noqa: S301 - our own
    async with opens(tmp_path / "n", cpus=1.5) as node:
        assert (node.settings.run_slots, node.settings.post_slots) == (3, 3)
        task = Task(task_id="t", instruction="x", agent=AgentSpec(harness="command", command=AGENT))
        assert (await node.run(task, run_id="s")).status == "COMPLETED"
        assert node.store.outcome("s") is not None
    assert (tmp_path / "n" / "capture.sqlite").exists()


async def test_sessions_are_computed_in_this_process_unless_a_word_says_otherwise(tmp_path, config):
    async with workers_of(config, tmp_path, "owner") as workers:
        assert not workers.outlive
        assert not workers.expect("s")
        assert workers.capacity > 0


async def test_without_ray_the_extra_is_named(tmp_path, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "bridle.node.ray", raising=False)
    on_ray = config.model_copy(
        update={"executor": config.executor.model_copy(update={"kind": "ray"})}
    )
    with pytest.raises(ConfigError, match=r"\[ray\]"):
        async with workers_of(on_ray, tmp_path, "owner"):
            raise AssertionError
