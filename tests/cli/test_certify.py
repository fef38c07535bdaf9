"""`bridle certify`: exit codes, tables and JSON for a trainer that agrees and one that does not."""

import json
import shutil
from contextlib import closing
from dataclasses import asdict, replace

import numpy as np
import pytest
from tests.cli.models import untrained
from tests.trajectory.planted import PLANTED, run

from bridle.bridges.parquet import read_logprobs, write_logprobs, write_trajectories
from bridle.dashboard.folder import FolderSource
from bridle.dashboard.source import CERTIFIED
from bridle.embedded.model import load_tokenizer
from bridle.node.results import sessions, trajectory_of
from bridle.training.forward import recompute
from bridle.training.grpo import Learner
from bridle.training.loop import save_checkpoint
from bridle.training.settings import GrpoSettings
from bridle.trajectory.sample import Trajectory


@pytest.fixture
def files(tmp_path):
    """Write a planted run; the arguments of `bridle certify` for it."""

    def written(made):
        sessions_ = [Trajectory(t.trace_id, "COMPLETED", (t,), 1.0, None, {}) for t in made.traces]
        write_trajectories(tmp_path / "trajectories.parquet", sessions_)
        write_logprobs(tmp_path / "logprobs.parquet", made.answers, made.trainer)
        (tmp_path / "engine.toml").write_text('dtype = "float32"\nweights = "w3"\n')
        names = ("trajectories.parquet", "logprobs.parquet", "--engine", "engine.toml")
        return [name if name.startswith("-") else tmp_path / name for name in names]

    return written


@pytest.fixture
def played(finished_run, tmp_path):
    """A run of one's own: its certificate is written into it."""
    return shutil.copytree(finished_run, tmp_path / "run")


def test_a_trainer_whose_logprobs_agree_with_the_rollout_is_certified(say, files):
    said = say("certify", *files(run(0)))
    assert said.code == 0, said.err
    assert "trainer and rollout agree" in said.out
    assert "dtype" in said.out


def test_a_logprob_mismatch_exits_with_code_1_and_reports_cause_and_turns(say, files):
    arguments = files(PLANTED["temperature"](0))
    said = say("certify", *arguments)
    assert said.code == 1
    assert "1 mismatches" in said.out
    assert "logprob + entropy explains" in said.out
    assert "10 of" in said.out
    assert say("certify", *arguments, "--max-kl", "10").code == 0
    assert say("certify", *arguments, "--max-kl", "1e-4").code == 1
    found = say("certify", *arguments, "--json").json
    assert not found["faithful"]
    assert found["mismatches"][0]["causes"][0]["cause"] == "temperature"
    assert sum(turn["kl_share"] for turn in found["turns"]) == pytest.approx(1)
    facts = {fact["name"]: fact for fact in found["facts"]}
    assert facts["temperature"]["same"] is False
    assert facts["weights"]["same"] is True


def test_tokens_without_a_logprob_of_the_trainer_are_reported(say, files, tmp_path):
    arguments = files(run(0))
    answers, facts = read_logprobs(tmp_path / "logprobs.parquet")
    write_logprobs(tmp_path / "logprobs.parquet", answers[1:], facts)
    assert "have no logprob of the trainer" in say("certify", *arguments).out


def test_the_reference_trainer_computes_the_logprobs_of_a_run(say, played, tmp_path):
    """The scripted engine's logprobs are no model's, so the two disagree."""
    model = untrained(tmp_path / "model")
    said = say("certify", played, "--model", model, "--write", tmp_path / "l.parquet")
    assert said.code == 1, said.err
    answers, facts = read_logprobs(tmp_path / "l.parquet")
    assert (facts.dtype, facts.padding, facts.temperature) == ("float32", "right", 1.0)
    assert [len(one or "") for one in (facts.weights, facts.template)] == [64, 64]
    traces = [t for one in map(trajectory_of, sessions(played)) for t in one.traces]
    expected = {
        one.trace_id: one for one in recompute(Learner.load(model, GrpoSettings()).model, traces)
    }
    for answer in answers:
        assert np.allclose(answer.logprobs, expected[answer.trace_id].logprobs, atol=1e-5)
    again = say("certify", played, tmp_path / "l.parquet", "--json").json
    assert again["tokens"] == sum(len(answer.positions) for answer in answers)
    with closing(FolderSource(played)) as source:
        shown = source.report(CERTIFIED, "")
    assert shown is not None
    assert shown.trainer == str(tmp_path / "l.parquet")
    reply = json.loads(json.dumps(asdict(shown)))
    assert reply | again == reply


def test_logprobs_of_a_checkpoint_are_recomputed_in_its_training_dtype(say, played, tmp_path):
    plain = untrained(tmp_path / "model")
    learner = Learner.load(plain, GrpoSettings(dtype="bfloat16"))
    saved = save_checkpoint(tmp_path, learner, load_tokenizer(plain), {"step": 1}, keep=1)
    found = []
    for model in (plain, saved):
        file = tmp_path / "l.parquet"
        assert say("certify", played, "--model", model, "--write", file).code == 1
        found.append(read_logprobs(file))
    (answers, facts), (rough, others) = found
    assert (facts.dtype, others.dtype, others.version) == ("float32", "bfloat16", 0)
    pairs = zip(answers, rough, strict=True)
    apart = np.concatenate([one.logprobs - two.logprobs for one, two in pairs])
    assert 1e-5 < np.abs(apart).max() < 0.1


def test_certify_refuses_conflicting_arguments_and_a_faulty_engine_file(say, files, tmp_path):
    run_, logprobs, _, engine = files(run(0))
    assert "give either a file" in say("certify", run_).err
    assert "give either a file" in say("certify", run_, logprobs, "--model", tmp_path).err
    assert "give --model too" in say("certify", run_, logprobs, "--write", "x").err
    engine.write_text('flavour = "sour"')
    said = say("certify", run_, logprobs, "--engine", engine)
    assert (said.code, "unknown fact 'flavour'" in said.err) == (2, True)
    engine.write_text("= no")
    assert say("certify", run_, logprobs, "--engine", engine).code == 2


def test_certify_exits_with_code_2_if_the_model_or_the_logprobs_do_not_exist(say, files, tmp_path):
    run_ = files(run(0))[0]
    for arguments, error in (
        (("--model", tmp_path / "gone"), "gone does not exist"),
        (("--model", tmp_path), f"{tmp_path} is not a model folder: it has no config.json"),
        ((tmp_path / "gone",), "gone: no such file"),
    ):
        said = say("certify", run_, *arguments)
        assert (said.code, error in said.err) == (2, True), said.err


def test_certify_with_a_model_refuses_sessions_of_two_temperatures(say, files, tmp_path):
    made = run(0)
    first = made.traces[0]
    sampling = {"sampling": {"temperature": [0.5, 1.0]}}
    mixed = replace(first, metadata=first.metadata | sampling)
    arguments = files(replace(made, traces=[mixed, *made.traces[1:]]))
    (tmp_path / "config.json").write_text("{}")
    said = say("certify", arguments[0], "--model", tmp_path)
    assert (said.code, "temperatures 0.5, 1" in said.err) == (2, True)


def test_certify_refuses_a_run_in_which_no_token_trains(say, tmp_path):
    empty = Trajectory("s", "ERROR", (), None, None, {})
    write_trajectories(tmp_path / "trajectories.parquet", [empty])
    said = say("certify", tmp_path / "trajectories.parquet", tmp_path / "l.parquet")
    assert "no trace of its 1 sessions has a token to train on" in said.err
