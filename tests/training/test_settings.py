"""Settings come from files and flags: a mistake is named."""

import pytest
from pydantic import ValidationError

from bridle.training.settings import GrpoSettings, LoopSettings


def test_an_unknown_training_setting_is_refused_by_name():
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
def test_training_settings_out_of_range_are_refused_by_name(kind, field, value):
    with pytest.raises(ValidationError, match=field):
        kind.model_validate({field: value})


def test_default_settings_allow_a_lag_of_1_and_one_update_per_batch():
    assert LoopSettings().max_lag == 1
    assert GrpoSettings().updates_per_batch == 1
