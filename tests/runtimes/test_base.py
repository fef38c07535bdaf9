import pytest

from bridle.runtimes.base import ExecResult


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "ok"),
    [(0, False, True), (0, True, False), (1, False, False), (None, False, False)],
)
def test_ok_means_exit_code_0_in_time(exit_code, timed_out, ok):
    assert ExecResult(exit_code, None, timed_out, b"", b"", False, 0.1).ok is ok
