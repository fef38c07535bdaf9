"""The curve as text; the picture is looked at by `make test-train`, which has matplotlib."""

import pytest

from bridle.training.loop import Course, draw_png, draw_text, rewards_of, smoothed

COURSE = Course(
    steps=[{"step": n, "reward": None if n == 2 else n / 10} for n in range(1, 11)],
    evaluations=[{"step": 0, "reward": 0.1}, {"step": 10, "reward": 0.9, "half_width": 0.08}],
)


def test_steps_without_a_reward_have_no_point_in_the_training_curve():
    assert [step for step, _ in rewards_of(COURSE)] == [1, 3, 4, 5, 6, 7, 8, 9, 10]


def test_the_running_mean_of_a_curve_uses_earlier_values_only():
    assert smoothed([1, 2, 3, 4], width=2) == [1, 1.5, 2.5, 3.5]


def test_columns_of_a_text_chart_are_as_high_as_their_values():
    lines = draw_text([0.0, 0.25, 0.5, 1.0], height=2)

    assert lines == ["1.00 ┤   █", "0.50 ┤ ▄██", "     └────"]


def test_values_above_one_stretch_the_text_chart_and_no_values_draw_no_lines():
    assert draw_text([2.0, 4.0], height=1) == ["4.00 ┤▄█", "     └──"]
    assert draw_text([]) == []


@pytest.mark.train
def test_the_training_curve_is_drawn_as_a_png(tmp_path):
    path = draw_png(tmp_path / "deep" / "curve.png", COURSE, title="a curve")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000
