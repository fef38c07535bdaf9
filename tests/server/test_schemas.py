import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.server.house import body, submission

from bridle.config import Task
from bridle.errors import ConfigError
from bridle.server.http import error_json
from bridle.server.schemas import GroupOptions, Submission, TaskBatch
from bridle.server.settings import ServerSettings, SubmissionPolicy


def test_submission_splits_into_task_and_group_options():
    task, terms = submission("a", 3, dispatch_priority=7, metadata={"k": 1}).split()
    assert type(task) is Task
    assert (task.task_id, task.num_samples, task.metadata) == ("a", 3, {"k": 1})
    assert terms == GroupOptions(dispatch_priority=7, retry_backoff_s=0.0)
    assert Task.model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize(
    "wrong",
    [
        {"dispatch_priority": 101},
        {"callback_url": "ftp://x/"},
        {"callback_url": "/x"},
        {"callback_url": "http://h/\x00"},
        {"num_samples": 0},
        {"num_samples": 10_001},
        {"min_completed_fraction": -0.1},
        {"max_attempts": 0},
        {"nonsense": 1},
        {"budgets": {"agent_s": -1}},
    ],
)
def test_an_invalid_submission_field_is_refused_by_name(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Submission.model_validate(body() | wrong)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValidationError):
        TaskBatch.model_validate({"tasks": []})


@given(st.text(), st.none() | st.text())
def test_error_has_its_message_in_both_fields(message, param):
    result = error_json("code", message, param=param)
    assert result["detail"] == result["error"]["message"] == message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_local_runtime_is_permitted_on_loopback(host):
    assert ServerSettings(host=host).checked().permits.local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "server.example"])
def test_local_runtime_is_refused_off_loopback(host):
    assert not ServerSettings(host=host).checked().permits.local


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_version_lag": 2}, "max_version_lag needs groups_per_version"),
        ({"groups_per_version": 2}, "groups_per_version needs max_version_lag"),
        ({"on_stale": "cancel"}, "needs max_version_lag"),
    ],
)
def test_a_limit_of_staleness_that_would_do_nothing_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        ServerSettings(**given).checked()


def test_a_limit_of_staleness_holds_groups_back_or_cancels_sessions():
    held = ServerSettings(max_version_lag=2, groups_per_version=1)
    cancelled = ServerSettings(max_version_lag=2, on_stale="cancel")
    assert held.checked().max_version_lag == cancelled.checked().max_version_lag == 2


def test_local_runtime_permission_cannot_be_set_by_configuration():
    given = ServerSettings(host="0.0.0.0", permits=SubmissionPolicy(local=True))
    assert not given.checked().permits.local
