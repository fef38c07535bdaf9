"""A training with its sessions in this process or on a rollout server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers
from examples.demo.lookups import lookups
from examples.demo.policy import lookup_task
from tests.cli.models import untrained
from tests.server.house import with_token
from tests.training.server import Death, a_server, tasks

from bridle.cli.train import (
    LocalBackend,
    ServerBackend,
    TrainSettings,
    WeightFolders,
    open_backend,
    train_here,
    with_other_harnesses,
)
from bridle.config import AgentSpec, FieldPolicy, SamplingPolicy, Task
from bridle.engines.base import is_adapter
from bridle.errors import ConfigError
from bridle.folders import FolderLock
from bridle.training.grpo import Learner
from bridle.training.loop import checkpoints, read_state
from bridle.training.settings import GrpoSettings

TASK = Task(task_id="t", instruction="go", num_samples=2)


async def test_a_missing_model_folder_is_refused_before_the_training_starts(tmp_path):
    settings = TrainSettings(model=str(tmp_path / "gone"), tasks="x", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="gone does not exist"):
        await train_here(settings, [TASK])
    assert not (tmp_path / "out").exists()


async def test_a_folder_that_holds_a_training_is_not_overwritten(tmp_path):
    saved = tmp_path / "out" / "checkpoints" / "step-000004"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"step": 4}))
    settings = TrainSettings(model="m", tasks="x", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="holds a training; resume it with --resume"):
        await train_here(settings, [TASK])


async def test_a_folder_whose_training_runs_is_refused_and_left_as_it_is(tmp_path):
    model, out = untrained(tmp_path / "model"), tmp_path / "out"
    settings = TrainSettings(model=str(model), tasks="x", out=str(out))
    with FolderLock(out):
        with pytest.raises(ConfigError, match=rf"out is in use by .*{os.getpid()}"):
            await train_here(settings, [TASK], resume=True)
        assert [path.name for path in out.iterdir()] == [".lock"]


async def test_a_training_without_tasks_leaves_no_folder(tmp_path):
    model = untrained(tmp_path / "model")
    settings = TrainSettings(model=str(model), tasks="x", out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no tasks to train on"):
        await train_here(settings, [])
    assert not (tmp_path / "out").exists()


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


def test_held_out_tasks_are_copied_for_each_harness_under_its_label():
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
    with pytest.raises(ConfigError, match=r"task 't' samples at top_p 0\.9, and training is for 1"):
        await train_here(settings, [TASK.model_copy(update={"sampling": sampling})])


@pytest.mark.parametrize(("of_task", "mode"), [(0.7, "override"), (1.0, "respect")])
async def test_a_task_that_samples_at_another_temperature_is_refused(tmp_path, of_task, mode):
    sampling = SamplingPolicy(temperature=FieldPolicy(mode=mode, value=of_task))
    task = TASK.model_copy(update={"sampling": sampling})
    settings = TrainSettings(model=str(tmp_path / "gone"), tasks="x", out=str(tmp_path / "out"))
    error, said = (
        (ConfigError, "task 't' samples at temperature 0.7, and training is for 1")
        if mode == "override"
        else (ConfigError, "gone does not exist")
    )
    with pytest.raises(error, match=said):
        await train_here(settings, [task])


def test_server_token_is_left_out_of_serialised_settings():
    url = "http://x:the-token-of-a-server@host:8080"
    settings = TrainSettings.model_validate({"model": "m", "tasks": "t", "server": url})
    assert settings.server == url
    assert settings.model_dump(mode="json")["server"] == "http://host:8080"
    assert "the-token" not in settings.model_dump_json()


@dataclass
class Taker:
    """A gateway that takes weights."""

    taken: list[tuple[Any, int]] = field(default_factory=list)
    found: list[bool] = field(default_factory=list)

    async def update_weights(self, source, version, **_):
        self.taken.append((source, version))
        self.found.append(isinstance(source, Path) and (source / "model.safetensors").is_file())


@pytest.mark.parametrize("embedded", [True, False])
async def test_weights_go_to_an_embedded_engine_in_memory_and_to_others_through_one_folder(
    embedded, tmp_path
):
    learner = Learner.load(untrained(tmp_path / "model"), GrpoSettings())
    gateway = Taker()
    weights = WeightFolders(tmp_path / "weights", tmp_path / "model")
    place = LocalBackend(gateway, None, tmp_path, embedded, weights)  # type: ignore[arg-type]  # a fake
    for version in (1, 2):
        learner.version = version
        await place.publish(learner)

    assert [version for _, version in gateway.taken] == [1, 2]
    if embedded:
        assert set(gateway.taken[0][0]) == set(learner.model.state_dict())
    else:
        assert gateway.found == [True, True]
        last = gateway.taken[1][0]
        assert list((tmp_path / "weights").iterdir()) == [last]
        assert transformers.AutoModelForCausalLM.from_pretrained(last) is not None


async def test_a_killed_training_on_a_server_resumes_from_its_last_checkpoint(tmp_path):
    model = untrained(tmp_path / "model")
    settings = {
        "model": str(model),
        "tasks": "x",
        "out": str(tmp_path / "out"),
        "grpo": {"learning_rate": 1e-3},
    }
    loop = {"groups_per_step": 2, "max_lag": 1, "checkpoint_every": 1}

    async def train(steps, tell=lambda _: None, *, resume=False):
        wanted = {**settings, "server": with_token(client.url), "loop": {**loop, "steps": steps}}
        return await train_here(
            TrainSettings.model_validate(wanted), tasks(), resume=resume, tell=tell
        )

    def die(course):
        if course.step == 2:
            raise Death

    async with a_server(tmp_path) as client:
        with pytest.raises(Death):
            await train(4, die)
        killed = len(client.workers.ran)
        trained = await train(4, resume=True)
        ran, asked = client.workers.ran, client.workers.asked
        left = [one["task_id"] async for one in client.tasks() if not one["acked_at"]]

    assert [one["step"] for one in trained.course.steps] == [1, 2, 3, 4]
    assert [one["groups"] for one in trained.course.steps] == [2, 2, 2, 2]
    assert all(one["update"] for one in trained.course.steps)
    assert killed < len(ran)
    assert left == []
    versions = [one.version for one in asked]
    assert versions == [0, 1, 2, 1, 2, 3, 4]  # version 2 of the first life is lost
    assert all(one.weights is not None for one in asked)
    assert [path.name for path in (tmp_path / "out" / "weights").iterdir()] == ["000004"]


async def test_a_server_and_engines_at_once_are_refused(tmp_path):
    settings = TrainSettings(
        model="m",
        tasks="x",
        out=str(tmp_path),
        server="http://127.0.0.1:1",
        engines=("scripted:x",),
    )
    with pytest.raises(ConfigError, match="either `server` or `engines`"):
        async with open_backend(settings, tmp_path):
            pass


async def test_name_of_a_training_depends_only_on_its_folder(tmp_path):
    async def name_in(out):
        settings = TrainSettings(model="m", tasks="x", out=str(out), server="http://127.0.0.1:1")
        async with open_backend(settings, out) as backend:
            assert isinstance(backend, ServerBackend)
            return backend.training

    first = await name_in(tmp_path / "a")
    assert await name_in(tmp_path / "a") == first != await name_in(tmp_path / "b")
    assert "." not in first
    (tmp_path / "b" / "training.name").write_text("")  # its process died while it wrote
    assert await name_in(tmp_path / "b") == await name_in(tmp_path / "b") != ""


@contextmanager
def process(*arguments):
    """A command of ours in a process; killed when it is left."""
    command = [sys.executable, "-m", "bridle.cli", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def url_of(server):
    """Return what a server tells when it is up."""
    said = []
    for line in server.stderr:
        if found := re.search(r"rollout server at (\S+),", line):
            return found[1]
        said.append(line)
    raise AssertionError("".join(said))


def steps_of(course):
    """The steps that a training's file tells of."""
    try:
        return len(json.loads(course.read_text())["steps"])
    except (OSError, ValueError):  # not there yet, or half of it
        return 0


@pytest.mark.train
@pytest.mark.timeout(400)
@pytest.mark.parametrize("adapter", [False, True])
def test_a_trainer_that_is_killed_again_and_again_trains_on_every_group_once(tmp_path, adapter):
    from examples.demo.model import demo_model

    model, files, out = demo_model(), tmp_path / "files", tmp_path / "out"
    made = [lookup_task(one, files) for one in lookups(10, seed=30_000)]
    task_file = tmp_path / "tasks.jsonl"
    task_file.write_text("".join(task.model_dump_json() + "\n" for task in made))
    config = tmp_path / "train.toml"
    config.write_text("[loop]\ncheckpoint_every = 2\n")
    serve = ("serve", "--engine", f"embedded:{model}", "--port", 0, "--data", tmp_path / "data")
    with process(*serve, "--allow-path", tmp_path) as server:
        url = url_of(server)
        train = [
            *("train", config, "--model", model, "--tasks", task_file, "--server", url),
            *("--out", out, "--samples", 4, "--groups", 2, "--steps", 5, "--resume", "--json"),
            *("--learning-rate", "1e-4", *(["--lora"] if adapter else [])),
        ]
        for killed_at in (1, 3):
            with process(*train) as trainer:
                while steps_of(out / "course.json") < killed_at:
                    assert trainer.poll() is None, trainer.communicate()[1]
                    time.sleep(0.02)
        with process(*train) as trainer:
            _, said = trainer.communicate()
            assert trainer.returncode == 0, said

    saved = checkpoints(out / "checkpoints")[-1]
    assert is_adapter(saved) == adapter
    state = read_state(saved)
    assert [one["step"] for one in state["course"]["steps"]] == [1, 2, 3, 4, 5]
    assert state["cursor"] == {"next": 10, "open": []}
    assert {record["groups"] for record in state["history"].values()} == {1}
    assert len(state["history"]) == 10
    updates = [one["update"] for one in state["course"]["steps"] if one["update"]]
    assert max(one["logprob_error"] or 0 for one in updates) < 1e-4


@pytest.mark.train
@pytest.mark.timeout(600)
async def test_an_adapter_learns_on_the_embedded_engine(tmp_path):
    from examples.demo.model import demo_model
    from tests.vllm.learning import GROUPS, SAMPLES, SEED, STEPS, UNTRAINED, easy

    made = [easy(one, tmp_path / "tasks") for one in lookups(STEPS * GROUPS, seed=SEED)]
    settings = {
        "model": str(demo_model()),
        "tasks": "easy lookups",
        "out": str(tmp_path / "out"),
        "samples": SAMPLES,
        "concurrency": 16,
        "grpo": {"learning_rate": 8e-3},
        "loop": {"steps": STEPS, "groups_per_step": GROUPS, "checkpoint_every": 0},
        "lora": {"rank": 8, "alpha": 16},
    }
    trained = await train_here(TrainSettings.model_validate(settings), made)

    rewards = [one["reward"] for one in trained.course.steps]
    assert max(sum(rewards[at : at + 2]) / 2 for at in range(2, STEPS - 1)) > UNTRAINED + 0.1
    updates = [one["update"] for one in trained.course.steps if one["update"]]
    assert len(updates) > 2
    assert max(one["logprob_error"] or 0 for one in updates) < 1e-4
    assert is_adapter(trained.checkpoint)
