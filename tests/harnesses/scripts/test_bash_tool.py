import runpy
import time
from types import SimpleNamespace

import pytest

from bridle.harnesses.base import SCRIPTS
from bridle.harnesses.sdk_agents import TOOL


@pytest.fixture
def tool():
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS / TOOL)))


def test_bash_tool_gives_what_the_command_printed_and_its_exit_code(tool):
    assert tool.bash("echo out; echo err >&2; exit 3") == "out\nerr\n[exit code: 3]"
    assert tool.bash("true") == "[exit code: 0]"


def test_of_long_output_the_middle_is_left_out(tool):
    text = tool.bash("printf 'a%.0s' {1..40000}; printf end")
    assert "[10003 characters left out]" in text
    assert text.endswith("end\n[exit code: 0]")


def test_a_command_that_hangs_is_stopped_with_all_it_started(tool):
    tool.bash.__globals__["LIMIT_S"] = 1.5
    began = time.monotonic()
    assert tool.bash("sleep 60 & echo on; sleep 60") == "on\n[stopped after 1.5 s]"
    assert time.monotonic() - began < 50


def test_binary_output_is_named_as_binary(tool):
    assert tool.bash(r"printf '\xff'") == "�\n[exit code: 0]"
