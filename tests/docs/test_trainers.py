"""The recipes for trainers run as they stand on their pages."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.bridges.by_hand import group, rows, session, trace
from tests.cli.models import untrained

from bridle.bridges.parquet import write_trajectories

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"


def blocks(page):
    """The Python of a page."""
    text = (GUIDES / page).read_text()
    return "\n".join(re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE))


@pytest.fixture
def parquet_file(tmp_path):
    path = tmp_path / "t.parquet"
    trajectories = [
        session("a", 1.0, trace("a0", routed_experts=rows()), trace("a1")),
        session("b", 0.0, trace("b0")),
        session("c", None, trace("c0")),
    ]  # fmt: skip
    write_trajectories(path, trajectories)
    return path


def test_each_docs_recipe_builds_rows_in_the_form_of_its_trainer(parquet_file):
    made = {"parquet_file": parquet_file}
    exec(blocks("recipes.md"), made)  # noqa: S102 - our own page

    prime, skyrl, areal, tinker = (made[name] for name in ("prime", "skyrl", "areal", "tinker"))
    assert len(prime) == len(areal) == len(tinker) == len(skyrl["rewards"]) == 4
    for one in prime:
        lengths = {len(one[n]) for n in ("token_ids", "mask", "logprobs", "temperatures")}
        assert lengths == {len(one["advantages"])} == {10}
    assert prime[0]["routed_experts"]["shape"] == [10, 2, 3]
    assert not any("routed_experts" in one for one in prime[1:])
    assert [max(one["advantages"]) for one in prime] == [1, 1, 0, 0]
    assert min(prime[2]["advantages"]) == -1
    assert skyrl["rewards"] == [1.0, 1.0, 0.0, 0.5]
    assert sum(skyrl["loss_masks"][3]) == 0
    assert skyrl["is_last_step"] == [False, True, True, True]
    for one in areal:
        shapes = {one[n].shape for n in ("input_ids", "loss_mask", "logprobs", "versions")}
        assert shapes == {(1, 10)}
    assert areal[0]["versions"][0].tolist() == [-1, -1, -1, 3, 3, -1, -1, 4, 4, 4]
    first = tinker[0]
    assert first["model_input"][1:] == first["target_tokens"][:-1].tolist()
    assert first["mask"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert np.allclose(first["logprobs"][first["mask"] == 1], -0.5)


def skyrl_of(tmp_path, *trajectories):
    path = tmp_path / "some.parquet"
    write_trajectories(path, list(trajectories))
    made = {"parquet_file": path}
    exec(blocks("recipes.md"), made)  # noqa: S102 - our own page
    return made["skyrl"]


def test_the_skyrl_recipe_passes_the_routed_experts_of_each_sequence(tmp_path):
    other, cut = rows()[:, ::-1], trace("b0", routed_experts=rows()).cut(4)
    made = skyrl_of(
        tmp_path,
        session("a", 1.0, trace("a0", routed_experts=rows()), trace("a1", routed_experts=other)),
        session("b", 0.0, cut),
    )
    experts = made["rollout_expert_indices"]
    assert [len(one) for one in experts] == [
        len(prompt) + len(response) - 1
        for prompt, response in zip(made["prompt_token_ids"], made["response_ids"], strict=True)
    ]
    assert [
        (one[:9] == own).all()
        for one, own in zip(experts, (rows()[:9], other[:9], rows()[:6]), strict=True)
    ] == [True] * 3
    assert all(one.dtype == np.int16 and one.min() >= 0 for one in experts)
    assert made["is_last_step"] == [False, True, True]


def test_the_skyrl_recipe_passes_no_routed_experts_when_a_sequence_lacks_some(tmp_path):
    whole = session("a", 1.0, trace("a0", routed_experts=rows()))
    for other in (trace("b0"), trace("b0", routed_experts=rows(known=5))):
        made = skyrl_of(tmp_path, whole, session("b", 0.0, other))
        assert made["rollout_expert_indices"] is None


def test_the_trainers_page_example_reads_rows_of_a_parquet_file(parquet_file, capsys):
    seen = []
    page = blocks("trainers.md").split("from bridle.bridges.base import play")[0]
    exec(page, {"parquet_file": parquet_file, "train": lambda *row: seen.append(row)})  # noqa: S102

    assert len(seen) == 4
    assert "bridle/left_out/unknown" in capsys.readouterr().out


def test_the_examples_of_the_traces_and_nemo_pages_run():
    made = {"trajectory": session("a", 1.0, trace())}
    exec(blocks("traces.md"), made)  # noqa: S102
    assert (len(made["turns"]), len(made["nodes"])) == (2, 5)
    exec(blocks("nemo.md").split("from bridle.bridges.base")[0], made)  # noqa: S102
    assert made["answer"]["reward"] == 1.0


class Policy:
    """Takes the calls of NeMo RL's `Policy`."""

    def prepare_for_lp_inference(self):
        pass

    def get_logprobs(self, data):
        return {"logprobs": data["generation_logprobs"]}

    def get_reference_policy_logprobs(self, data):
        return {"reference_logprobs": data["generation_logprobs"]}

    def prepare_for_training(self):
        pass

    def train(self, data, loss_fn, gbs):
        return loss_fn, data, gbs


def test_the_nemo_rl_training_step_of_the_docs_runs():
    made: dict = {"BatchedDataDict": dict}
    exec(blocks("nemo.md").split("run_webserver()")[1], made)  # noqa: S102
    groups = [group(session("a", 1.0, trace("a0")), session("b", 0.0, trace("b0")))]
    loss, batch, size = made["step"](Policy(), "loss", groups, 0, 4)
    # The fields that `ClippedPGLossDataDict` requires.
    assert {"input_ids", "advantages", "prev_logprobs", "reference_policy_logprobs"} < {*batch}
    assert (loss, size) == ("loss", 4)


@pytest.mark.train
@pytest.mark.filterwarnings("default")
def test_the_sft_example_of_the_data_page_changes_the_weights(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8, n], "loss_mask": [0, 0, 0, 1, 1]} for n in (9, 10)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = untrained(tmp_path / "model")
    given = {"data_file": "data.jsonl", "parquet_file": "set.parquet", "out_dir": "learned"}
    paths = {name: str(tmp_path / path) for name, path in given.items()}
    exec(blocks("data.md"), {"model_dir": str(model), **paths})  # noqa: S102 - our own page

    before, after = (load_file(at / "model.safetensors") for at in (model, tmp_path / "learned"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_every_cell_of_the_table_of_trainers_names_a_test():
    page = (ROOT / "docs" / "trainers.md").read_text()
    tests = dict(re.findall(r"^(\d+)\. `(test_\w+)`$", page, re.MULTILINE))
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in tests.values() if f"def {name}(" not in written] == []
    table = [line.split("|")[3:-1] for line in page.splitlines() if line.startswith("| [")]
    assert len(table) == 12
    cells = [cell.strip() for row in table for cell in row if cell.strip() != "no"]
    assert [cell for cell in cells if not re.search(r"\[\d+\]", cell)] == []
    assert {number for cell in cells for number in re.findall(r"\[(\d+)\]", cell)} == tests.keys()


def test_the_bridge_test_example_of_the_trainers_page_passes():
    made = {}
    exec(blocks("../trainers.md"), made)  # noqa: S102 - our own page
    assert made["report"].trained == 64
