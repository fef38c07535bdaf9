import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.server.house import body, submission

from bridle.config import Task
from bridle.server.schemas import Batch, Submission, Terms, error_json


def test_a_submission_is_a_task_and_its_terms():
    task, terms = submission("a", 3, dispatch_priority=7, metadata={"k": 1}).split()
    assert type(task) is Task
    assert (task.task_id, task.num_samples, task.metadata) == ("a", 3, {"k": 1})
    assert terms == Terms(dispatch_priority=7, retry_backoff_s=0.0)
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
def test_wrong_values_are_named(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Submission.model_validate(body() | wrong)


def test_a_batch_is_bounded():
    with pytest.raises(ValidationError):
        Batch.model_validate({"tasks": []})


@given(st.text(), st.none() | st.text())
def test_an_error_says_the_same_to_both_kinds_of_client(message, param):
    told = error_json("code", message, param=param)
    assert told["detail"] == told["error"]["message"] == message
