"""`bridle harness check` on harnesses that need no installation."""

import pytest

from bridle.cli.check import check_harness


@pytest.mark.parametrize("name", ["command", "function"])
def test_a_harness_that_makes_its_tool_call_works(name):
    report = check_harness(name)

    assert report["works"]
    assert (report["status"], report["tool call"]) == ("COMPLETED", "made")
    assert (report["model calls"], report["merge ratio"]) == (3, 1.0)


@pytest.mark.harnesses
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "what"), [("aider", "edit"), ("mini_swe_agent", "tool call")])
def test_a_program_that_ends_in_a_way_of_its_own_works(name, what):
    report = check_harness(name)

    assert report["works"], report
    assert report[what] == "made"
