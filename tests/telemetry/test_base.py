"""One stream of events feeds every tracker, and no tracker can harm a run."""

import json
import threading

import pytest
from structlog.testing import capture_logs
from tests.cli.conftest import say  # noqa: F401 - a fixture
from tests.telemetry.recorder import Recorder

from bridle import telemetry
from bridle.capture.records import Outcome, SessionRecord
from bridle.errors import ConfigError
from bridle.node.base import SessionEnded
from bridle.node.results import result_of
from bridle.telemetry import base
from bridle.telemetry.base import flatten
from bridle.trajectory.sample import Trajectory
from bridle.types import SessionStatus

RECORDER = "tests.telemetry.recorder:Recorder"
BROKEN = "tests.telemetry.recorder:Broken"
REFUSED = "tests.telemetry.recorder:Refused"


def test_a_tracker_receives_a_run_s_metrics_samples_stages_and_calls(say, run_of_two):  # noqa: F811
    done = say(*run_of_two, "--json", "--telemetry", RECORDER)

    assert done.code == 0, done.err
    tracker = Recorder.made[-1]
    assert tracker.closed
    assert tracker.folder == run_of_two[-1]
    assert [(axis, step) for axis, step, _ in tracker.values] == [("rollout", 1), ("rollout", 2)]
    last = tracker.values[-1][2]
    assert last["rollout/reward_mean"] == last["rollout/completed"] == 1.0
    assert last["rollout/tokens_trained"] == last["rollout/tokens_captured"] > 0
    assert [row["prompt"] for row in tracker.rows] == ["2 + 2?"] * 2
    assert [row["reply"] for row in tracker.rows] == ["Four."] * 2
    for ended in tracker.ended:
        stages = [stage for stage, _ in ended.stages]
        assert stages[0] == "REGISTERED"
        assert stages[-2:] == ["EVALUATING", "COMPLETED"]
        first, second = ended.calls()
        ((tool, until),) = first.tools
        assert (tool, until, second.tools) == ("add", second.start, [])
        assert first.end <= until


def test_failing_tracker_is_removed_and_the_run_continues(say, run_of_two):  # noqa: F811
    done = say(*run_of_two, "--json", "--telemetry", f"{BROKEN},{RECORDER}")

    assert done.code == 0, done.err
    assert len(Recorder.made[-1].values) == 2
    assert done.err.count("tracker_failed") == 1
    assert "OSError('the service is down')" in done.err


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("wandbb", "unknown tracker 'wandbb'; known: mlflow, otel, tensorboard, trackio, wandb"),
        ("tests.telemetry.recorder:No", "cannot be loaded"),
        (REFUSED, "telemetry tests.telemetry.recorder:Refused: ValueError: no API key"),
    ],
)
def test_run_does_not_start_if_a_tracker_fails_to_open(
    say,  # noqa: F811
    run_of_two,
    named,
    message,
):
    done = say(*run_of_two, "--telemetry", named)

    assert done.code == 2
    assert message in done.err
    assert not (run_of_two[-1] / "capture.sqlite").exists()


def test_a_missing_tracker_package_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setitem(telemetry.PACKAGES, "wandb", "not_installed")

    with pytest.raises(ConfigError, match=r"package not_installed: run pip install .*\[wandb\]"):
        telemetry.check(["wandb"])


def test_each_step_and_evaluation_of_a_training_is_logged_once(tmp_path):
    steps = [{"step": 1, "reward": 0.5, "update": {"loss": 0.1, "lags": {"0": 7}}, "left_out": {}}]
    with telemetry.open_trackers([RECORDER], tmp_path, {}) as stream:
        stream.training([], [{"step": 0, "reward": 0.25}])
        stream.training(steps, [{"step": 0, "reward": 0.25}])
        steps.append({"step": 2, "reward": None, "update": None, "left_out": {"stale": 3}})
        stream.training(steps, [{"step": 0, "reward": 0.25}])

    assert Recorder.made[-1].values == [
        ("eval", 0, {"eval/reward": 0.25}),
        ("train", 1, {"train/reward": 0.5, "train/update/loss": 0.1, "train/update/lags/0": 7.0}),
        ("train", 2, {"train/left_out/stale": 3.0}),
    ]


def test_flattened_metrics_leave_out_text_lists_and_null():
    values = {"a": 1, "b": {"c": True, "d": None}, "e": "text", "f": [1, 2]}

    assert flatten(values) == {"a": 1.0, "b/c": 1.0}


def test_a_config_file_selects_trackers(say, run_of_two, tmp_path):  # noqa: F811
    (tmp_path / "config.toml").write_text(f"telemetry = {json.dumps([RECORDER])}\n")
    count = len(Recorder.made)

    assert say(*run_of_two, "--config", tmp_path / "config.toml").code == 0
    assert len(Recorder.made) == count + 1


def ended(unknown=None, fork=None):
    """A session of a cluster that was cancelled before it began, its numbers those given."""
    record = SessionRecord("s", 1.0, "t", {"task_metadata": {"fork": fork}})
    outcome = Outcome("s", SessionStatus.CANCELLED, 2.0, None)
    stats = {"stats": {"unknown": unknown or {}}}
    trajectory = Trajectory("s", "CANCELLED", (), None, None, stats)
    return SessionEnded(result_of(record, outcome, trajectory), None)


def test_metric_names_contain_no_text_from_requests_or_tasks(tmp_path):
    with telemetry.open_trackers([RECORDER], tmp_path, {}) as stream:
        stream.on_event(ended(unknown={"a\nb": 2, "c" * 10_000: 1}, fork={"x\ny": 1e300}))

    ((_, _, values),) = Recorder.made[-1].values
    assert values["rollout/unknown"] == 3
    assert not [name for name in values if "\n" in name or len(name) > 100]


def test_a_session_without_reported_stages_has_its_final_status_as_stage(tmp_path):
    with telemetry.open_trackers([RECORDER], tmp_path, {}) as stream:
        stream.on_event(ended())

    assert [stage for stage, _ in Recorder.made[-1].ended[0].stages] == ["CANCELLED"]


class Hanging(base.Tracker):
    """A tracker whose service answers nothing until it may."""

    free = threading.Event()
    sessions = 0

    def session(self, ended):
        self.free.wait(10)
        self.sessions += 1


def test_a_hanging_tracker_queues_a_bounded_number_of_sessions(monkeypatch):
    monkeypatch.setattr(base, "SESSIONS_BEHIND", 10)
    monkeypatch.setattr(base, "MOST_BEHIND", 20)
    stream = base.Telemetry({"hanging": (tracker := Hanging())})
    for _ in range(100):
        stream.on_event(ended())
    tracker.free.set()
    with capture_logs() as logs:
        stream.close()

    assert 0 < tracker.sessions < 10
    assert [one["event"] for one in logs] == ["telemetry_behind"]


def test_engine_passwords_are_removed_from_the_tracker_s_config(tmp_path):
    given = {"engines": ["http://u:secret@host:1/v1", "sglang:http://:secret@h"], "tokenizer": None}
    with telemetry.open_trackers([RECORDER], tmp_path, given):
        pass

    assert Recorder.made[-1].config == {
        "engines": ["http://host:1/v1", "sglang:http://h"],
        "tokenizer": None,
    }
