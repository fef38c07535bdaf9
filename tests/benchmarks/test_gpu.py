"""The benchmark of the reference trainer runs whole where there is no GPU, and counts right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.training.made import tiny_model, trace
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", None),
        ("CPU", None),
    ],
)
def test_peak_flops_are_reported_for_known_devices_only(name, peak):
    assert gpu.peak_of(name) == peak


def test_computed_training_flops_equal_torch_s_count():
    model = tiny_model()
    config = model.config
    one = trace([2] * 30, [3] * 10)
    ids = torch.tensor([[2] * 30 + [3] * 10])
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=10)

    # torch does not count attention on a CPU: two products, of which the causal half is needed.
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 40**2
    assert gpu.operations(config, [one]) == 3 * (counted.get_total_flops() + attention)


@pytest.mark.train
@pytest.mark.timeout(300)
def test_the_gpu_benchmark_runs_on_a_cpu_and_reports_bridle_and_trl():
    alone = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | alone
    )

    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    assert table[0] == "device: CPU; context 256"
    assert (report["device"], report["trl"]) == ("CPU", True)
    [model] = report["models"]
    assert model["rollouts"]["sampled"] == 8 * 8
    assert model["rollouts"]["decoder"] == "slots"
    printed = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [one.get("trainer") for one in printed] == [
        None,
        *(r["trainer"] for r in model["updates"]),
    ]
    assert len(model["updates"]) == len(gpu.SETTINGS) + 1
    assert sum(line.startswith(("| bridle", "| trl")) for line in table) == len(model["updates"])
    for row in model["updates"]:
        assert row["tokens_s"] == pytest.approx(model["rollouts"]["tokens"] / row["seconds"])
        assert row["mfu"] is None
        if row["trainer"] == "bridle":
            exact = row["dtype"] == "float32"
            assert row["fidelity"]["faithful"] == exact
            assert row["fidelity"]["rms"] < (2e-4 if exact else 0.1)


def test_the_gpu_benchmark_measures_only_the_chosen_dtypes_and_trainers():
    [row] = gpu.measure("toy", gpu.Plan(64, dtypes=["float32"], trainers=["bridle"]))["updates"]
    assert (row["trainer"], row["dtype"]) == ("bridle", "float32")
    assert row["fidelity"]["faithful"]
