"""What a training on this machine refuses, and how weights get to a server."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.cli.models import untrained

from bridle.cli.training import Place, TrainSettings, _publisher, train_here
from bridle.config import Task
from bridle.errors import ConfigError, EngineError
from bridle.lifecycle.events import Events
from bridle.training.grpo import Learner
from bridle.training.settings import GrpoSettings

TASK = Task(task_id="t", instruction="go", num_samples=2)


@dataclass
class Taker:
    """A gateway that takes weights."""

    taken: list[tuple[Any, int]] = field(default_factory=list)
    found: list[bool] = field(default_factory=list)

    async def update_weights(self, source, version, **_):
        self.taken.append((source, version))
        self.found.append(isinstance(source, Path) and (source / "model.safetensors").is_file())


@pytest.mark.parametrize("embedded", [True, False])
async def test_weights_go_by_memory_or_through_a_folder_that_the_next_one_replaces(
    embedded, tmp_path
):
    learner = Learner.load(untrained(tmp_path / "model"), GrpoSettings())
    gateway = Taker()
    place = Place(gateway, None, Events(), tmp_path, embedded)  # type: ignore[arg-type]  # a fake
    publish = _publisher(place, learner, tmp_path / "out")
    for version in (1, 2):
        learner.version = version
        await publish(learner)

    assert [version for _, version in gateway.taken] == [1, 2]
    if embedded:
        assert set(gateway.taken[0][0]) == set(learner.model.state_dict())
    else:
        assert gateway.found == [True, True]
        last = gateway.taken[1][0]
        assert list((tmp_path / "out" / "weights").iterdir()) == [last]
        assert transformers.AutoModelForCausalLM.from_pretrained(last) is not None


async def test_a_folder_without_a_model_is_named_before_anything_runs(tmp_path):
    settings = TrainSettings(model=str(tmp_path / "gone"), tasks="x", out=str(tmp_path / "out"))
    with pytest.raises(EngineError, match="gone does not exist"):
        await train_here(settings, [TASK])
    assert not (tmp_path / "out").exists()


async def test_a_folder_that_holds_a_training_is_not_overwritten(tmp_path):
    saved = tmp_path / "out" / "checkpoints" / "step-000004"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"step": 4}))
    settings = TrainSettings(model="m", tasks="x", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="holds a training; go on with it by --resume"):
        await train_here(settings, [TASK])


async def test_an_engine_with_another_tokenizer_is_refused(tmp_path):
    model, other = untrained(tmp_path / "model"), untrained(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = TrainSettings(
        model=str(model), tasks="x", out=str(tmp_path / "out"), engines=(f"embedded:{other}",)
    )
    with pytest.raises(ConfigError, match="another tokenizer than the model"):
        await train_here(settings, [TASK])
