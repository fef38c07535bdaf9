"""Training on this machine: refusals, and weights on their way to a server."""

import json

import pytest
from tests.cli.models import untrained

from bridle.cli.training import TrainSettings, train_here, with_other_harnesses
from bridle.config import AgentSpec, FieldPolicy, SamplingPolicy, Task
from bridle.errors import ConfigError, EngineError

TASK = Task(task_id="t", instruction="go", num_samples=2)


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


def test_held_out_tasks_are_played_with_every_harness_under_its_label():
    other = AgentSpec(harness="command", command="true")
    both = with_other_harnesses([TASK], {"script": other})
    assert [task.task_id for task in both] == ["t", "script:t"]
    assert [task.agent for task in both] == [TASK.agent, other]
    assert both[1].metadata == {"evaluated_with": "script"}
    assert with_other_harnesses([TASK], {}) == [TASK]
    with pytest.raises(ConfigError, match="no held-out tasks"):
        with_other_harnesses([], {"script": other})


async def test_a_task_that_overrides_top_p_is_refused(tmp_path):
    sampling = SamplingPolicy(top_p=FieldPolicy(mode="override", value=0.9))
    settings = TrainSettings(model=str(tmp_path / "gone"), tasks="x", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"task t samples at top_p 0\.9, and training is for 1"):
        await train_here(settings, [TASK.model_copy(update={"sampling": sampling})])


@pytest.mark.parametrize(("of_task", "mode"), [(0.7, "override"), (1.0, "respect")])
async def test_a_task_that_samples_at_another_temperature_is_refused(tmp_path, of_task, mode):
    sampling = SamplingPolicy(temperature=FieldPolicy(mode=mode, value=of_task))
    task = TASK.model_copy(update={"sampling": sampling})
    settings = TrainSettings(model=str(tmp_path / "gone"), tasks="x", out=str(tmp_path / "out"))
    error, said = (
        (ConfigError, "task t samples at temperature 0.7, and training is for 1")
        if mode == "override"
        else (EngineError, "gone does not exist")
    )
    with pytest.raises(error, match=said):
        await train_here(settings, [task])


def test_the_token_of_a_server_is_in_no_file():
    url = "http://x:the-token-of-a-server@host:8080"
    settings = TrainSettings.model_validate({"model": "m", "tasks": "t", "server": url})
    assert settings.server == url
    assert settings.model_dump(mode="json")["server"] == "http://host:8080"
    assert "the-token" not in settings.model_dump_json()
