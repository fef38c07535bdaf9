"""Sessions for a trainer without asyncio."""

import json

import pytest
from examples.demo.lookups import lookups
from examples.demo.policy import lookup_task

from bridle.bridges.local import LocalSessions
from bridle.config import BranchingSpec
from bridle.errors import ConfigError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def script(tmp_path):
    """Answers the first of two lookups rightly."""
    first, second = lookups(2, seed=3)
    turns = {first.instruction: first.answer, second.instruction: "nothing"}
    path = tmp_path / "script.json"
    conversations = [
        {"when": {"user_contains": said}, "turns": [{"content": answer}]}
        for said, answer in turns.items()
    ]
    path.write_text(json.dumps({"conversations": conversations}))
    return f"scripted:{path}"


def test_local_sessions_are_returned_in_task_order_with_the_set_version(script, tmp_path):
    one, other = (lookup_task(task, tmp_path / "files") for task in lookups(2, seed=3))

    with LocalSessions(script, tmp_path / "run", tokenizer="builtin") as sessions:
        played = sessions.play([other, one, other])
        sessions.set_version(7)
        again = sessions.play([one])

    assert {int(trace.versions.max()) for trace in again[0].traces} == {7}
    assert [session.reward for session in [*played, *again]] == [0.0, 1.0, 0.0, 1.0]
    assert all(session.status == "COMPLETED" for session in played)
    assert len({session.session_id for session in [*played, *again]}) == 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["totals"]["sessions"] == 4


def test_local_sessions_with_a_missing_script_raise_and_leave_no_capture_file(tmp_path):
    sessions = LocalSessions(f"scripted:{tmp_path / 'gone'}", tmp_path / "run", tokenizer="builtin")
    with pytest.raises(ConfigError, match="gone"):
        sessions.__enter__()
    assert not (tmp_path / "run" / "capture.sqlite").exists()


def test_playing_a_task_with_an_unknown_harness_raises_a_config_error(script, tmp_path):
    [task] = (lookup_task(one, tmp_path / "files") for one in lookups(1, seed=3))
    wrong = task.model_copy(update={"agent": task.agent.model_copy(update={"harness": "nobody"})})
    with (
        LocalSessions(script, tmp_path / "run", tokenizer="builtin") as sessions,
        pytest.raises(ConfigError, match="nobody"),
    ):
        sessions.play([wrong])


def test_a_task_with_branching_is_refused_by_local_sessions(script, tmp_path):
    [task] = (lookup_task(one, tmp_path / "files") for one in lookups(1, seed=3))
    with (
        LocalSessions(script, tmp_path / "run", tokenizer="builtin") as sessions,
        pytest.raises(ConfigError, match="branching"),
    ):
        sessions.play([task.model_copy(update={"branching": BranchingSpec(at=(1,))})])
