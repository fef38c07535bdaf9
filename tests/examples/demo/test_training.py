"""The demo's third part with a model that has learned nothing and cannot in one step."""

import io

import pytest
from examples.demo.main import Part
from examples.demo.model import demo_model
from examples.demo.training import LOOP, training_part
from tests.cli.models import untrained

from bridle.cli.terminal import console


@pytest.mark.timeout(180)
def test_the_demo_s_training_summary_has_success_rates_before_and_after(tmp_path):
    model = untrained(tmp_path / "model")
    lines = [{"task_id": f"q{n}", "reward": [1.0, 0.0, None][n]} for n in range(3)]
    written, before = io.StringIO(), console.file
    console.file = written
    try:
        result = training_part(
            tmp_path / "training",
            model,
            1,
            Part(tmp_path, lines, 1.0),
            loop=LOOP.model_copy(update={"groups_per_step": 1}),
            samples=2,
        )
    finally:
        console.file = before

    assert (result["before"], result["after"], result["rise"]) == (0.5, 0.0, -0.5)
    assert result["fresh_tasks"] == 3
    assert (result["steps"], result["sessions"]) == (1, 2)
    assert result["updates"] == 0  # no session succeeded: there is nothing to compare
    assert result["rewards"] == [0.0]
    assert "held-out tasks: 50.0% at step 0, 0.0% at step 1 (3 sessions)" in written.getvalue()
    assert (tmp_path / "training" / "course.json").is_file()


@pytest.mark.train
@pytest.mark.timeout(1200)
def test_a_short_training_of_the_demo_model_raises_its_reward(tmp_path):
    model = demo_model()
    lines = [{"task_id": f"q{n}", "reward": float(n % 6 == 0)} for n in range(64)]

    result = training_part(tmp_path / "training", model, 18, Part(tmp_path, lines, 1.0))

    assert result["updates"] == 18
    assert result["logprob_error"] < 1e-4
    first, last = (sum(result["rewards"][at]) / 5 for at in (slice(5), slice(-5, None)))
    assert last > first + 0.05, result["rewards"]
    assert (tmp_path / "training" / "curve.png").read_bytes().startswith(b"\x89PNG")
