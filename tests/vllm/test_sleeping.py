"""Releases of a real vLLM under load, by the benchmark that also runs on a GPU."""

import json
import os
import subprocess
import sys

import pytest

from .serving import ROOT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.needs("weight versions"),
    pytest.mark.timeout(600),
]


def test_sessions_continue_over_vllm_sleep_cycles_with_exact_token_versions():
    command = [sys.executable, "-m", "benchmarks.sleeping", "--cycles", "3", "--callers", "4"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )

    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["device"] == "CPU"
    assert report["freed_gib"] is None
    assert report["versions"] == [0, 1, 2, 3]
    assert report["tokens"] >= report["replies"] > 0
    assert report["wrong_versions"] == 0
    assert report["rms_own"] < 1e-3 < report["rms_other"]
