"""Checkpoints are whole, loadable by engines, and bring a learner back to where it was."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from tests.training.made import tiny_model
from tests.training.test_grpo import a_batch

from bridle.config import builtin_tokenizer_dir
from bridle.embedded.model import load_tokenizer
from bridle.errors import TrainingError
from bridle.training.grpo import Learner
from bridle.training.loop import checkpoints, read_state, restore, save_checkpoint
from bridle.training.settings import GrpoSettings

SETTINGS = GrpoSettings(learning_rate=1e-2)
TOKENIZER = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())


def flat(learner):
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_learner_restored_from_a_checkpoint_continues_bit_for_bit(tmp_path):
    learner = Learner(tiny_model(), SETTINGS)
    batch = a_batch(learner.model, SETTINGS)
    learner.update(batch)
    saved = save_checkpoint(tmp_path, learner, TOKENIZER, {"step": 1, "mine": [1]}, keep=2)
    noise = torch.rand(3)
    learner.update(batch)

    other = Learner(loaded(saved), SETTINGS)
    assert not any(p.data_ptr() % 64 for p in other.model.parameters())  # else some CPUs differ
    state = restore(other, saved)
    assert torch.equal(torch.rand(3), noise)
    other.update(batch)

    assert torch.equal(flat(other), flat(learner))
    known = {"version": 1, "optimizer_steps": 1, "dtype": "float32", "replay_experts": True}
    assert state == {"step": 1, "mine": [1], **known}
    assert (other.version, other.steps) == (2, 2)


def test_only_the_newest_checkpoints_are_kept_and_partial_ones_are_not_listed(tmp_path):
    learner = Learner(tiny_model(), SETTINGS)
    (tmp_path / "step-000009.part").mkdir()
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, learner, TOKENIZER, {"step": step}, keep=2)

    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000010"]
    assert checkpoints(tmp_path / "none") == []
    assert len(load_tokenizer(checkpoints(tmp_path)[0])) == len(TOKENIZER)


@pytest.mark.parametrize("survives", range(4))
def test_a_death_while_a_checkpoint_is_written_anew_leaves_a_whole_one(
    tmp_path, survives, monkeypatch
):
    """It comes instead of the step that renames or removes a folder, after so many of these."""

    class Death(BaseException):
        pass

    done = []

    def mortal(step):
        def counted(path, *args, **more):
            if len(done) == survives:
                raise Death
            if Path(path).exists():
                done.append(path)
            return step(path, *args, **more)

        return counted

    learner = Learner(tiny_model(), SETTINGS)
    save_checkpoint(tmp_path, learner, TOKENIZER, {"step": 1}, keep=1)
    with monkeypatch.context() as patch, suppress(Death):
        patch.setattr(Path, "rename", mortal(Path.rename))
        patch.setattr(shutil, "rmtree", mortal(shutil.rmtree))
        save_checkpoint(tmp_path, learner, TOKENIZER, {"step": 1}, keep=1)

    [whole] = checkpoints(tmp_path)
    assert restore(Learner(loaded(whole), SETTINGS), whole)["step"] == 1
    for step in (1, 2):
        saved = save_checkpoint(tmp_path, learner, TOKENIZER, {"step": step}, keep=1)
        assert [*tmp_path.iterdir()] == [*checkpoints(tmp_path)] == [saved]


def test_weights_with_nan_are_not_saved_as_a_checkpoint(tmp_path):
    learner = Learner(tiny_model(), SETTINGS)
    with torch.no_grad():
        learner.model.lm_head.weight[0, 0] = torch.nan

    with pytest.raises(TrainingError, match=r"lm_head\.weight has values that are not finite"):
        save_checkpoint(tmp_path, learner, TOKENIZER, {"step": 1}, keep=2)
    assert checkpoints(tmp_path) == []


def test_a_folder_without_a_checkpoint_and_one_of_another_model_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="is not a checkpoint"):
        read_state(tmp_path)

    learner = Learner(tiny_model(), SETTINGS)
    learner.update(a_batch(learner.model, SETTINGS))
    saved = save_checkpoint(tmp_path, learner, TOKENIZER, {"step": 1}, keep=1)
    model = tiny_model()
    model.resize_token_embeddings(60)
    with pytest.raises(TrainingError, match="of another model"):
        restore(Learner(model, SETTINGS), saved)
    (saved / "optimizer.safetensors").unlink()
    with pytest.raises(TrainingError, match="cannot be read"):
        restore(learner, saved)
