"""Settings come from files and flags: a mistake is named."""

import pytest
from pydantic import ValidationError

from bridle.training.settings import GrpoSettings, LoopSettings


def test_a_field_that_there_is_not_is_refused():
    with pytest.raises(ValidationError, match="learningrate"):
        GrpoSettings.model_validate({"learningrate": 1e-3})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (GrpoSettings, "learning_rate", 0),
        (GrpoSettings, "clip_low", 1.0),
        (GrpoSettings, "temperature", 0),
        (GrpoSettings, "packing", "dense"),
        (LoopSettings, "steps", 0),
        (LoopSettings, "max_lag", -1),
    ],
)
def test_values_that_make_no_sense_are_refused(kind, field, value):
    with pytest.raises(ValidationError, match=field):
        kind.model_validate({field: value})


def test_the_defaults_alternate_by_one_step_and_do_not_reuse_a_batch():
    assert LoopSettings().max_lag == 1
    assert GrpoSettings().updates_per_batch == 1
