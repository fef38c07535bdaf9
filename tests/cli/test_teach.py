"""`bridle teach`: a teacher's logprobs of captured sessions, by each engine that can score."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from tests.cli.models import untrained
from tests.engines.teaching import in_thread, teaching

from bridle.config import builtin_tokenizer_dir


@pytest.fixture
def teacher(tmp_path):
    """An untrained model with the tokenizer of the run, file by file."""
    folder = untrained(tmp_path / "teacher")
    shutil.copy(builtin_tokenizer_dir() / "tokenizer.json", folder)
    return folder


@pytest.fixture(params=["embedded:{folder}", "{url}", "sglang:{url}"])
def spec(request, teacher):
    """The teacher in this process, and behind a server in vLLM's and in SGLang's shape."""
    with in_thread(teaching(teacher)) as url:
        yield request.param.format(folder=teacher, url=url)


def test_teacher_logprobs_equal_those_of_a_forward_pass_over_the_exact_ids(
    say, finished_run, teacher, spec, tmp_path
):
    file = tmp_path / "teacher.parquet"
    words = ("--teacher", spec, "--top", 3, "--out", file, "--json")
    said = say("teach", finished_run, *words)
    assert said.code == 0, said.err
    rows = pq.read_table(file).to_pylist()
    traces = pq.read_table(finished_run / "trajectories.parquet").to_pylist()
    assert [row["trace_id"] for row in rows] == [trace["trace_id"] for trace in traces]
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher).eval()
    for row, trace in zip(rows, traces, strict=True):
        ids = torch.tensor([[*trace["prompt_ids"], *trace["response_ids"]]])
        with torch.no_grad():
            table = torch.log_softmax(model(ids, use_cache=False).logits[0].double(), -1)
        start = len(trace["prompt_ids"])
        expected = [float(table[at - 1, ids[0, at]]) for at in range(start, ids.shape[1])]
        assert row["teacher_logprobs"] == pytest.approx(expected, abs=1e-4)
        best = table[start - 1 : -1].topk(3)
        assert row["teacher_topk_ids"] == best.indices.tolist()
        found = [value for at in row["teacher_topk_logprobs"] for value in at]
        assert found == pytest.approx(best.values.flatten().tolist(), abs=1e-4)
    (first, *_) = said.json["sessions"]
    mask = traces[0]["loss_mask"]
    apart = [
        own - of
        for own, of, trained in zip(
            traces[0]["response_logprobs"], rows[0]["teacher_logprobs"], mask, strict=True
        )
        if trained
    ]
    assert first["tokens"] == len(apart)
    assert first["reverse_kl"] == pytest.approx(sum(apart) / len(apart), abs=1e-4)


def test_a_teacher_with_another_tokenizer_is_refused(say, finished_run, teacher, tmp_path):
    path = teacher / "tokenizer.json"
    changed = json.loads(path.read_text())
    changed["added_tokens"] = []
    path.write_text(json.dumps(changed))
    file = tmp_path / "teacher.parquet"
    said = say("teach", finished_run, "--teacher", f"embedded:{teacher}", "--out", file)
    assert said.code == 2
    assert "has another tokenizer than session" in " ".join(said.err.split())
    assert not file.exists()


@pytest.mark.parametrize("tells_folder", [True, False])
@pytest.mark.parametrize("form", ["{}", "sglang:{}"])
def test_a_served_teacher_with_another_tokenizer_is_refused(
    say, finished_run, teacher, tmp_path, form, tells_folder
):
    changed = json.loads((teacher / "tokenizer.json").read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:20]
    (teacher / "tokenizer.json").write_text(json.dumps(changed))
    file = tmp_path / "teacher.parquet"
    with in_thread(teaching(teacher, tells_folder=tells_folder)) as url:
        said = say("teach", finished_run, "--teacher", form.format(url), "--out", file)
    assert said.code == 2
    assert "has another tokenizer than session" in " ".join(said.err.split())
    assert not file.exists()


def test_a_teacher_server_whose_tokenizer_cannot_be_compared_is_refused(
    say, finished_run, teacher, tmp_path
):
    stub = teaching(teacher)
    del stub.replies["/tokenize"]
    file = tmp_path / "teacher.parquet"
    with in_thread(stub) as url:
        said = say("teach", finished_run, "--teacher", url, "--out", file)
    assert said.code == 2
    assert "nothing for us to compare" in " ".join(said.err.split())
    assert not file.exists()


def test_a_teacher_engine_that_cannot_score_is_refused_with_the_supported_forms(say, finished_run):
    said = say("teach", finished_run, "--teacher", "scripted:x")
    assert said.code == 2
    assert "known forms: embedded:DIR, http://HOST:PORT" in " ".join(said.err.split())
