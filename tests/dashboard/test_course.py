"""A training's course as curves."""

from bridle.dashboard.overview import training_of

STEP = {
    "step": 1,
    "reward": 0.25,
    "waited_s": 3.0,
    "published_s": 0.1,
    "update": {"logprob_error": 1e-6, "lags": {"0": 10, "2": 30}, "norm": 0.5, "seconds": 2.0},
}


def told(course):
    return training_of(".", course)


def curves(training):
    return {curve.name: list(curve.values) for chart in training.curves for curve in chart}


def test_steps_and_evaluations_share_the_axis():
    course = {
        "steps": [STEP, {"step": 2, "reward": None, "update": None}],
        "evaluations": [{"step": 0, "reward": 0.1}, {"step": 2, "reward": 0.6}],
    }

    found = told(course)

    assert found.steps == [0, 1, 2]
    assert curves(found)["reward"] == [None, 0.25, None]
    assert curves(found)["held_out"] == [0.1, None, 0.6]
    assert curves(found)["logprob_error"] == [None, 1e-6, None]
    assert curves(found)["lag"] == [None, 1.5, None]
    assert found.held_out == [(0, 0.1), (2, 0.6)]
    assert found.rows[0][0] == 2
    assert len(found.labels) == len(found.rows[0][1])


def test_a_chart_without_a_number_is_left_out():
    found = told({"steps": [{"step": 1, "reward": 1.0}], "evaluations": []})

    assert [chart["curves"][0]["name"] for chart in found.charts] == ["reward"]


def test_what_is_no_course_is_none():
    assert told({}) is None
    assert told({"steps": 3, "evaluations": []}) is None
    assert told({"steps": [], "evaluations": []}).charts == []
