import pytest

from bridle.harnesses.base import crash
from bridle.types import Cause


@pytest.mark.parametrize(
    ("exit_code", "signal", "cause"),
    [(0, None, None), (1, None, Cause.HARNESS_CRASH), (None, 9, Cause.HARNESS_CRASH)],
)
def test_only_exit_code_0_is_no_crash(exit_code, signal, cause):
    assert crash(exit_code, signal) is cause
