"""`bridle harness check` on a harness that needs no installation."""

from bridle.cli.check import check_harness


def test_a_harness_that_never_calls_the_model_is_told_apart():
    report = check_harness("command")

    assert report["status"] == "ERROR"
    assert report["cause"] == "harness_no_call"
    assert report["model calls"] == 0
