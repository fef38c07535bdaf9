"""Verbs that talk to a server share their errors and flags."""

import pytest


@pytest.mark.timeout(40)
@pytest.mark.parametrize("verb", [["status"], ["cancel", "a"], ["watch", "a"]])
def test_a_server_that_is_not_there_is_said_in_one_line(say, verb):
    said = say(*verb, "--server", "http://127.0.0.1:1")
    assert (said.code, said.err.count("\n")) == (3, 1)
    assert "http://127.0.0.1:1 cannot be reached" in said.err
