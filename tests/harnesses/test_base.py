import pytest

from bridle.harnesses import open_harness
from bridle.harnesses.base import crash, places_of
from bridle.types import Cause


@pytest.mark.parametrize(
    ("exit_code", "signal", "cause"),
    [(0, None, None), (1, None, Cause.HARNESS_CRASH), (None, 9, Cause.HARNESS_CRASH)],
)
def test_only_exit_code_0_is_no_crash(exit_code, signal, cause):
    assert crash(exit_code, signal) is cause


def test_a_harness_is_in_the_sandbox_unless_its_file_says_more():
    assert places_of(open_harness("codex")) == ("sandbox",)
    assert places_of(open_harness("mini_swe_agent")) == ("sandbox", "host")
